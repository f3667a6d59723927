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
    """Returns the lines of a section; above its table, the cells that are the same in all rows."""
    rows = [_task_cells(task) for task in tasks]
    shared = {key: text for key, text in rows[0].items() if all(row[key] == text for row in rows)}
    headers = [key for key in rows[0] if key not in shared]
    yield f"### {title}\n"
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
        "objective": f"`{names[0]}`" if names else "",
        "metrics": ", ".join(metric.__name__ for metric in task.metrics),
        "splits": "" if splits == "train, validation, test" else splits,
        "import": "" if importer == task.dataset.split("/")[0] else importer,
    }
