"""Writes the page of tasks and mixtures, generated from their definitions.

python -m tools.tasks_page docs/tasks.md
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator, Sequence

from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.files import write_atomic
from synthesizer_jax.tasks import catalog
from synthesizer_jax.tasks.definitions import GLUE, SUPER_GLUE, Task
from synthesizer_jax.tasks.formats import TextFormat
from synthesizer_jax.tasks.importers.known import find_importer
from synthesizer_jax.tasks.mixtures import MIXTURES, ExamplesRate, Rates
from tools import t5_names

SECTIONS: tuple[tuple[str, Sequence[Task]], ...] = (
    ("GLUE", GLUE),
    ("SuperGLUE", SUPER_GLUE),
    ("Translation", catalog.TRANSLATION),
    ("Summarization", catalog.SUMMARIZATION),
    ("Question answering", catalog.QUESTION_ANSWERING),
    ("Language modeling", catalog.LANGUAGE_MODELING),
    ("Pre-training", catalog.PRE_TRAINING),
    ("Dialogue", catalog.DIALOGUE),
    ("Classification of texts", catalog.TEXT_CLASSIFICATION),
)

PRONOUN = "`wsc: … *pronoun* …` → what the pronoun refers to"
FORMATS = {
    "Similarity": "`{prefix} {fields}` → the score, rounded to a fifth",
    "MultiRC": "`multirc question: … answer: … paragraph: …` → {labels}",
    "ReCoRD": "`record query: … entities: … passage: …` → an entity; a row per answer",
    "WSC": PRONOUN,
    "WNLI": PRONOUN,
    "PronounResolution": PRONOUN,
    "Classification": "`{prefix} {fields}` → {labels}",
    "Translation": "`{prefix} …`",
    "Summarization": "`summarize: …` → the summary",
    "LanguageModeling": "no inputs → the text",
    "Dialogue": "`dialogue history: … \\| … persona: …` → the reply",
    "SQuAD": "`question: … context: …` → the first answer; all count",
    "FirstAnswerSQuAD": "`question: … context: …` → the first answer, which alone counts",
    "SpanSQuAD": "`question: … context: …` → `start: 3 end: 6`, positions of words",
    "TriviaQA": "`question: … context: …` → an answer; a row per context and alias in it",
}
"""How rows are written, by the class of the format."""

INTRODUCTION = """# Tasks and mixtures

Written by `python -m tools.tasks_page docs/tasks.md` from the definitions in `synthesizer_jax/tasks/`.
`synthesizer-jax data list` says what is prepared in a data directory.

*Import* is the name that `synthesizer-jax data import NAME --from DIRECTORY` takes, where it is not the
first part of the data set's; TFDS stands for `tfds.builder("DATA SET",
data_dir="DATA").download_and_prepare()`. *Splits* are named where they are not train, validation and test.
What all tasks of a section share stands above its table.
"""

NOTES = {
    "SuperGLUE": "In T5's sentinel format each has `_1_sentinel` in its name, before `_train` or `_eval`.",
    "Pre-training": "`--set data.objective=NAME` gives an objective to texts that have none of their own, "
    "such as those of language modeling above and imported ones; one of "
    + ", ".join(f"`{name}`" for name in OBJECTIVES)
    + ".",
}
"""What stands below the tables of some sections."""

DIFFERENCES = """## What differs from T5

`tests/tasks/test_t5_oracle.py` compares every task and mixture that has a name of T5 with T5's own code:
strings, ids, postprocessed values, metrics and rates. They are the same but for these:

- The metric of `squad_v010`: T5 compares the prediction with every character of the answer, since its
  task lacks a postprocessor; here it is compared with the answer.
- `rouge` is the mean over the examples; T5's, the median of 1,000 random resamples of that mean, is
  `rouge(…, bootstrap=True)`.
- BLEU of several references: here every example has its list of them; T5 passes such lists on as if each
  were the references of one translator for all examples.
- STS-B: `nan` and `inf` count as −1 here, as other answers that are no numbers do; in T5 one of them makes
  the correlation undefined. Correlations of constant answers are 0 here, undefined in T5.
- `super_glue_wsc_v102_simple_train`, which has no metrics: answers are right by the rule of WSC's
  evaluation task; T5 leaves them as they are. T5 takes hidden labels for true; no training row has one.

Missing are {missing}.
The first has an objective of T5's ablations, the others make two rows in one, whose split is drawn after
packing; `c4_v220_prefix_lm` has this objective on segments.
"""

OWN_MIXTURES = ("glue_super_glue_proportional",)
"""Mixtures that T5 does not have."""

BASES = (
    "all_proportional",
    *OWN_MIXTURES,
    "glue_v002_proportional",
    "super_glue_v102_proportional",
)
"""Mixtures by which the table describes larger ones, and those that lack one member."""


def page() -> str:
    """Returns the page in Markdown."""
    parts = [INTRODUCTION]
    for title, tasks in SECTIONS:
        parts.append(f"## {title}\n\n" + "\n".join(_task_table(tasks)) + "\n")
        parts += [NOTES[title] + "\n"] if title in NOTES else []
    parts.append("## Mixtures\n\n" + "\n".join(_mixture_table()) + "\n")
    missing = ", ".join(f"`{name}`" for name in t5_names.MISSING)
    parts.append(DIFFERENCES.format(missing=missing))
    return "\n".join(parts)


def _task_table(tasks: Sequence[Task]) -> Iterator[str]:
    """Returns the lines of a table, after one with the cells that are the same in all of its rows."""
    rows = [_task_cells(task) for task in tasks]
    shared = {key: text for key, text in rows[0].items() if all(row[key] == text for row in rows)}
    headers = [key for key in rows[0] if key not in shared]
    if any(shared.values()):
        yield "; ".join(f"{key}: {text}" for key, text in shared.items() if text).capitalize() + "."
        yield ""
    yield f"| {' | '.join(headers)} |"
    yield f"|{' --- |' * len(headers)}"
    for row in rows:
        yield f"| {' | '.join(row[key] for key in headers)} |"


def _task_cells(task: Task) -> dict[str, str]:
    """Returns the cells of a task by the headers of their columns."""
    known = find_importer(task.dataset)
    importer = known.importer if known else "TFDS"
    names = [name for name, objective in OBJECTIVES.items() if objective == task.objective]
    splits = ", ".join(task.splits)
    return {
        "task": f"`{task.name}`",
        "data set": f"`{task.dataset}`",
        "format": f"objective `{names[0]}`" if names else _format(task.format),
        "metrics": ", ".join(metric.__name__ for metric in task.metrics),
        "splits": "" if splits == "train, validation, test" else splits,
        "import": "" if importer == task.dataset.split("/")[0] else importer,
    }


def _format(text_format: TextFormat) -> str:
    """Returns a format in one line."""
    if not getattr(text_format, "context", True):
        return "`squad trivia question: …` → the first answer; all count"
    values = {
        "prefix": getattr(text_format, "prefix", ""),
        "fields": " ".join(f"{name}: …" for name in getattr(text_format, "features", ())),
        "labels": ", ".join(text_format.labels),
    }
    return FORMATS[type(text_format).__name__].format(**values)


def _mixture_table() -> Iterator[str]:
    yield (
        "A member is drawn in proportion to its rate. *Examples* stands for the number of rows of its "
        "training split; rate 0 is for evaluation only. A mixture goes without members whose data is "
        "missing."
    )
    yield ""
    yield "| mixture | rates: members |"
    yield "| --- | --- |"
    for name in (*t5_names.MIXTURES, *OWN_MIXTURES):
        yield f"| `{name}` | {_members(MIXTURES[name])} |"


def _members(rates: Rates) -> str:
    """Returns the members, those of equal rates together, or what differs from one of `BASES`."""
    listed, included = [], set()
    for name in BASES:
        base = set(MIXTURES[name].items())
        if rates.items() < base and len(base) == len(rates) + 1:
            return f"`{name}` without `{(base - rates.items()).pop()[0]}`"
        if base < set(rates.items()):
            listed, included = [f"`{name}`"], base
            break
    groups: dict[str, list[str]] = {}
    for task, rate in rates.items():
        if (task, rate) not in included:
            shown = "examples" if isinstance(rate, ExamplesRate) else f"{rate:,.10g}"
            groups.setdefault(shown, []).append(f"`{task}`")
    return "; ".join([*listed, *(f"{rate}: {', '.join(names)}" for rate, names in groups.items())])


def main(path: pathlib.Path) -> None:
    """Writes the page."""
    write_atomic(path, page())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
