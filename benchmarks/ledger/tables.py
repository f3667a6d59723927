"""Reads the tables of docs/results.toml, and lists the runs that they need."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "docs"
"""The folder with the definitions of the tables, the measurements and the pages."""
INHERITED = ("metric", "unit", "vocabulary", "settings", "steps", "test")
"""The fields that a table inherits from the table that its field ``like`` names.

If both tables have settings, a table's own settings come last.
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run of one system of a table with one seed."""

    table: Table
    system: str
    seed: int

    @property
    def recipe(self) -> str:
        """The recipe of the run's system."""
        return self.table.recipe.format(self.table.systems[self.system])

    @property
    def teacher(self) -> Run | None:
        """The run of the teacher if this run is a distillation, or None.

        A table may also contain the teacher as a system, which has no teacher itself.
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
        """The run's name in docs/results.json.

        The name consists of the run's recipe and, for a distillation, the teacher's recipe.
        """
        if self.teacher:
            return f"{self.recipe} of {self.teacher.recipe}"
        return self.recipe

    @property
    def directory(self) -> pathlib.Path:
        """The directory of the run, relative to the work directory."""
        name = self.name.replace(" of ", "_of_").replace(":", "/")
        return pathlib.Path(name, f"seed_{self.seed}")

    def _find(self, recipe: str) -> Run | None:
        """Returns the run with a recipe, and with the argument and the seed of this run.

        The result is None if `recipe` is empty.
        """
        if not recipe:
            return None
        name = recipe.format(self.table.systems[self.system])
        runs = (run for table in TABLES.values() for run in table.runs([self.seed]))
        return next(run for run in runs if run.recipe == name)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of systems that are compared.

    Attributes:
      title: the heading of the table's section.
      about: a description of what is trained, on which data, and how the result is measured.
      recipe: the recipe of all systems. ``{}`` stands for the argument of a system.
      systems: the arguments of the recipe, by the names of the systems in the table. All other
        systems are compared with the first system.
      rows: the heading of the first column.
      follows: the conclusion from the table. A table without a conclusion becomes a row of the last
        table.
      note: explanations of the table.
      metric: the key of the metric in the log of a run, or ``test/TASK/METRIC``. If `metric` is
        empty, the table shows speeds.
      unit: the heading of the metric's column.
      computed: whether `ledger.computed` computes the metric and nothing is trained.
      seeds: the number of seeds.
      form: the format of the numbers in the table.
      paper: the values that the paper reports, by the names of the systems in the table. If a value
        is a pair, it contains the value of the system and the value of the first system.
      source: the paper that reports the metric, and how the values of the paper are known.
      comparable: whether the systems have learned enough to compare their order with the paper's
        order.
      vocabulary: the file of the vocabulary, relative to the work directory.
      settings: settings that differ from the settings of the recipes.
      steps: the number of training steps, if it differs from the number in the recipes.
      test: the options of `eval` for the test split. If `test` is empty, the metric is measured on
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
        """Yields the runs of all systems with the given seeds, or with all seeds of the table."""
        for seed in range(self.seeds) if seeds is None else seeds:
            yield from (Run(self, system, seed) for system in self.systems)

    def published_difference(self, system: str) -> float | None:
        """Returns the published difference between a system and the first system of the table.

        The result is None if `system` is the first system, or if the paper does not report it.
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
        """Returns all settings that differ from the settings of the recipes, including `steps`."""
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
