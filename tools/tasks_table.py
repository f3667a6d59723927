"""The tables of tasks in `docs/tasks.md`, from their definitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.tasks import catalog
from synthesizer_jax.tasks.definitions import GLUE, SUPER_GLUE, Task
from synthesizer_jax.tasks.importers.known import find_importer

SECTIONS: dict[str, Sequence[Task]] = {
    "GLUE": GLUE,
    "SuperGLUE": SUPER_GLUE,
    "Translation": catalog.TRANSLATION,
    "Summarization": catalog.SUMMARIZATION,
    "Question answering": catalog.QUESTION_ANSWERING,
    "Language modeling": catalog.LANGUAGE_MODELING,
    "Pre-training": catalog.PRE_TRAINING,
    "Dialogue": catalog.DIALOGUE,
    "Classification of texts": catalog.TEXT_CLASSIFICATION,
}


def tasks_table() -> str:
    """Returns the tables in Markdown, each below a heading."""
    sections = ("\n".join(_section(title, tasks)) for title, tasks in SECTIONS.items())
    return "\n\n".join(sections) + "\n"


def _section(title: str, tasks: Sequence[Task]) -> Iterator[str]:
    """Returns the lines of a section; tasks that differ in their data set alone are in one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for task in tasks:
        rows.setdefault(_cells(task), []).append(f"`{task.name}`")
    columns = [i for i in range(len(HEADERS)) if any(cells[i] for cells in rows)]
    yield f"### {title}\n"
    yield f"| {' | '.join(['tasks', *(HEADERS[i] for i in columns)])} |"
    yield f"|{' --- |' * (1 + len(columns))}"
    for cells, names in rows.items():
        yield f"| {' | '.join([', '.join(names), *(cells[i] for i in columns)])} |"


HEADERS = ("objective", "metrics", "splits", "import")


def _cells(task: Task) -> tuple[str, ...]:
    """Returns what `HEADERS` names; empty where it is the usual."""
    known = find_importer(task.dataset)
    importer = known.importer if known else "TFDS"
    names = [name for name, objective in OBJECTIVES.items() if objective == task.objective]
    splits = ", ".join(task.splits)
    return (
        f"`{names[0]}`" if names else "",
        ", ".join(metric.__name__ for metric in task.metrics),
        "" if splits == "train, validation, test" else splits,
        "" if task.name.startswith(importer) else importer,
    )
