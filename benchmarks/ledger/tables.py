"""Reads the tables of docs/results.toml, and says which runs they need."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "docs"
"""The folder with the definitions of the tables, the measurements and the pages."""
INHERITED = ("metric", "unit", "vocabulary", "settings", "steps", "test")
"""Fields that a table takes over from another one, which its field ``like`` names.

A table's own settings come after those of the other table.
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a system of a table, with a seed."""

    table: Table
    system: str
    seed: int

    @property
    def recipe(self) -> str:
        """The recipe of the system."""
        return self.table.recipe.format(self.table.systems[self.system])

    @property
    def teacher(self) -> Run | None:
        """The run whose activations a distillation learns, or None if there is no distillation.

        The teacher itself may be a system of the same table.
        """
        if self.table.teacher == self.recipe:
            return None
        return self._find(self.table.teacher)

    @property
    def init_from(self) -> Run | None:
        """The pre-trained run that this run starts from, or None."""
        return self._find(self.table.init_from)

    @property
    def name(self) -> str:
        """The name in docs/results.json: the recipe, and the teacher's recipe if there is one."""
        if self.teacher:
            return f"{self.recipe} of {self.teacher.recipe}"
        return self.recipe

    @property
    def directory(self) -> pathlib.Path:
        """The directory of the run, relative to the work directory."""
        name = self.name.replace(" of ", "_of_").replace(":", "/")
        return pathlib.Path(name, f"seed_{self.seed}")

    def _find(self, recipe: str) -> Run | None:
        """Returns the run of another table with this recipe, the same argument and the same seed.

        It returns None if `recipe` is empty.
        """
        if not recipe:
            return None
        name = recipe.format(self.table.systems[self.system])
        runs = (run for table in TABLES.values() for run in table.runs([self.seed]))
        return next(run for run in runs if run.recipe == name)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of systems.

    Attributes:
      title: the heading of its section.
      about: what is trained, on which data, and how it is measured.
      recipe: the recipe of all systems. A system's argument takes the place of ``{}``.
      systems: the arguments of the recipe, by the names of the systems in the table. The others are
        compared with the first system.
      rows: the heading of the first column.
      follows: what follows from the table. A table without it becomes a row of the last table.
      note: explanations.
      metric: the key of the metric in the log of a run, or ``test/TASK/METRIC``. If it is empty,
        the table shows speeds.
      unit: the heading of the metric's column.
      computed: whether `ledger.computed` computes the metric and nothing is trained.
      seeds: the number of seeds.
      form: the format of its numbers.
      paper: the values that the paper reports, by the names in the table. A pair has a value for
        the system and one for the first system.
      source: which paper reports which metric, and how its values are known.
      comparable: whether the systems have learned enough to be compared with the paper's order.
      vocabulary: the file of the vocabulary, relative to the work directory.
      settings: settings that differ from those of the recipes.
      steps: the number of steps, if it differs from that of the recipes.
      test: the options of `eval` for the test split. If there are none, the metric is measured on
        the evaluation split of the recipe.
      teacher: the recipe of the teacher, for distillations.
      init_from: the recipe of the pre-trained run that the runs start from.
    """

    title: str
    about: str
    recipe: str
    systems: Mapping[str, str]
    rows: str = "system"
    follows: str = ""
    note: str = ""
    metric: str = ""
    unit: str = ""
    computed: bool = False
    seeds: int = 3
    form: str = ".1f"
    paper: Mapping[str, float | list[float]] = dataclasses.field(default_factory=dict)
    source: str = ""
    comparable: bool = True
    vocabulary: str = ""
    settings: Sequence[str] = ()
    steps: int | None = None
    test: Sequence[str] = ()
    teacher: str = ""
    init_from: str = ""

    def runs(self, seeds: Sequence[int] | None = None) -> Iterator[Run]:
        """Yields the runs of all systems, with these seeds or with all seeds of the table."""
        for seed in range(self.seeds) if seeds is None else seeds:
            yield from (Run(self, system, seed) for system in self.systems)

    def published_difference(self, system: str) -> float | None:
        """Returns the paper's difference between a system and the first one.

        It returns None for the first system, and if the paper does not report the system.
        """
        first, *_ = self.systems
        value = self.paper.get(system)
        if system == first or value is None:
            return None
        if isinstance(value, list):
            value, baseline = value
        else:
            baseline = self.paper[first]
        return value - baseline

    def all_settings(self) -> list[str]:
        """Returns all settings that differ from those of the recipes, including `steps`."""
        if self.steps is None:
            return list(self.settings)
        schedule = "training.optimizer.learning_rate"
        return [
            *self.settings,
            f"training.steps={self.steps}",
            f"training.save_every={self.steps}",
            f"{schedule}.total_steps={self.steps}",
            f"{schedule}.warmup_steps={self.steps // 10}",
        ]


def read_tables(path: pathlib.Path) -> dict[str, Table]:
    """Returns the tables of a file by their names."""
    tables: dict[str, Table] = {}
    for name, fields in tomllib.loads(path.read_text(encoding="utf-8")).items():
        inherited: dict[str, Any] = {}
        if "like" in fields:
            other = tables[fields.pop("like")]
            inherited = {field: getattr(other, field) for field in INHERITED}
        settings = [*inherited.get("settings", ()), *fields.get("settings", ())]
        tables[name] = Table(**(inherited | fields | {"settings": settings}))
    return tables


TABLES = read_tables(RESULTS / "results.toml")
