"""Makes the tables of tasks in `docs/tasks.md` from the definitions of the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.tasks.task import Task
from synthesizer_jax.tasks.task_registry import TASKS

SECTIONS = {
    "GLUE": ("glue_",),
    "SuperGLUE": ("super_glue_", "dpr_"),
    "Translation": ("wmt", "multi30k", "iwslt"),
    "Summarization": ("cnn_dailymail", "xsum"),
    "Question answering": ("squad",),
    "Language modeling": ("lm1b", "wikitext"),
    "Pre-training": ("c4", "wikipedia"),
    "Dialogue": ("convai2", "xpersona"),
    "Classification of texts": ("ag_news", "imdb"),
}
"""Maps the title of each section to the beginnings of the names of the section's tasks."""


def tasks_table() -> str:
    """Returns the tables in Markdown. Each table has a heading."""
    known = [task for name, task in TASKS.items() if "_sentinel" not in name]
    sections = [
        "\n".join(_section(title, [task for task in known if task.name.startswith(beginnings)]))
        for title, beginnings in SECTIONS.items()
    ]
    return "\n\n".join(sections) + "\n"


def _section(title: str, tasks: Sequence[Task]) -> Iterator[str]:
    """Yields the Markdown lines of a section.

    Tasks that differ only in their data set share a row of the section's table.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    for task in tasks:
        rows.setdefault(_cells(task), []).append(f"`{task.name}`")
    columns = [i for i in range(len(HEADERS)) if any(cells[i] for cells in rows)]
    yield f"### {title}\n"
    yield f"| {' | '.join(['tasks', *(HEADERS[i] for i in columns)])} |"
    yield f"|{' --- |' * (1 + len(columns))}"
    for cells, names in rows.items():
        yield f"| {' | '.join([', '.join(names), *(cells[i] for i in columns)])} |"


HEADERS = ("objective", "metrics", "splits")


def _cells(task: Task) -> tuple[str, ...]:
    """Returns the cells of a task's row in the order of `HEADERS`. The usual splits are omitted."""
    names = [name for name, objective in OBJECTIVES.items() if objective == task.objective]
    splits = ", ".join(task.splits)
    return (
        f"`{names[0]}`" if names else "",
        ", ".join(metric.__name__ for metric in task.metrics),
        "" if splits == "train, validation, test" else splits,
    )
