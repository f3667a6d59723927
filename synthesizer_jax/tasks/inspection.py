"""What the rows of a task look like: texts, lengths in tokens, sizes, overlap between splits."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping

from synthesizer_jax.data.task_streams import SIDES
from synthesizer_jax.data.vocabularies import Bytes, Vocabulary
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.importers.known import find_importer
from synthesizer_jax.tasks.postprocessors import Example, to_text
from synthesizer_jax.tasks.stored import reading_errors


def read_rows(
    name: str,
    split: str,
    vocabulary: Vocabulary,
    *,
    data_dir: pathlib.Path,
    count: int | None = None,
) -> Iterator[Example]:
    """Yields a task's preprocessed rows in stored order, not truncated.

    Args:
      name: a task.
      split: its split.
      vocabulary: the vocabulary of the token ids.
      data_dir: the directory of the data sets.
      count: maximum number of rows; None: all.

    Raises:
      FileNotFoundError: the split is not in `data_dir`.
    """
    here = task_registry.find_task(name).stored_splits(data_dir)
    if split not in here:
        raise FileNotFoundError(
            f"{name} has no split {split!r} in {data_dir} (found: {', '.join(here) or 'none'})"
        )
    task = task_registry.find_task(name).to_seqio(vocabulary, data_dir)
    with reading_errors(f"{name}'s split {split!r}"):
        dataset = task.get_dataset(
            None, split=split, shuffle=False, num_epochs=1, seed=0, try_in_mem_cache=False
        )
        yield from itertools.islice(dataset.as_numpy_iterator(), count)


def published_sizes(dataset: str) -> Mapping[str, tuple[int, ...]]:
    """Returns the published numbers of rows of a data set's splits; empty where none are known.

    A split may have several: QQP's source was corrected.
    """
    found = find_importer(dataset)
    return {} if found is None else found.sizes


@dataclasses.dataclass(frozen=True)
class SplitCheck:
    """The check of one split of a task.

    Attributes:
      task: the task.
      split: the split.
      rows: number of stored rows; None: not known.
      published: the published numbers of rows; empty: not known.
      repeated: preprocessed rows whose input and target an earlier row of the split has.
      shared: ``{other split: number of inputs that it has too}``, of the splits before.
    """

    task: str
    split: str
    rows: int | None
    published: tuple[int, ...]
    repeated: int
    shared: Mapping[str, int]

    @property
    def is_complete(self) -> bool | None:
        """Whether the number of rows is a published one; None where either is not known."""
        return self.rows in self.published if self.published and self.rows is not None else None


def check_splits(name: str, data_dir: pathlib.Path) -> list[SplitCheck]:
    """Compares a task's sizes with the published ones, and its splits with each other.

    Args:
      name: a task.
      data_dir: the directory of the data sets; all prepared splits are read.
    """
    vocabulary, seen = Bytes().build(), dict[str, set[bytes]]()
    published = published_sizes(task_registry.find_task(name).dataset)
    checks = []
    for split, count in task_registry.find_task(name).stored_splits(data_dir).items():
        whole, inputs, repeated = set[bytes](), set[bytes](), 0
        for row in read_rows(name, split, vocabulary, data_dir=data_dir):
            texts = [text_of(row, feature, vocabulary) for feature in SIDES]
            digest = _digest("\0".join(texts))
            repeated += digest in whole
            whole.add(digest)
            inputs.add(_digest(texts[0] or texts[1]))
        shared = {other: len(inputs & earlier) for other, earlier in seen.items()}
        seen[split] = inputs
        shared = {other: n for other, n in shared.items() if n}
        checks.append(SplitCheck(name, split, count, published.get(split, ()), repeated, shared))
    return checks


def text_of(row: Example, feature: str, vocabulary: Vocabulary) -> str:
    """Returns the text of a feature; empty if the row does not have it."""
    if f"{feature}_pretokenized" in row:
        return to_text(row[f"{feature}_pretokenized"])
    return vocabulary.decode(row.get(feature, ()))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
