"""A stack of layers, which runs as a loop or as a scan, with or without rematerialization."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Annotated, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments import Alignment, AttentionContext
from synthesizer_jax.attention import Cache, Mask, Span, Terms
from synthesizer_jax.attention.fused_route import CHECKPOINT_NAME
from synthesizer_jax.attention.masks import MaskLike, segment_positions
from synthesizer_jax.attention.relative_table import arange
from synthesizer_jax.base.registry import check_fields, fields_of, register
from synthesizer_jax.base.typing import Choices, NotEmpty, Range, Rate
from synthesizer_jax.mixers.base import move_padding_last, resolve_position, take_positions
from synthesizer_jax.mixers.taps import LOGITS, LOSSES, OVERRIDES, TAPS
from synthesizer_jax.models.block import Block, LayerCache, Memory
from synthesizer_jax.models.layers import Dropout, PositionEmbedding
from synthesizer_jax.primitives.norms import RMSNorm
from synthesizer_jax.primitives.parameters import Variables

Positions: TypeAlias = jax.Array | np.ndarray
"""In-sequence positions ``[batch or 1, q]``, which are a NumPy array unless they are traced."""

_policies = jax.checkpoint_policies
_attention = _policies.save_only_these_names(CHECKPOINT_NAME)
REMAT_POLICIES: dict[str, Callable[..., bool] | None] = {
    "full": None,
    "dots": _policies.save_from_both_policies(_policies.checkpoint_dots, _attention),
    "dots_with_no_batch_dims": _policies.save_from_both_policies(
        _policies.checkpoint_dots_with_no_batch_dims, _attention
    ),
}
"""The policies that say what a rematerialized layer saves for the backward pass.

``full`` saves nothing. ``dots`` saves the results of all matrix products.
``dots_with_no_batch_dims`` saves only the results of matrix products with parameters. ``dots`` and
``dots_with_no_batch_dims`` also save the results of fused attention.
"""
Remat: TypeAlias = Annotated[str, Choices(tuple(REMAT_POLICIES))]


@register
@dataclasses.dataclass(frozen=True)
class Run:
    """Several layers of a `Stack` with the same configuration, one after another.

    A `Run` is not a training run. The name is from run-length encoding: a stack of 12 equal layers
    has a single `Run` with 12 repeats.

    Attributes:
      block: the configuration of a layer.
      repeats: number of layers.
    """

    block: Block
    repeats: Annotated[int, Range(1, 256)]


@register
class Stack(nn.Module):
    """A sequence of layers, from embedded tokens to normalized hidden states.

    Attributes:
      runs: the layers of the stack. Most models have one run. A stack whose layers differ consists
        of several runs of equal layers.
      bias: a position bias that is shared by all layers whose self-attention has logits, such as
        `RelativeBias`.
      positions: a module ``(positions, d_model) -> vectors`` whose vectors are added to the
        embeddings, such as `LearnedPositions`.
      input_norm: a normalization of the embeddings, as in BERT.
      norm: the normalization of the output. Post-norm models use None, because the last layer of a
        post-norm model ends with a normalization.
      dropout_rate: probability of dropping a feature of the embeddings and, if `drop_output` is
        True, of the output.
      scan: whether each run of several layers is one `nn.scan` with stacked parameters. The compile
        time of a scan does not grow with the number of layers.
      remat: a name from `REMAT_POLICIES`, to recompute layers in the backward pass. None means that
        layers are not recomputed.
      elementwise_dropout: whether every position has its own random draw, instead of one draw for
        all positions; see `Dropout`.
      drop_output: whether dropout is applied to the output. You et al. 2020 do not apply dropout to
        the output.
    """

    runs: Annotated[tuple[Run, ...], NotEmpty()]
    bias: Alignment | None = None
    positions: PositionEmbedding | None = None
    input_norm: nn.Module | None = None
    norm: nn.Module | None = RMSNorm(parent=None)
    dropout_rate: Rate = 0.0
    scan: bool = False
    remat: Remat | None = None
    elementwise_dropout: bool = False
    drop_output: bool = True

    @property
    def num_layers(self) -> int:
        """The number of layers in all runs together."""
        return sum(run.repeats for run in self.runs)

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: MaskLike = None,
        memory: Memory | None = None,
        counted: jax.Array | None = None,
        shared_positions: PositionEmbedding | None = None,
    ) -> jax.Array:
        """Applies all layers.

        Args:
          x: ``[batch, q, d_model]`` embeddings.
          mask: the mask of self-attention. An array with two axes means ``[q, k]``, as in layers;
            see `Mask.of`.
          memory: the memory to which a decoder attends.
          counted: ``[batch, q]`` bool, which says over which positions modules average their
            additions to a training loss. None means the positions that are real according to the
            mask.
          shared_positions: a bound position module that several stacks share; see `positions`.

        Returns:
          ``[batch, q, d_model]``.
        """
        mask = None if mask is None else Mask.of(mask)
        positions = _positions_of(mask, 0, q=x.shape[1])
        if counted is None and mask is not None:
            counted = mask.for_self_attention().queries(x.shape[1])

        def layers(x: jax.Array, bias: Terms) -> jax.Array:
            """Applies the layers to embeddings."""
            if self.scan:
                return self._scan(x, mask, bias, memory)

            blocks = self._blocks()

            def layer(x: jax.Array, index: int) -> jax.Array:
                """Applies one layer."""
                x, _ = blocks[index](x, mask, bias, memory)
                return x

            return self._repeat(x, layer, positions, counted)

        return self._apply_around(x, layers, positions, shared_positions, num_keys=x.shape[1])

    @nn.compact
    def init_cache(
        self,
        x: jax.Array,
        memory: Memory | None = None,
        *,
        max_length: int,
        whole: bool = False,
        shared_positions: PositionEmbedding | None = None,
    ) -> tuple[LayerCache, ...]:
        """Returns the caches of all layers, which hold only the keys and values of the memory.

        Args:
          x: ``[batch, any, d_model]``. The method reads only the shape and the dtype of `x`.
          memory: the memory to which a decoder attends.
          max_length: the largest number of positions that `extend` can fill.
          whole: see `Mixer.init_cache`. If the stack has a position bias, the caches always keep
            all positions, because the bias is computed for all positions.
          shared_positions: as in `__call__`.

        Raises:
          ValueError: if a layer cannot decode, or it has fewer than `max_length` positions.
        """
        for positions in (self.positions, shared_positions):
            limit = getattr(positions, "max_length", None)
            if limit is not None and max_length > limit:
                raise ValueError(
                    f"{type(positions).__name__} has max_length={limit}, but the caches have room "
                    f"for {max_length} positions. Set max_length to {max_length} or more, or "
                    "decode fewer tokens."
                )
        blocks = self._blocks()
        whole = whole or self.bias is not None
        return tuple(
            b.init_cache(x[:, :0], memory, max_length=max_length, whole=whole) for b in blocks
        )

    def extend(
        self,
        x: jax.Array,
        caches: tuple[LayerCache, ...],
        *,
        mask: MaskLike = None,
        memory_mask: MaskLike = None,
        shared_positions: PositionEmbedding | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Applies all layers to new tokens and extends the caches; see `Mixer.extend`.

        Args:
          x: ``[batch · n, q, d_model]`` embeddings, with n rows for each row of the memory.
          caches: the caches from `init_cache` or from the previous step.
          mask: the mask of self-attention.
          memory_mask: the mask of cross-attention, with ``batch`` rows.
          shared_positions: as in `__call__`.

        Returns:
          ``[batch · n, q, d_model]`` and the new caches.
        """
        mask = None if mask is None else Mask.of(mask)
        position = resolve_position(None, caches[0].length)
        order = None
        if mask is not None and mask.key_valid is not None:
            x, mask, order = move_padding_last(x, mask, position=position)

        extended = list(caches)
        positions = _positions_of(mask, position, q=x.shape[1])

        def layers(x: jax.Array, bias: Terms) -> jax.Array:
            """Applies the layers to embeddings and extends their caches."""
            blocks = self._blocks()

            def layer(x: jax.Array, index: int) -> jax.Array:
                """Applies one layer and extends its cache."""
                x, extended[index] = blocks[index].extend(
                    x,
                    caches[index],
                    mask=mask,
                    bias=bias,
                    memory_mask=memory_mask,
                    position=position,
                )
                return x

            return self._repeat(x, layer, positions)

        num_keys = _capacity(caches) or x.shape[1]
        x = self._apply_around(
            x, layers, positions, shared_positions, num_keys=num_keys, position=position
        )
        if order is not None:
            # The inverse permutation moves the states back to the original positions of their
            # tokens.
            x = take_positions(x, jnp.argsort(order, axis=1))
        return x, tuple(extended)

    @nn.compact
    def _apply_around(
        self,
        x: jax.Array,
        layers: Callable[[jax.Array, Terms], jax.Array],
        positions: Positions,
        shared_positions: PositionEmbedding | None,
        *,
        num_keys: int,
        position: int | jax.Array = 0,
    ) -> jax.Array:
        """Applies ``layers(x, bias)`` to embeddings, with positions, norms and dropout."""
        check_fields(self, type(self).__name__)
        if self.positions is not None:
            embedder = self.positions.copy(name="position_embedder", parent=self)
            x = x + embedder(positions, x.shape[-1]).astype(x.dtype)
        if shared_positions is not None:
            x = x + shared_positions(positions, x.shape[-1]).astype(x.dtype)
        if self.input_norm is not None:
            x = self.input_norm.copy(name="embedding_norm", parent=self)(x)
        x = Dropout(self.dropout_rate, self.elementwise_dropout, name="input_dropout")(x)
        x = layers(x, self._position_bias(x, position, num_keys))
        if self.norm is not None:
            x = self.norm.copy(name="final_norm", parent=self)(x)
        rate = self.dropout_rate if self.drop_output else 0.0
        return Dropout(rate, self.elementwise_dropout, name="output_dropout")(x)

    def _blocks(self) -> list[Block]:
        """Returns the blocks of all layers as bound submodules."""
        if self.scan:
            raise ValueError(
                "Stack: scanned layers cannot decode. Build the model with scan=False, or convert "
                "it with models.unroll."
            )
        # The type of the blocks may be the rematerialized `Block`, so the blocks are built from the
        # fields of their configurations instead of being copied.
        block = self._block_type()
        configs = [run.block for run in self.runs for _ in range(run.repeats)]
        return [
            block(**fields_of(config), name=f"layers_{i}", parent=self)
            for i, config in enumerate(configs)
        ]

    def _repeat(
        self,
        x: jax.Array,
        layer: Callable[[jax.Array, int], jax.Array],
        positions: Positions,
        counted: jax.Array | None = None,
    ) -> jax.Array:
        """Applies ``layer(x, index)`` for every layer.

        `UniversalStack` overrides this method. Only a `UniversalStack` reads `positions` and
        `counted`.
        """
        for index in range(self.num_layers):
            x = layer(x, index)
        return x

    def _scan(
        self, x: jax.Array, mask: Mask | None, bias: Terms, memory: Memory | None
    ) -> jax.Array:
        """Applies the layers of every run in a scan."""
        stacked = "params", "constants", "intermediates", LOGITS, LOSSES, TAPS, OVERRIDES
        for index, run in enumerate(self.runs):
            # Each layer has its own slice of every collection, along an additional first axis.
            scanned = nn.scan(
                self._block_type(),
                variable_axes=dict.fromkeys(stacked, 0),
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=run.repeats,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            layers = scanned(**fields_of(run.block), name=f"run_{index}", parent=self)
            x, _ = layers(x, mask, bias, memory)
        return x

    def _position_bias(self, x: jax.Array, position: int | jax.Array, num_keys: int) -> Terms:
        """Returns the terms of the bias that all layers share."""
        if self.bias is None:
            return ()
        mixers = [run.block.self_mixer for run in self.runs]
        counts = {mixer.bias_heads for mixer in mixers if mixer.bias_heads is not None}
        if len(counts) != 1:
            raise ValueError(
                "Stack: a shared position bias needs attention with the same number of heads in "
                "every layer. Set bias=None, or put a RelativeBias into the Mixture of each layer."
            )
        (heads,) = counts

        # Position biases such as `RelativeBias` do not read `head_dim`, and the layers may have
        # heads of different widths. The usual width d_model / heads is only a placeholder.
        context = AttentionContext(
            num_heads=heads,
            head_dim=x.shape[-1] // heads,
            query_span=Span(position, x.shape[1]),
            key_span=Span(0, num_keys),
        )
        return self.bias.copy(name="relpos_bias", parent=self)(x, x, context)

    def _block_type(self) -> type[Block]:
        """Returns the class `Block`, with rematerialization if `remat` is set."""
        if self.remat is None:
            return Block
        # In a scan, XLA cannot merge the recomputation with the forward pass, so `prevent_cse` is
        # only needed in a loop.
        rematerialized: type[Block] = nn.remat(
            Block, policy=REMAT_POLICIES[self.remat], prevent_cse=not self.scan
        )
        return rematerialized


def _positions_of(mask: Mask | None, position: int | jax.Array, *, q: int) -> Positions:
    """Returns the positions ``[batch or 1, q]`` of q tokens, as a NumPy array if none is traced.

    In packed rows, the positions start again in every segment. In rows that are not packed, the
    positions count up from `position`.
    """
    segments = None if mask is None else mask.key_segments
    if segments is not None:
        return jnp.where(segments > 0, segment_positions(segments), 0)
    if isinstance(position, int):
        return position + arange(0, q)[None]
    return jnp.reshape(position, (-1, 1)) + arange(0, q)[None]


def _capacity(caches: tuple[LayerCache, ...]) -> int | None:
    """Returns the number of key positions in self-attention's caches, or None for no limit."""
    self_caches = [cache.self_attention for cache in caches]
    return max(
        (c.capacity for c in self_caches if isinstance(c, Cache) and not c.window), default=None
    )


def unstack_layers(stack: Stack, variables: Variables) -> Variables:
    """Converts variables of a scanned stack to the layout of the looped stack.

    Args:
      stack: the stack's configuration.
      variables: the variables of one collection, ``{"run_0": ..., "final_norm": ...}``.
    """
    result = {name: tree for name, tree in variables.items() if not name.startswith("run_")}
    for run, names in _layers_of_runs(stack):
        if run not in variables:
            continue
        for i, name in enumerate(names):
            result[name] = jax.tree.map(lambda a, i=i: a[i], variables[run])
    return result


def stack_layers(stack: Stack, variables: Variables) -> Variables:
    """Converts variables of a looped stack to the layout of the scanned stack.

    This function is the inverse of `unstack_layers`, and has the same arguments.
    """
    result = {name: tree for name, tree in variables.items() if not name.startswith("layers_")}
    for run, names in _layers_of_runs(stack):
        if names[0] in variables:
            layers = [variables[name] for name in names]
            result[run] = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    return result


def _layers_of_runs(stack: Stack) -> Iterator[tuple[str, list[str]]]:
    """Yields every run's name in a scanned stack, and the names of its layers in a looped stack."""
    layer = 0
    for index, run in enumerate(stack.runs):
        yield f"run_{index}", [f"layers_{layer + i}" for i in range(run.repeats)]
        layer += run.repeats
