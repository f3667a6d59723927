"""The tables of docs/results.toml, and the runs that they need."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs"
"""The folder of the tables, of what was measured and of the pages."""
INHERITED = ("metric", "unit", "vocabulary", "settings", "steps", "test")
"""Fields that a table takes from the one that it is `like`; settings of its own come after them."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a system of a table with a seed."""

    table: Table
    system: str
    seed: int

    @property
    def recipe(self) -> str:
        """The recipe of the system."""
        return self.table.recipe.format(self.table.systems[self.system])

    @property
    def teacher(self) -> Run | None:
        """The run whose activations a distillation learns; a teacher in its students' table has none."""
        return None if self.table.teacher == self.recipe else self._find(self.table.teacher)

    @property
    def init_from(self) -> Run | None:
        """The run that this one starts from."""
        return self._find(self.table.init_from)

    @property
    def name(self) -> str:
        """The recipe, with the teacher's where it has one."""
        return f"{self.recipe} of {self.teacher.recipe}" if self.teacher else self.recipe

    @property
    def directory(self) -> pathlib.Path:
        """Its place in the work directory."""
        return pathlib.Path(
            self.name.replace(" of ", "_of_").replace(":", "/"), f"seed_{self.seed}"
        )

    def _find(self, recipe: str) -> Run | None:
        """Returns the run of another table with this recipe, the same argument and seed."""
        name = recipe.format(self.table.systems[self.system])
        runs = (run for table in TABLES.values() for run in table.runs([self.seed]))
        return next(run for run in runs if run.recipe == name) if recipe else None


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of systems.

    Attributes:
      title: heading of its section.
      about: what is trained on what.
      recipe: the recipe of all systems, which take the place of ``{}``.
      systems: argument of the recipe by the name in the table; the first is what others are compared with.
      follows: what follows from it, in a sentence; without one it becomes a row of the last table.
      note: explanations.
      metric: key of the metric in the log of a run, or ``test/TASK/METRIC``; without one its speed counts.
      unit: heading of the metric's column.
      computed: whether `ledger_computed` computes the metric, and nothing is trained.
      seeds: how many.
      form: how its numbers are written.
      paper: what the paper reports, by name in the table; a pair has its own value of the first system.
      source: which paper, table and metric these are, and how they are known.
      comparable: whether the systems have learned enough for the paper's order to be looked for.
      vocabulary: file of the vocabulary in the work directory.
      settings: what differs from the recipes.
      steps: number of steps, if it differs from the recipes'.
      test: options of `eval` for the test split; empty: the metric is that of the recipe's split.
      teacher: recipe of the teacher that a distillation needs.
      init_from: recipe of the pre-trained run.
    """

    title: str
    about: str
    recipe: str
    systems: Mapping[str, str]
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
        """Yields the runs of all systems."""
        for seed in range(self.seeds) if seeds is None else seeds:
            yield from (Run(self, system, seed) for system in self.systems)

    def published_difference(self, system: str) -> float | None:
        """Returns the paper's difference between a system and the first one; None: it reports none."""
        first, *_ = self.systems
        if system == first or (value := self.paper.get(system)) is None:
            return None
        value, baseline = value if isinstance(value, list) else (value, self.paper[first])
        return value - baseline

    def all_settings(self) -> list[str]:
        """Returns what differs from the recipes, the number of steps included."""
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
        other = fields.pop("like", None)
        inherited: dict[str, Any] = {k: getattr(tables[other], k) for k in INHERITED if other}
        settings = [*inherited.get("settings", ()), *fields.get("settings", ())]
        tables[name] = Table(**(inherited | fields | {"settings": settings}))
    return tables


TABLES = read_tables(RESULTS / "results.toml")
