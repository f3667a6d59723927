"""A stack of layers: runs of equal blocks as a loop or a scan, rematerialised or not."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention import Cache, Mask, Span, Terms
from synthesizer_jax.attention.fused import KEPT
from synthesizer_jax.attention.masks import positions as positions_in
from synthesizer_jax.mixers.base import FORCED, SITES, NewCache
from synthesizer_jax.mixers.decoding import real_first, take_rows
from synthesizer_jax.models.block import Block, Memory, cache_changes
from synthesizer_jax.models.layers import Dropout, RMSNorm
from synthesizer_jax.registry import fields_of, register

Places: TypeAlias = Any
"""In-sequence positions ``[batch or 1, q]``: NumPy's where they are known, or traced."""

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
      dropout_rate: dropout of the embeddings and, unless `drop_output` is False, of the output.
      scan: each run of several layers is one `nn.scan` with stacked parameters: compile time does
        not grow with the depth.
      remat: None, or a name of `REMAT_POLICIES`: recompute layers in the backward pass.
      drop_output: False: no dropout of the output (You et al. 2020).
    """

    runs: tuple[Run, ...]
    bias: nn.Module | None = None
    positions: nn.Module | None = None
    input_norm: nn.Module | None = None
    norm: nn.Module | None = RMSNorm()
    dropout_rate: float = 0.0
    scan: bool = False
    remat: str | None = None
    drop_output: bool = True

    @property
    def num_layers(self) -> int:
        """Number of layers over all runs."""
        return sum(run.repeats for run in self.runs)

    @property
    def changing_cross_caches(self) -> tuple[bool, ...]:
        """For every layer whether its cross-attention's cache changes while decoding."""
        return tuple(
            cache_changes(run.block.cross_mixer) for run in self.runs for _ in range(run.repeats)
        )

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: Mask | None = None,
        memory: Memory | None = None,
        positions: jax.Array | None = None,
        caches: tuple[Any, ...] | None = None,
        position: int | jax.Array | None = None,
        length: int | None = None,
        counted: jax.Array | None = None,
        shared_positions: nn.Module | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...] | None]:
        """Runs all layers.

        Args:
          x: ``[batch, q, d_model]`` embeddings.
          mask: the self-attention's mask.
          memory: the encoder's side, for decoders.
          positions: ``[batch or 1, q]`` in-sequence positions; None: in packed rows those inside the
            segments, otherwise `position` onwards.
          caches: one entry per layer when decoding, see `Block`; needs `scan=False`. Prompts of
            different lengths are given as to `Attention`.
          position: position of the first token of `x` when decoding, for all or ``[batch]``; None:
            where the caches end.
          length: number of key positions, past ones included; None means q.
          counted: ``[batch, q]`` bool, the positions that count in what modules add to a training
            loss; None: those that are real by the mask.
          shared_positions: a bound module like `positions`, which several stacks share.

        Returns:
          ``[batch, q, d_model]`` and the new caches.
        """
        if (
            caches is not None
            and mask is not None
            and mask.key_valid is not None
            and begins(caches)
        ):
            x, mask, order = real_first(x, mask)
            x, caches = self(
                x,
                mask=mask,
                memory=memory,
                caches=caches,
                position=position,
                length=length,
                shared_positions=shared_positions,
            )
            return take_rows(x, jnp.argsort(order, axis=1)), caches
        if self.remat is not None and self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"Stack: remat={self.remat!r}; allowed: None, {', '.join(REMAT_POLICIES)}"
            )
        if caches is not None and self.scan:
            raise ValueError("Stack: decoding runs unrolled; build the model with scan=False")
        position = next_position(caches) if position is None else position
        length = key_length(caches) if length is None else length
        places = in_sequence(positions, mask, position, x.shape[1])
        if self.positions is not None:
            own = self.positions.copy(name="position_embedder", parent=self)
            x = x + embedded(own, places, x, length)
        if shared_positions is not None:
            x = x + embedded(shared_positions, places, x, length)
        if self.input_norm is not None:
            x = self.input_norm.copy(name="embedding_norm", parent=self)(x)
        x = Dropout(self.dropout_rate, name="input_dropout")(x)
        bias = self.position_bias(x.shape[1], position, x.shape[1] if length is None else length)
        if caches is None:
            x = self.all_runs(x, mask, bias, memory, places=places, counted=counted)
        else:
            x, caches = self.step(x, mask, bias, memory, caches, position, places=places)
        if self.norm is not None:
            x = self.norm.copy(name="final_norm", parent=self)(x)
        rate = self.dropout_rate if self.drop_output else 0.0
        return Dropout(rate, name="output_dropout")(x), caches

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
        self,
        x: jax.Array,
        mask: Mask | None,
        bias: Terms,
        memory: Memory | None,
        *,
        places: Places,
        counted: jax.Array | None,
    ) -> jax.Array:
        """The full pass, scanned or looped."""
        del places, counted
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
        *,
        places: Places,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """One decoding step through unrolled layers, each layer's cache its own leaf."""
        del places
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


def embedded(positions: nn.Module, places: Places, x: jax.Array, length: int | None) -> jax.Array:
    """A bound position module's vectors for ``[batch, q, d_model]`` tokens."""
    limit = getattr(positions, "max_length", None)
    if limit is not None and length is not None and length > limit:
        raise ValueError(
            f"{type(positions).__name__} has max_length={limit} but the caches have room for "
            f"{length} positions; build it with max_length>={length}, or decode fewer tokens"
        )
    return positions(places, x.shape[-1]).astype(x.dtype)


def in_sequence(
    positions: jax.Array | None, mask: Mask | None, position: int | jax.Array, q: int
) -> Places:
    """``[batch or 1, q]`` in-sequence positions as `Stack` was given them; numbers where known."""
    segments = None if mask is None else mask.key_segments
    if positions is None and segments is None:
        if isinstance(position, int):
            return position + np.arange(q)[None]
        return jnp.reshape(position, (-1, 1)) + np.arange(q)
    if segments is None:
        return positions
    places = positions_in(segments) if positions is None else positions
    return jnp.where(segments > 0, places, 0)


def begins(caches: tuple[Any, ...]) -> bool:
    """Whether caches are yet to be made."""
    return any(isinstance(cache, NewCache) for layer in caches for cache in layer)


def next_position(caches: tuple[Any, ...] | None) -> int | jax.Array:
    """Where the caches of a stack's layers end, a scalar or ``[batch]``."""
    if caches is None or begins(caches):
        return 0
    ends = [c.length for layer in caches for c in layer if hasattr(c, "length")]
    if not ends:
        raise ValueError("Stack: no layer's cache counts tokens; give position")
    return ends[0]


def key_length(caches: tuple[Any, ...] | None) -> int | None:
    """The number of key positions that self-attention's caches have room for; None: any."""
    rooms = []
    for own, _ in caches or ():
        if isinstance(own, NewCache) and own.max_length is not None:
            rooms.append(own.max_length)
        elif isinstance(own, Cache) and not own.window:
            rooms.append(own.values.shape[1])
    return max(rooms, default=None)


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
