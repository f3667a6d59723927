"""Shows the rows of a task, and compares the sizes and the contents of its splits."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping

from synthesizer_jax.base.messages import Phase, report_items, silent_phase
from synthesizer_jax.data.examples import SIDES
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes, Vocabulary
from synthesizer_jax.preparation.importers.archives import published_rows
from synthesizer_jax.preparation.rows import read_task, reading_errors
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.postprocessors import Example, to_text


def read_rows(
    name: str,
    split: str,
    vocabulary: Vocabulary,
    *,
    data_dir: pathlib.Path,
    count: int | None = None,
    phase: Phase = silent_phase,
) -> Iterator[Example]:
    """Yields the preprocessed rows of a task in stored order, without truncating them.

    Args:
      name: the name of the task.
      split: the name of the split.
      vocabulary: the vocabulary of the tokens.
      data_dir: the data directory.
      count: the largest number of rows to read, or `None` for all rows.
      phase: a function that reports progress.

    Raises:
      FileNotFoundError: if the split is not in `data_dir`.
      ValueError: if the rows cannot be read.
    """
    task = task_registry.find_task(name)
    splits = task.stored_splits(data_dir)
    if not splits:
        raise FileNotFoundError(
            f"The task {name} has no data in {data_dir}. Add it with 'synthesizer-jax data import'."
        )
    if split not in splits:
        raise FileNotFoundError(
            f"The task {name} has no split {split!r} in {data_dir}. Its splits there are "
            f"{', '.join(splits)}. Choose another split with --split, or add this one "
            "with 'synthesizer-jax data import'."
        )
    # The number of stored rows may not be known.
    known = [n for n in (count, splits[split]) if n is not None]
    advance = phase(f"reading {name}, {split}", min(known, default=None))
    with reading_errors(f"The split {split!r} of the task {name}"):
        rows = (
            {side: ids for side, ids in zip(SIDES, tokens[i], strict=True) if len(ids)} | row
            for tokens, rows in read_task(task, split, PreparedTasks(data_dir, vocabulary))
            for i, row in enumerate(rows)
        )
        yield from report_items(itertools.islice(rows, count), advance)


@dataclasses.dataclass(frozen=True)
class SplitCheck:
    """The result of checking one split of a task.

    Attributes:
      task: the name of the task.
      split: the name of the split.
      rows: the number of stored rows, or `None` if it is not known.
      published: the published number of rows, or `None` if it is not known.
      repeated: the number of preprocessed rows whose input and target also occur in an earlier row
        of the split.
      shared: the number of inputs that also occur in an earlier split, by the name of the earlier
        split. Earlier splits without such inputs are left out.
    """

    task: str
    split: str
    rows: int | None
    published: int | None
    repeated: int
    shared: Mapping[str, int]

    @property
    def is_complete(self) -> bool | None:
        """Whether the number of rows is the published number, or `None` if either is not known."""
        if self.rows is None or self.published is None:
            return None
        return self.rows == self.published


def check_splits(
    name: str, data_dir: pathlib.Path, *, phase: Phase = silent_phase
) -> list[SplitCheck]:
    """Compares a task's splits with their published sizes, and with each other.

    The function reads all rows of the splits. To save memory, the function compares only the hashes
    of rows.

    Args:
      name: the name of the task.
      data_dir: the data directory.
      phase: a function that reports progress.
    """
    vocabulary = Bytes().build()
    task = task_registry.find_task(name)
    published = published_rows(task.dataset)
    checks = []
    # This dictionary maps the name of every earlier split to the hashes of its inputs.
    seen: dict[str, set[int]] = {}
    for split, count in task.stored_splits(data_dir).items():
        # Collect the hashes of whole rows and the hashes of inputs.
        whole: set[int] = set()
        inputs: set[int] = set()
        repeated = 0
        for row in read_rows(name, split, vocabulary, data_dir=data_dir, phase=phase):
            texts = [text_of(row, feature, vocabulary) for feature in SIDES]
            digest = hash("\0".join(texts))
            repeated += digest in whole
            whole.add(digest)
            inputs.add(hash(texts[0] or texts[1]))
        shared = {other: len(inputs & earlier) for other, earlier in seen.items()}
        seen[split] = inputs
        shared = {other: n for other, n in shared.items() if n}
        checks.append(SplitCheck(name, split, count, published.get(split), repeated, shared))
    return checks


def text_of(row: Example, feature: str, vocabulary: Vocabulary) -> str:
    """Returns the text of a feature of a row, or an empty text if the row lacks the feature."""
    if f"{feature}_pretokenized" in row:
        return to_text(row[f"{feature}_pretokenized"])
    return vocabulary.decode(row.get(feature, ()))
