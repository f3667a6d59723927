"""The configuration of the training data, as a frozen dataclass."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from synthesizer_jax.base.messages import not_divisible
from synthesizer_jax.base.registry import check_types, fields_of, register
from synthesizer_jax.base.typing import Length, Range, Seed
from synthesizer_jax.data.examples import CHUNK
from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.vocabularies import LONGEST_TARGET


@register
@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Describes the data that a run is trained on.

    Attributes:
      mixture: the name of a mixture or task.
      inputs_length: the number of encoder tokens per row. Longer inputs are truncated, but still
        end with EOS. Set `inputs_length` to 0 for a language model, which is trained on tasks
        without inputs.
      targets_length: the number of decoder tokens per row.
      batch_size: the number of rows of the global batch.
      shards: the number V of virtual shards. The number V must divide the batch size and cannot be
        changed during a run.
      pack: whether several examples are packed into a row. Segment ids keep the examples of a row
        apart (see `batch.Packer`).
      seed: the seed of shuffling and mixing.
      split: the name of the split that is read from every task.
      shuffle: whether the examples are shuffled. If `shuffle` is `False`, the examples of every
        task are read in their stored order.
      max_segments: the maximum number of examples per packed row. `None` means one example per 16
        input tokens, or per 16 target tokens if there are no inputs.
      buckets: pairs of ``inputs_length`` and ``targets_length``. If buckets are given, every batch
        holds rows of similar length. A batch has the shape of the smallest bucket that fits its
        rows, or the full lengths if no bucket fits. Use buckets for models that do not accept
        packed rows.
      classes: the label words of an encoder's classes, in the order of its outputs. If classes are
        given, every target is replaced by the index of its class, so `targets_length` must be 1. If
        `classes` is empty, targets are sequences of tokens.
      objective: the objective for tasks that have no inputs and no objective of their own, for
        example ``OBJECTIVES["span_3_15_u_u"]``. The objective turns the texts of these tasks into
        training examples. If `objective` is `None`, every text is a target and is truncated to
        `targets_length`.
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
                "data.buckets can only be used if rows are not packed. Set data.pack=false or "
                "data.buckets=()."
            )
        shortest = min(self.inputs_length, 1)
        for inputs, targets in self.buckets:
            fits = shortest <= inputs <= self.inputs_length and 0 < targets <= self.targets_length
            if not fits:
                raise ValueError(
                    f"data.buckets contains ({inputs}, {targets}), but the first number must be "
                    f"{shortest} to data.inputs_length ({self.inputs_length}), and the second "
                    f"number must be 1 to data.targets_length ({self.targets_length})."
                )
        if self.classes and (self.targets_length != 1 or self.pack):
            raise ValueError(
                "With data.classes, every row has a single target, but data.targets_length is "
                f"{self.targets_length} and data.pack is {str(self.pack).lower()}. Set "
                "data.targets_length=1 and data.pack=false."
            )
        if self.classes and len(set(self.classes)) < max(2, len(self.classes)):
            raise ValueError(
                f"data.classes is {', '.join(self.classes)}. Give two or more label words, each "
                "only once."
            )
        if self.batch_size % self.shards:
            by = f"data.shards={self.shards}"
            problem = not_divisible("data.batch_size", self.batch_size, by=by, divisor=self.shards)
            raise ValueError(
                f"{problem} You can also change data.shards. If you only want to save memory, set "
                "training.micro_batches instead."
            )

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The input and target lengths that a batch can have. The full lengths come last."""
        full = (self.inputs_length, self.targets_length)
        return (*sorted({*self.buckets} - {full}), full)

    @property
    def lengths(self) -> dict[str, int]:
        """The maximum lengths of ``inputs`` and ``targets``, in SeqIO's form of feature lengths.

        If there are classes, targets are not truncated, because each target is later replaced by
        the index of its class.
        """
        targets = LONGEST_TARGET if self.classes else self.targets_length
        return {"inputs": self.inputs_length, "targets": targets}

    @property
    def segments_per_row(self) -> int:
        """The largest segment id in a row, which is the maximum number of examples in a row."""
        if not self.pack:
            return 1
        return self.max_segments or max(1, (self.inputs_length or self.targets_length) // 16)
