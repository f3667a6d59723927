"""The configuration of LoRA adapters, which `models.adapters` adds to a model."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Count, Number, Positive
from synthesizer_jax.primitives.parameters import check_path_pattern

INT8 = "int8"
"""The value of `LoRA.base` for a base in 8 bits."""


@register
@dataclasses.dataclass(frozen=True)
class LoRARule:
    r"""A rule for the rank and the scale of the low-rank updates of parameters with certain paths.

    Attributes:
      pattern: a regular expression that must match the whole path of a parameter, such as
        ``decoder/layers_\d+/mlp/.*``. Paths have the form of looped layers, even if the model scans
        its layers.
      rank: the rank of the updates. None means `LoRA.rank`.
      alpha: determines the factor of the updates, like `LoRA.alpha`. None means `LoRA.alpha`.
    """

    pattern: str
    rank: Count | None = None
    alpha: Positive | None = None

    def __post_init__(self) -> None:
        check_path_pattern("training.adapters.rules", self.pattern)


@register
@dataclasses.dataclass(frozen=True)
class LoRA:
    r"""Selects the parameters that a run with adapters trains, and says how it trains them.

    A kernel W of shape ``[inputs, outputs]`` that `targets` matches becomes
    ``W + scale · A · B``, where A is ``[inputs, rank]`` and B is ``[rank, outputs]``. The scale is
    ``alpha / rank`` (Hu et al. 2022, section 4.1), or ``alpha / √rank`` if `rank_stabilized` is
    true (Kalajdzievski 2023, section 3). If `dora` is true, the kernel becomes
    ``m · V / ‖V‖`` with ``V = W + scale · A · B``. The norm ‖V‖ of each output is taken over the
    inputs, and the magnitude m of each output is trained and begins at ‖W‖ (Liu et al. 2024,
    equation 5). Gradients do not flow through ‖V‖ (section 4.3).

    The same formulas apply to embeddings ``[vocab, d_model]``, whose inputs are the tokens.

    All patterns are regular expressions that must match the whole path of a parameter. Paths have
    the form of looped layers (``encoder/layers_0/...``), even if the model scans its layers.

    Attributes:
      rank: the rank of the updates.
      alpha: determines the scale of the updates; see above.
      targets: the pattern of kernels that have low-rank updates. The default matches the query and
        value projections of attention. None means no kernels.
      rules: ranks and alphas that differ from `rank` and `alpha`. The first rule that matches the
        path of a kernel or an embedding applies.
      rank_stabilized: whether the scale is ``alpha / √rank`` instead of ``alpha / rank``.
      dora: whether the magnitudes of kernels and embeddings are trained separately; see above.
      embeddings: the pattern of embeddings that have low-rank updates. None means no embeddings.
      tokens: ids of tokens whose entries are trained in every array that `token_arrays` matches.
        All other tokens keep the entries of the base. This is useful for new tokens.
      token_arrays: the pattern of embeddings ``[vocab, d_model]`` and output projections
        ``[d_model, vocab]`` in which the entries of `tokens` are trained. The default matches all
        of them.
      whole: the pattern of parameters that are trained as complete arrays instead of by updates.
        For example, ``.*/bias`` trains all biases, and ``.*/scale`` trains the normalizations.
      base: ``int8`` means that the run holds the kernels, embeddings and output projections of the
        base in 8 bits, with one scale for each output; see `primitives.computed.quantize`. Every
        layer computes its kernels from the 8 bits when it reads them. None means float32.
        Parameters that are trained as complete arrays are always float32.
      base_checksum: the checksum of the base, which is the checkpoint in `Experiment.init_from`. A
        run sets the checksum, so that the adapters are never applied to a different base.
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: str | None = ".*/(query|value)/kernel"
    rules: tuple[LoRARule, ...] = ()
    rank_stabilized: bool = False
    dora: bool = False
    embeddings: str | None = None
    tokens: tuple[Number, ...] = ()
    token_arrays: str = ".*embedding|logits_kernel"
    whole: str | None = None
    base: Annotated[str, Choices((INT8,))] | None = None
    base_checksum: int | None = None

    def __post_init__(self) -> None:
        for name in ("targets", "embeddings", "token_arrays", "whole"):
            check_path_pattern(f"training.adapters.{name}", getattr(self, name) or "")
        if len(set(self.tokens)) < len(self.tokens):
            repeated = next(x for x in self.tokens if self.tokens.count(x) > 1)
            raise ValueError(
                f"training.adapters.tokens contains {repeated} twice. Give every token id once."
            )

    def rank_and_alpha(self, path: str) -> tuple[int, float]:
        """Returns the rank and the alpha of the low-rank update of a parameter.

        Args:
          path: the path of the parameter, in the form of looped layers.
        """
        for rule in self.rules:
            if re.fullmatch(rule.pattern, path):
                return rule.rank or self.rank, rule.alpha or self.alpha
        return self.rank, self.alpha

    def rank_and_scale(self, path: str) -> tuple[int, float]:
        """Returns the rank and the scale of the low-rank update of a parameter.

        Args:
          path: the path of the parameter, in the form of looped layers.
        """
        rank, alpha = self.rank_and_alpha(path)
        return rank, alpha / (rank**0.5 if self.rank_stabilized else rank)
