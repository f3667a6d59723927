"""The rows of every task and split, drawn from the grammar."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

from synthesizer_jax.tasks.synthetic import pairs, sentences, stories
from synthesizer_jax.tasks.synthetic.draw import Draw, Example, Row

NOISE = 0.02
"""Share of labels that are wrong, in training and held out alike."""

SIZES: Mapping[str, int] = MappingProxyType({"train": 12000, "validation": 600})
"""Rows per task."""

HELD_OUT = 8
"""One combination in so many is held out."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a task's rows come from.

    Attributes:
      grammar: draws one example.
      labels: number of labels, drawn equally often; 0 where the label is a number.
      positive_only: the training split keeps only rows with label 1 (T5's WSC).
    """

    grammar: Callable[[Draw], Example]
    labels: int = 2
    positive_only: bool = False


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "cola": Source(sentences.cola),
        "sst2": Source(sentences.sst2),
        "stsb": Source(pairs.stsb, labels=0),
        "mnli": Source(pairs.mnli, labels=3),
        "boolq": Source(stories.boolq),
        "copa": Source(stories.copa),
        "wic": Source(pairs.wic),
        "wsc": Source(stories.wsc, positive_only=True),
    }
)
"""By the name that follows ``synthetic_``."""


def examples(task: str, split: str, *, seed: int = 0) -> list[Row]:
    """All rows of one split, the same for the same seed on every machine.

    Training and held-out rows differ in their combinations of words (`is_held_out`), so no row is in
    both. No two rows of a split have the same text, and all labels are equally frequent.

    Args:
      task: a key of `SOURCES`.
      split: ``train`` or ``validation``.
      seed: of the grammar.

    Raises:
      ValueError: there is no such task or split.
    """
    for field, value, allowed in (("task", task, SOURCES), ("split", split, SIZES)):
        if value not in allowed:
            raise ValueError(f"{field}={value!r} is unknown; allowed: {', '.join(allowed)}")
    source, size = SOURCES[task], SIZES[split]
    single = source.positive_only and split == "train"
    limit = size if single or not source.labels else -(-size // source.labels)
    draw = Draw(f"{seed} {task} {split}", noise=NOISE)
    rows: list[Row] = []
    seen: set[tuple[object, ...]] = set()
    counts: Counter[object] = Counter()
    while len(rows) < size:
        row, combination = source.grammar(draw)
        label = row["label"]
        text = tuple(value for name, value in row.items() if name != "label")
        unwanted = (single and not label) or (source.labels and counts[label] >= limit)
        if _is_held_out(combination) != (split == "validation") or unwanted or text in seen:
            continue
        seen.add(text)
        counts[label] += 1
        rows.append({**row, "idx": len(rows)})
    return rows


def _is_held_out(combination: tuple[str, ...]) -> bool:
    """Whether rows with this combination of words are kept from training."""
    return zlib.crc32(" ".join(combination).encode()) % HELD_OUT == 0
