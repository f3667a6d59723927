"""What the rows of a task look like: texts, lengths in tokens, sizes, overlap between splits."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.task_streams import SIDES
from synthesizer_jax.data.vocabularies import Bytes, Vocabulary
from synthesizer_jax.preparation.importers.archives import published_rows
from synthesizer_jax.preparation.rows import read_task, reading_errors
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.postprocessors import Example, to_text


def read_rows(
    name: str, split: str, vocabulary: Vocabulary, *, data_dir: pathlib.Path, count: int | None = None
) -> Iterator[Example]:
    """Yields a task's preprocessed rows in stored order, not truncated; at most `count` if it is given.

    Raises:
      FileNotFoundError: the split is not in `data_dir`.
    """
    task = task_registry.find_task(name)
    splits = task.stored_splits(data_dir)
    if split not in splits:
        raise FileNotFoundError(
            f"{name} has no split {split!r} in {data_dir}, which has {', '.join(splits) or 'none of it'}; "
            "choose another by --split, or add it with 'synthesizer-jax data import'"
        )
    with reading_errors(f"{name}'s split {split!r}"):
        rows = (
            {side: ids for side, ids in zip(SIDES, tokens[i], strict=True) if len(ids)} | row
            for tokens, rows in read_task(task, split, PreparedTasks(data_dir, vocabulary))
            for i, row in enumerate(rows)
        )
        yield from itertools.islice(rows, count)


@dataclasses.dataclass(frozen=True)
class SplitCheck:
    """The check of one split of a task."""

    task: str
    split: str
    rows: int | None  # stored; None: not known
    published: int | None  # the published number of rows; None: not known
    repeated: int  # preprocessed rows whose input and target an earlier row of the split has
    shared: Mapping[str, int]  # numbers of inputs that earlier splits have too

    @property
    def is_complete(self) -> bool | None:
        """Whether the number of rows is the published one; None where either is not known."""
        return None if None in (self.rows, self.published) else self.rows == self.published


def check_splits(name: str, data_dir: pathlib.Path) -> list[SplitCheck]:
    """Compares a task's sizes with the published ones, and its splits, which are read, with each other."""
    vocabulary, seen = Bytes().build(), dict[str, set[int]]()
    task = task_registry.find_task(name)
    published = published_rows(task.dataset)
    checks = []
    for split, count in task.stored_splits(data_dir).items():
        whole, inputs, repeated = set[int](), set[int](), 0
        for row in read_rows(name, split, vocabulary, data_dir=data_dir):
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
    """Returns the text of a feature; empty if the row does not have it."""
    if f"{feature}_pretokenized" in row:
        return to_text(row[f"{feature}_pretokenized"])
    return vocabulary.decode(row.get(feature, ()))
