"""The tables of docs/results.md: which recipes they compare, by which metric, and what the papers say."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: a system of a table with a seed."""

    system: str
    recipe: str
    seed: int
    metric: str
    curve: str
    vocabulary: str | None = None
    settings: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    teacher: Run | None = None
    init_from: Run | None = None

    @property
    def name(self) -> str:
        """The recipe, with the teacher's where it has one."""
        return f"{self.recipe} of {self.teacher.recipe}" if self.teacher else self.recipe

    @property
    def directory(self) -> pathlib.Path:
        """Where it lies in the work directory."""
        return pathlib.Path(
            self.name.replace(" of ", "_of_").replace(":", "/"), f"seed_{self.seed}"
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of systems.

    Attributes:
      title: heading of its section.
      about: what is trained on what, in a sentence or two.
      recipe: the recipe of all systems, which take the place of ``{}``.
      systems: argument of the recipe by the name in the table; the first is what others are compared with.
      metric: key of the metric in the log of a run, or ``test/TASK/METRIC``.
      unit: heading of the metric's column.
      seeds: how many.
      lower: whether lower is better.
      form: how its numbers are written.
      curve: key of what the curves show.
      paper: what the paper reports, by name in the table.
      source: which paper, table and metric these are, and how they are known.
      vocabulary: file of the vocabulary in the work directory.
      test: options of `eval` for the test split; empty: the metric is that of the recipe's split.
      settings: what differs from the recipes.
      teacher: recipe of the teacher that a distillation needs.
      init_from: recipe of the pre-trained run.
    """

    title: str
    about: str
    recipe: str
    systems: Mapping[str, str]
    metric: str
    unit: str
    seeds: int = 3
    lower: bool = False
    form: str = ".1f"
    curve: str = "score"
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
    source: str = ""
    vocabulary: str | None = None
    test: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    teacher: str | None = None
    init_from: str | None = None

    def runs(self, seeds: Sequence[int] | None = None) -> Iterator[Run]:
        """Yields the runs of all systems."""
        for seed in range(self.seeds) if seeds is None else seeds:
            common = {"seed": seed, "metric": self.metric, "curve": self.curve}
            files = {"vocabulary": self.vocabulary}

            def earlier(recipe: str | None) -> Run | None:
                return Run("", recipe, **common, **files) if recipe else None  # noqa: B023

            for system, argument in self.systems.items():
                yield Run(
                    system,
                    self.recipe.format(argument),
                    **common,
                    **files,
                    test=self.test,
                    settings=self.settings,
                    teacher=earlier(self.teacher),
                    init_from=earlier(self.init_from),
                )


V, R, FR = {"V": "v"}, {"R": "r"}, {"FR": "fr"}
DENSE = {"D": "d", "FD": "fd"}
MIXTURES = {"R+D": "rd", "R+V": "rv", "D+V": "dv"}
HARD_CODED = {"HC-SA": "hc_sa", "HC-ALL": "hc_all", "SH-X": "sh_x"}
OTHERS = {
    "Lightweight convolution": "light",
    "Dynamic convolution": "dynamic",
    "Talking heads": "heads",
}


def with_steps(steps: int) -> tuple[str, ...]:
    """Returns the settings of a schedule with another number of steps."""
    schedule = "training.optimizer.learning_rate"
    return (
        f"training.steps={steps}",
        f"training.save_every={steps}",
        f"{schedule}.total_steps={steps}",
        f"{schedule}.warmup_steps={steps // 10}",
    )


LANGUAGE_MODEL = {
    "metric": "perplexity",
    "unit": "perplexity",
    "lower": True,
    "curve": "perplexity",
    "vocabulary": "wikitext.model",
    "settings": (
        "model.vocab_size=7168",
        "data.mixture=wikitext_2_v1_full_lm",
        "data.split=validation",
        "data.batch_size=8",
        "evaluation.split=test",
        "evaluation.every=100",
        *with_steps(600),
    ),
}
"""WikiText-2's validation split, 217,000 tokens, is what these models are trained on."""

TABLES = {
    "cotraining": Table(
        "Co-training on eight tasks",
        "A synthetic mixture: single sentences, pairs and similarity in T5's formats over a made-up "
        "grammar, 2 + 1 layers of d 64, 6,000 steps. *Score*: the mean over tasks of their metrics "
        "on held-out examples.",
        "papers.cotraining:synthetic:{}",
        V | R | FR | DENSE | MIXTURES | {"HC-SA": "hc_sa"} | OTHERS,
        metric="score",
        unit="score",
        seeds=5,
        settings=("evaluation.every=1500",),
        paper={"V": 83.5, "R": 75.1, "D": 72.0, "D+V": 82.6, "R+V": 84.1},
        source="GLUE's average with T5 base, Tay et al. 2021 (all but V and R+V from memory)",
    ),
    "classification": Table(
        "Classification by encoders",
        "AG News, descriptions alone, 10,000 of them for training: two layers of d 128, 600 steps of 64 "
        "texts; accuracy on the 7,600 test texts.",
        "papers.classification:ag_news:{}",
        V | FR | {"FR+V": "frv", "Linformer": "linformer", "R": "r", "D": "d"},
        metric="ag_descriptions/accuracy",
        unit="accuracy",
        vocabulary="ag.model",
        settings=(
            "data.mixture=ag_descriptions",
            "evaluation.split=validation",
            "evaluation.every=100",
            *with_steps(600),
        ),
        paper={"V": 88.83, "Linformer": 86.50, "FR": 86.53, "FR+V": 89.13},
        source="accuracy on AG News, Tay et al. 2021 (from memory)",
    ),
    "language_models": Table(
        "Language models",
        "WikiText-2's validation split as training text, four layers of d 256, 600 steps of 8 rows of 256 "
        "tokens, 7,000 pieces; perplexity per token of the test split in windows of 256 tokens.",
        "papers.language_modeling:wikitext:{}",
        V | R | FR | {"D": "d", "R+V": "rv", "D+V": "dv"},
        paper={"V": 38.21, "R": 40.60, "FR": 42.40, "D": 40.88, "R+V": 40.05, "D+V": 37.27},
        source="perplexity on LM1B, Tay et al. 2021",
        **LANGUAGE_MODEL,
    ),
    "head_sizes": Table(
        "Heads of a free size",
        "The language model of dot products with four heads of other sizes at the same width, and all else "
        "as above.",
        "papers.language_modeling:heads:{}",
        {"16": "16", "32": "32", "64 (d/h)": "64", "128": "128"},
        **LANGUAGE_MODEL,
    ),
    "translation": Table(
        "Translation",
        "Multi30k, English to German: 2 + 2 layers of d 128, dropout 0.3, 5,000 steps of 64 sentences. "
        "BLEU (sacreBLEU, T5's `intl`) on the 1,000 sentences of test_2016_flickr, beam 4; curves: BLEU "
        "of the validation split, greedy.",
        "papers.translation:multi30k:{}",
        V | R | {"Fix": "fix"} | FR | DENSE | {"R+V": "rv", "D+V": "dv"} | HARD_CODED | OTHERS,
        metric="test/multi30k_en_de/bleu",
        unit="BLEU",
        vocabulary="multi30k.model",
        test=("--split", "test", "--method", "beam"),
        paper={
            "V": 27.67,
            "R": 27.27,
            "Fix": 23.89,
            "FR": 27.30,
            "D": 27.43,
            "FD": 27.32,
            "D+V": 27.57,
            "R+V": 28.47,
        },
        source="BLEU on WMT 2014 English-German, Tay et al. 2021",
    ),
}
