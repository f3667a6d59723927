"""The configuration of LoRA adapters, which `models.adapters` adds to a model."""

from __future__ import annotations

import dataclasses

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Count, Positive
from synthesizer_jax.primitives.parameters import check_path_pattern


@register
@dataclasses.dataclass(frozen=True)
class LoRA:
    """Selects the kernels that are trained by low-rank updates, and sets the rank of the updates.

    See the docstring of `models.adapters` for the formula.

    Attributes:
      rank: the rank of the updates.
      alpha: the updates are multiplied by ``alpha / rank``.
      targets: a regular expression that must match the whole path of a kernel. Paths have the form
        of looped layers (``encoder/layers_0/...``), even if the model scans its layers. The default
        matches the query and value projections of attention.
      base_checksum: the checksum of the base, which is the checkpoint in `Experiment.init_from`. A
        run sets the checksum, so that the adapters are never applied to a different base.
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: str = ".*/(query|value)/kernel"
    base_checksum: int | None = None

    def __post_init__(self) -> None:
        check_path_pattern("training.adapters", self.targets)
