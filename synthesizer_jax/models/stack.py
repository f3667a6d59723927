"""A stack of layers: runs of equal blocks as a loop or a scan, rematerialised or not."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Mask, Span, Terms
from synthesizer_jax.attention.fused import KEPT
from synthesizer_jax.mixers.base import FORCED, SITES
from synthesizer_jax.models.block import Block, Memory
from synthesizer_jax.models.layers import Dropout, RMSNorm
from synthesizer_jax.registry import fields_of, register

_policies = jax.checkpoint_policies
_attention = _policies.save_only_these_names(KEPT)
REMAT_POLICIES: dict[str, Any] = {
    "full": None,
    "dots": _policies.save_from_both_policies(_policies.checkpoint_dots, _attention),
    "dots_with_no_batch_dims": _policies.save_from_both_policies(
        _policies.checkpoint_dots_with_no_batch_dims, _attention
    ),
}
"""What a rematerialised layer keeps: nothing; all products; only products of parameters. The two latter
keep fused attention's results too."""


@register
@dataclasses.dataclass(frozen=True)
class Run:
    """`repeats` layers of the same configuration, one after another."""

    block: Block
    repeats: int


@register
class Stack(nn.Module):
    """Embedded tokens in, normalised hidden states out.

    Attributes:
      runs: the layers. One run is the usual case; several make different layers.
      bias: one position bias for all layers whose self-attention has logits, such as
        `RelativeBias`.
      positions: a module ``(positions, d_model) -> vectors`` that is added to the embeddings, such
        as `LearnedPositions`.
      input_norm: a normalisation of the embeddings (BERT).
      norm: the normalisation of the output; None in post-norm models, whose last layer ends in one.
      dropout_rate: dropout of the embeddings and of the output.
      scan: each run of several layers is one `nn.scan` with stacked parameters: compile time does
        not grow with the depth.
      remat: None, or a name of `REMAT_POLICIES`: recompute layers in the backward pass.
    """

    runs: tuple[Run, ...]
    bias: nn.Module | None = None
    positions: nn.Module | None = None
    input_norm: nn.Module | None = None
    norm: nn.Module | None = RMSNorm()
    dropout_rate: float = 0.0
    scan: bool = False
    remat: str | None = None

    @property
    def num_layers(self) -> int:
        """Number of layers over all runs."""
        return sum(run.repeats for run in self.runs)

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask | None = None,
        memory: Memory | None = None,
        positions: jax.Array | None = None,
        caches: tuple[Any, ...] | None = None,
        position: int | jax.Array = 0,
        length: int | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...] | None]:
        """Runs all layers.

        Args:
          x: ``[batch, q, d_model]`` embeddings.
          mask: the self-attention's mask.
          memory: the encoder's side, for decoders.
          positions: ``[batch or 1, q]`` in-sequence positions (packed rows); None means `position`
            onwards.
          caches: one entry per layer when decoding, see `Block`; needs `scan=False`.
          position: position of the first token of `x` when decoding.
          length: number of key positions, past ones included; None means q.

        Returns:
          ``[batch, q, d_model]`` and the new caches.
        """
        if self.remat is not None and self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"Stack: remat={self.remat!r}; allowed: None, {', '.join(REMAT_POLICIES)}"
            )
        if caches is not None and self.scan:
            raise ValueError("Stack: decoding runs unrolled; build the model with scan=False")
        if self.positions is not None:
            if positions is None:
                positions = (position + jnp.arange(x.shape[1]))[None]
            module = self.positions.copy(name="position_embedder", parent=self)
            x = x + module(positions, x.shape[-1]).astype(x.dtype)
        if self.input_norm is not None:
            x = self.input_norm.copy(name="embedding_norm", parent=self)(x)
        x = Dropout(self.dropout_rate, name="input_dropout")(x)
        bias = self.position_bias(x.shape[1], position, x.shape[1] if length is None else length)
        if caches is None:
            x = self.all_runs(x, mask, bias, memory)
        else:
            x, caches = self.step(x, mask, bias, memory, caches, position)
        if self.norm is not None:
            x = self.norm.copy(name="final_norm", parent=self)(x)
        return Dropout(self.dropout_rate, name="output_dropout")(x), caches

    def position_bias(self, q: int, position: int | jax.Array, length: int) -> Terms:
        """The stack's shared bias terms."""
        if self.bias is None:
            return ()
        counts = {getattr(run.block.self_mixer, "bias_heads", None) for run in self.runs} - {None}
        if len(counts) != 1:
            raise ValueError(
                "Stack: a shared position bias needs attention, with the same number of heads in "
                "every layer; set bias=None, or put RelativeBias into the layers' own Mixture"
            )
        (heads,) = counts
        module = self.bias.copy(name="relpos_bias", parent=self)
        return module(num_heads=heads, query_span=Span(position, q), key_span=Span(0, length))

    def all_runs(
        self, x: jax.Array, mask: Mask | None, bias: Terms, memory: Memory | None
    ) -> jax.Array:
        """The full pass, scanned or looped."""
        layer = 0
        for index, run in enumerate(self.runs):
            fields = fields_of(run.block)
            if self.scan:
                scanned = nn.scan(
                    self.block_type(in_scan=True),
                    variable_axes=dict.fromkeys(
                        ("params", "constants", "intermediates", SITES, FORCED), 0
                    ),
                    split_rngs={"params": True, "dropout": True},
                    in_axes=nn.broadcast,
                    length=run.repeats,
                    metadata_params={nn.PARTITION_NAME: "layers"},
                )
                x, _ = scanned(**fields, name=f"run_{index}", parent=self)(x, mask, bias, memory)
                continue
            block = self.block_type(in_scan=False)
            for _ in range(run.repeats):
                x, _ = block(**fields, name=f"layers_{layer}", parent=self)(x, mask, bias, memory)
                layer += 1
        return x

    def step(
        self,
        x: jax.Array,
        mask: Mask | None,
        bias: Terms,
        memory: Memory | None,
        caches: tuple[Any, ...],
        position: int | jax.Array,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """One decoding step through unrolled layers, each layer's cache its own leaf."""
        blocks = [run.block for run in self.runs for _ in range(run.repeats)]
        new = []
        for layer, (block, cache) in enumerate(zip(blocks, caches, strict=True)):
            module = block.copy(name=f"layers_{layer}", parent=self)
            x, cache = module(x, mask, bias, memory, cache, position)
            new.append(cache)
        return x, tuple(new)

    def block_type(self, *, in_scan: bool) -> Any:
        """`Block`, rematerialised if the stack says so."""
        if self.remat is None:
            return Block
        policy = REMAT_POLICIES[self.remat]
        return nn.remat(Block, policy=policy, prevent_cse=not in_scan)


def unstack_layers(stack: Stack, variables: dict[str, Any]) -> dict[str, Any]:
    """One collection of a scanned stack's variables in the layout of the same stack with scan=False.

    Args:
      stack: the stack's configuration.
      variables: one collection, ``{"run_0": ..., "final_norm": ...}``.
    """
    result = {k: v for k, v in variables.items() if not k.startswith("run_")}
    layer = 0
    for index, run in enumerate(stack.runs):
        stacked = variables.get(f"run_{index}")
        for i in range(run.repeats):
            if stacked is not None:
                result[f"layers_{layer}"] = jax.tree.map(lambda a, i=i: a[i], stacked)
            layer += 1
    return result


def stack_layers(stack: Stack, variables: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `unstack_layers`."""
    result = {k: v for k, v in variables.items() if not k.startswith("layers_")}
    layer = 0
    for index, run in enumerate(stack.runs):
        names = [f"layers_{layer + i}" for i in range(run.repeats)]
        layer += run.repeats
        if names[0] in variables:
            layers = [variables[name] for name in names]
            result[f"run_{index}"] = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    return result
