"""The data that a run is trained on, as one frozen dataclass."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from synthesizer_jax.base.messages import not_divisible
from synthesizer_jax.base.registry import check_types, fields_of, register
from synthesizer_jax.base.typing import Length, Range, Seed
from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.task_streams import CHUNK
from synthesizer_jax.data.vocabularies import LONGEST_TARGET


@register
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data that a run is trained on.

    Attributes:
      mixture: name of a SeqIO mixture or task.
      inputs_length: encoder tokens per row; longer inputs are truncated before EOS. 0: there are none,
        for language models on tasks without inputs.
      targets_length: decoder tokens per row.
      batch_size: number of rows of the global batch.
      shards: V, the number of virtual shards, which must divide the batch size. It is fixed for a run.
      pack: whether to pack several examples into a row, kept apart by segment ids (see `batch.Packer`).
      seed: of shuffling and mixing.
      split: the split to read.
      shuffle: False reads every task in its stored order.
      max_segments: the maximum number of examples per packed row; None is one per 16 input
        tokens, or target tokens if there are no inputs.
      buckets: pairs of ``inputs_length`` and ``targets_length``: a batch, whose rows are of similar
        length, has the smallest pair that holds its rows, or else the full lengths. For models that
        refuse packed rows.
      classes: the label words of an encoder's classes, in the order of its outputs: every target becomes
        the number of its class, one a row (``targets_length=1``). Empty: targets are texts.
      objective: what makes examples of tasks without inputs that have no objective of their own, such as
        ``OBJECTIVES["span_3_15_u_u"]``; None: every text, truncated, is a target.
    """

    mixture: str
    inputs_length: Annotated[int, Range(0, 2**20)]
    targets_length: Length
    batch_size: Length
    shards: Annotated[int, Range(1, CHUNK)] = 8
    pack: bool = False
    seed: Seed = 0
    split: str = "train"
    shuffle: bool = True
    max_segments: Length | None = None
    buckets: tuple[tuple[int, int], ...] = ()
    classes: tuple[str, ...] = ()
    objective: Objective | None = None

    def __post_init__(self) -> None:
        check_types(DataConfig, fields_of(self), "data")
        if self.buckets and self.pack:
            raise ValueError(
                "data.buckets is for rows that are not packed; set data.pack=false or data.buckets=()"
            )
        shortest = min(self.inputs_length, 1)
        for inputs, targets in self.buckets:
            fits = shortest <= inputs <= self.inputs_length and 0 < targets <= self.targets_length
            if not fits:
                raise ValueError(
                    f"data.buckets holds ({inputs}, {targets}); allowed: {shortest} to inputs_length="
                    f"{self.inputs_length} and 1 to targets_length={self.targets_length}"
                )
        if self.classes and (self.targets_length != 1 or self.pack):
            raise ValueError(
                f"data.classes gives every row one class, with data.targets_length={self.targets_length} "
                f"and data.pack={str(self.pack).lower()}; set data.targets_length=1 and data.pack=false"
            )
        if self.classes and len(set(self.classes)) < max(2, len(self.classes)):
            raise ValueError(
                f"data.classes is {', '.join(self.classes)}; give two or more label words, each once"
            )
        if self.batch_size % self.shards:
            by, size = f"data.shards={self.shards}", self.batch_size
            raise ValueError(
                f"{not_divisible('data.batch_size', size, by=by, divisor=self.shards)}; or set data.shards "
                "too, and to save memory alone training.micro_batches"
            )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The lengths of inputs and targets that batches can have, the full lengths last."""
        full = (self.inputs_length, self.targets_length)
        return (*sorted({*self.buckets} - {full}), full)

    @property
    def lengths(self) -> dict[str, int]:
        """SeqIO's feature lengths; label words are read as a whole before they become classes."""
        targets = LONGEST_TARGET if self.classes else self.targets_length
        return {"inputs": self.inputs_length, "targets": targets}

    @property
    def segments_per_row(self) -> int:
        """The largest segment id that a row can have; packing observes it exactly."""
        if not self.pack:
            return 1
        return self.max_segments or max(1, (self.inputs_length or self.targets_length) // 16)
