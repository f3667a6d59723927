"""Writes the page of tasks and mixtures, generated from their definitions.

python -m tools.tasks_page docs/tasks.md
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

from synthesizer_jax.data.objectives import OBJECTIVES, Objective
from synthesizer_jax.files import write_atomic
from synthesizer_jax.tasks import catalog
from synthesizer_jax.tasks.definitions import GLUE, SENTINEL, SUPER_GLUE, Task
from synthesizer_jax.tasks.formats import (
    WNLI,
    WSC,
    Classification,
    MultiRC,
    PronounResolution,
    ReCoRD,
    Similarity,
    TextFormat,
    Translation,
)
from synthesizer_jax.tasks.generation_formats import (
    Dialogue,
    FirstAnswerSQuAD,
    LanguageModeling,
    SpanSQuAD,
    SQuAD,
    Summarization,
    TriviaQA,
)
from synthesizer_jax.tasks.importers.known import find_importer
from synthesizer_jax.tasks.mixtures import MIXTURES, ExamplesRate, Rate, Rates
from synthesizer_jax.tasks.task_registry import TASKS
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

FORMATS: dict[type[TextFormat], str] = {
    Similarity: "`{prefix} {fields}` → the score, rounded to a fifth",
    MultiRC: "`multirc question: … answer: … paragraph: …` → a word",
    ReCoRD: "`record query: … entities: … passage: …` → an entity; a row per answer",
    WSC: "`wsc: … *pronoun* …` → what the pronoun refers to",
    WNLI: "`wsc: … *pronoun* …` → what the pronoun refers to",
    PronounResolution: "`wsc: … *pronoun* …` → what the pronoun refers to",
    Classification: "`{prefix} {fields}` → a word",
    Translation: "`{prefix} …` → the translation",
    Summarization: "`summarize: …` → the summary",
    LanguageModeling: "no inputs → the text",
    Dialogue: "`dialogue history: … \\| … persona: …` → the reply",
    SQuAD: "`question: … context: …` → the first answer; all count",
    FirstAnswerSQuAD: "`question: … context: …` → the first answer, which alone counts",
    SpanSQuAD: "`question: … context: …` → `start: 3 end: 6`, positions of words",
    TriviaQA: "`question: … context: …` → an answer; a row per context and alias in it",
}

INTRODUCTION = """# Tasks and mixtures

Written by `python -m tools.tasks_page docs/tasks.md` from the definitions in `synthesizer_jax/data/`; a
test checks that it is current. `synthesizer-jax data list` says what is prepared in a data directory.

*Import* is the name that `synthesizer-jax data import NAME --from DIRECTORY` takes. The other data sets
are prepared by TensorFlow Datasets: `tfds.builder("NAME", data_dir="DATA").download_and_prepare()`.
"""

DIFFERENCES = """## What differs from T5

`tests/data/test_t5_oracle.py` compares every task and mixture that has a name of T5 with T5's own code:
strings, ids, postprocessed values, metrics and rates. It finds these differences only:

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
"""

OBJECTIVES_NOTE = """`data.objective` gives an objective to texts that have none of their own, such as those
of language modeling above and imported ones: `--set data.objective=NAME` with one of {names}. """

PAPERS = """The papers on head sizes and talking heads fine-tune on MNLI and SQuAD: `glue_mnli_v002`, whose
answers are three words, and `squad_v010_allanswers_span`, whose answers are positions.
"""

OWN_MIXTURES = ("glue_super_glue_proportional",)
"""Mixtures that T5 does not have."""


def page() -> str:
    """Returns the page in Markdown."""
    parts = [INTRODUCTION]
    for title, definitions in SECTIONS:
        parts.append(f"## {title}\n\n" + "\n".join(_task_table(definitions)) + "\n")
        if title == "SuperGLUE":
            names = ", ".join(f"`{task.name}`" for task in SENTINEL)
            parts.append(f"In T5's sentinel format: {names}.\n")
        if title == "Pre-training":
            names = ", ".join(f"`{name}`" for name in OBJECTIVES)
            parts.append(OBJECTIVES_NOTE.format(names=names))
        if title == "Classification of texts":
            parts.append(PAPERS)
    parts.append("## Mixtures\n\n" + "\n".join(_mixture_table()) + "\n")
    parts.append(DIFFERENCES)
    parts.append("## What T5 has and this package has not\n\n" + "\n".join(_missing()) + "\n")
    return "\n".join(parts)


def _task_table(definitions: Sequence[Task]) -> Iterator[str]:
    yield "| task | data set | format | words | metrics | splits | import |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for task in definitions:
        known = find_importer(task.dataset)
        cells = (
            f"`{task.name}`",
            f"`{task.dataset}`",
            _format(task.format) if task.objective is None else _objective(task.objective),
            ", ".join(task.format.labels),
            ", ".join(metric.__name__ for metric in task.metrics) or "–",
            ", ".join(task.splits),
            f"`{known.importer}`" if known else "TFDS",
        )
        yield f"| {' | '.join(cells)} |"


def _objective(objective: Objective) -> str:
    """Returns an objective by its name."""
    names = [name for name, known in OBJECTIVES.items() if known == objective]
    return f"objective `{names[0]}`"


def _format(text_format: TextFormat) -> str:
    """Returns a format in one line."""
    if isinstance(text_format, SQuAD) and not text_format.context:
        return "`squad trivia question: …` → the first answer; all count"
    values = {
        "prefix": getattr(text_format, "prefix", ""),
        "fields": " ".join(f"{name}: …" for name in getattr(text_format, "features", ())),
    }
    return FORMATS[type(text_format)].format(**values)


def _mixture_table() -> Iterator[str]:
    yield (
        "A member is drawn in proportion to its rate. *Examples* stands for the number of rows of its "
        "training split; rate 0 is for evaluation only. A mixture goes without members whose data is "
        "missing."
    )
    yield ""
    yield "| mixture | members and rates |"
    yield "| --- | --- |"
    for name in (*t5_names.MIXTURES, *OWN_MIXTURES):
        if name in MIXTURES:
            yield f"| `{name}` | {_members(MIXTURES[name])} |"


def _members(rates: Rates) -> str:
    """Returns the members, those of equal rates together."""
    groups: dict[str, list[str]] = {}
    for task, rate in rates.items():
        groups.setdefault(_rate(rate), []).append(f"`{task}`")
    return "; ".join(f"{rate}: {', '.join(names)}" for rate, names in groups.items())


def _rate(rate: Rate) -> str:
    if isinstance(rate, ExamplesRate):
        changed = [
            f"{field.name} {getattr(rate, field.name):,}"
            for field in dataclasses.fields(rate)
            if getattr(rate, field.name) != field.default
        ]
        return ", ".join(["examples", *changed])
    return f"{rate:,.10g}"


def _missing() -> Iterator[str]:
    yield f"Of the {len(t5_names.TASKS)} tasks and {len(t5_names.MIXTURES)} mixtures of T5 0.9.4:"
    yield ""
    missing = [name for name in t5_names.TASKS if name not in TASKS]
    missing += [name for name in t5_names.MIXTURES if name not in MIXTURES]
    for name in missing:
        yield f"- `{name}`: {t5_names.REASONS[name]}."
    if not missing:
        yield "none is missing."


def main(path: pathlib.Path) -> None:
    """Writes the page."""
    write_atomic(path, page())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
