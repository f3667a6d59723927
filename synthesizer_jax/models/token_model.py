"""The interfaces of models over a vocabulary, and of models that read inputs and write targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention import Mask
from synthesizer_jax.attention.masks import MaskLike
from synthesizer_jax.attention.terms import cap_logits
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import check_types, fields_of, replace
from synthesizer_jax.base.typing import AUTO, AutoDtype, Length, Positive, PyTree
from synthesizer_jax.mixers.base import take_positions
from synthesizer_jax.models.block import LayerCache
from synthesizer_jax.models.stack import Stack, unstack_layers
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.mesh import map_over_batch, mesh_axes, on_any_mesh
from synthesizer_jax.primitives.parameters import Variables, with_axes
from synthesizer_jax.primitives.products import output_product

_Model = TypeVar("_Model", bound=nn.Module)


class TokenModel(nn.Module, kw_only=True):
    """The base of models with an embedding and an output projection over one vocabulary.

    Dropout is active if the random stream ``dropout`` is given, as in
    ``model.apply(variables, ..., rngs={"dropout": key})``. Without it nothing is dropped, not even
    in training. Take gradients only of the collection ``params``. Arrays that are never trained,
    such as a Fixed Random table, are in ``constants``.

    Attributes:
      vocab_size: number of rows of the embedding. T5 has 32,128 rows for 32,100 pieces.
      d_model: width of the model.
      tied: whether the embedding is also the output projection.
      embedding_scale: factor of the embedded tokens. It is √d_model in the original Transformer.
      logits_scale: factor of the input of the output projection. None means 1/√d_model if `tied`
        (T5 1.0), and 1 otherwise.
      logits_soft_cap: the logits x become ``cap · tanh(x / cap)`` (Gemma 2). None means that they
        stay as they are.
      dtype: dtype of the computation, ``"float32"`` or ``"bfloat16"``. Float16 is not offered,
        because activations of T5's feed-forward layers overflow it. Parameters are float32. In an
        experiment the dtype may be ``"auto"``, but a model with this dtype cannot be applied; see
        `resolve_dtype`.
      ids: the ids of padding, of the end of a text and of the decoder's first input.
      embedding_init: initializer of the embedding.
      logits_init: initializer of the output projection, if it is not tied.
    """

    vocab_size: Length
    d_model: Length
    tied: bool = False
    embedding_scale: float = 1.0
    logits_scale: float | None = None
    logits_soft_cap: Positive | None = None
    dtype: AutoDtype = "float32"
    ids: SpecialIds = T5_IDS
    embedding_init: Initializer = Normal(1.0)
    logits_init: Initializer = FanIn()

    def setup(self) -> None:
        """Creates the embedding and, unless tied, the output projection."""
        check_types(type(self), fields_of(self), type(self).__name__)
        if self.dtype == AUTO:
            raise ValueError(
                f"{type(self).__name__}: dtype is {AUTO!r}, which must be replaced with the dtype "
                "of a platform first. Use models.resolve_dtype(model), or set dtype='float32' or "
                "dtype='bfloat16'."
            )
        shape = (self.vocab_size, self.d_model)
        self.embedding = self.param(
            "embedding", with_axes(self.embedding_init, "vocab", "embed"), shape
        )
        if not self.tied:
            init = with_axes(self.logits_init, "embed", "vocab")
            self.logits_kernel = self.param("logits_kernel", init, shape[::-1])

    def example(self, inputs_length: int, targets_length: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the abstract arguments of `__call__` for one example: inputs and targets."""
        lengths = (inputs_length, targets_length)
        return tuple(jax.ShapeDtypeStruct((1, length), jnp.int32) for length in lengths)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeds tokens ``[batch, length]`` as ``[batch, length, d_model]``, in `dtype`."""
        return self.look_up(self.embedding, tokens, self.embedding_scale)

    def look_up(self, table: jax.Array, tokens: jax.Array, scale: float) -> jax.Array:
        """Looks up tokens ``[batch, length]`` in a table ``[vocab, d]``, and scales the result."""
        if mesh_axes("batch"):
            # Each device sums the gradient of the table over its own examples.
            x = map_over_batch(_embedding_lookup, table.astype(self.dtype), tokens)
        else:
            x = jnp.take(table, tokens, axis=0)
        if scale != 1.0:
            x = x * scale
        return x.astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the float32 logits ``[batch, q, vocab]`` of states ``[batch, q, d_model]``."""
        kernel, scale = self.output_kernel()
        product = output_product(hidden * jnp.asarray(scale, hidden.dtype), kernel)
        return cap_logits(product, self.logits_soft_cap)

    def output_kernel(self) -> tuple[jax.Array, float]:
        """Returns the output projection ``[d_model, vocab]`` and the factor of its input.

        The caller applies `logits_soft_cap` to the product.
        """
        scale = self.logits_scale
        if self.tied:
            return self.embedding.T, self.d_model**-0.5 if scale is None else scale
        return self.logits_kernel, 1.0 if scale is None else scale


@jax.custom_vjp
def _embedding_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks up rows ``[..., d]`` of a table, with a gradient that each device sums in float32.

    The sums of the devices are then added in the table's dtype, like the gradients of all other
    parameters.
    """
    return jnp.take(table, tokens, axis=0)


_Residuals: TypeAlias = tuple[jax.Array, jax.Array]
"""An empty array ``[0, vocab, d]`` with the table's shape and dtype, and the tokens."""


def _embedding_lookup_fwd(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, _Residuals]:
    """Returns the rows, and residuals that hold the tokens but no copy of the table."""
    empty = jnp.zeros_like(table, shape=(0, *table.shape))
    return _embedding_lookup(table, tokens), (empty, tokens)


def _embedding_lookup_bwd(residuals: _Residuals, g: jax.Array) -> tuple[jax.Array, None]:
    """Returns the cotangent of the table, which is summed in float32. Tokens have none."""
    empty, tokens = residuals
    dtable = jnp.zeros(empty.shape[1:], jnp.float32).at[tokens].add(g.astype(jnp.float32))
    return dtable.astype(empty.dtype), None


_embedding_lookup.defvjp(_embedding_lookup_fwd, _embedding_lookup_bwd)


def num_real_tokens(tokens: jax.Array, padding: int) -> jax.Array:
    """Returns the number of real tokens in each row, ``[batch]``.

    A token is real if it is not `padding`.
    """
    return (tokens != padding).sum(axis=-1, dtype=jnp.int32)


def move_token_padding_last(tokens: jax.Array, padding: int) -> tuple[jax.Array, jax.Array]:
    """Moves the padding of rows ``[batch, n]`` to the end.

    Models read their inputs through this function. Positions then count real tokens, so the outputs
    do not depend on where the padding is.

    Returns:
      The tokens in their new order, and the old index of each token, both ``[batch, n]``.
    """
    # The sort is stable, so the real tokens keep their order.
    order = jnp.argsort(tokens == padding, axis=1, stable=True)
    return take_positions(tokens, order), order


def token_mask(mask: MaskLike, *, batch: int, length: int) -> Mask | None:
    """Converts the argument `mask` of a model to a `Mask`, or returns None if there is none.

    An array with two axes says which tokens are real, because the usual mask of tokens is a
    tokenizer's attention mask. Layers read vectors and follow Flax instead: for them two axes are
    ``[q, k]``; see `Mask.of`. Arrays hide only keys. The states of padding are those of a query
    that sees the real tokens, as in transformers.

    Args:
      mask: None, a `Mask`, or an array of booleans or of zeros and ones. The array is
        ``[batch or 1, keys]`` or ``[batch or 1, heads or 1, q or 1, keys]``.
      batch: number of rows of the tokens.
      length: number of tokens in a row.

    Raises:
      ValueError: an array has another shape, or other numbers than zeros and ones.
      TypeError: `mask` is something else.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if isinstance(mask, jax.Array | np.ndarray):
        fits = mask.ndim == 4 or (
            mask.ndim == 2 and mask.shape[0] in (1, batch) and mask.shape[1] == length
        )
        if not fits:
            raise ValueError(
                f"The mask of a model has shape {mask.shape}, but it must be [batch or 1, keys], "
                f"which is [{batch} or 1, {length}] here, or have the four axes [batch or 1, heads "
                "or 1, q, keys]. Pass mask[None, None] if your mask is [q, keys], or mask[:, None] "
                "if it is [batch, q, keys]."
            )
        if mask.ndim == 2:
            mask = mask[:, None, None]
    return Mask.of(mask)


def real_targets_mask(tokens: jax.Array, padding: int) -> jax.Array:
    """Returns which positions ``[batch, q]`` of shifted targets are before the padding.

    The first position always counts, because its input is the start token, which may be padding's
    id.
    """
    # The position of each row's last token, [b]. Padding before it is part of the targets.
    is_token = tokens != padding
    positions = jnp.arange(tokens.shape[1])[None]
    last = jnp.max(jnp.where(is_token, positions, 0), axis=1, initial=0)
    return jnp.arange(tokens.shape[1])[None] <= last[:, None]


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Returns the stacks of a model, by the names of their fields."""
    return {name: field for name, field in fields_of(model).items() if isinstance(field, Stack)}


def looped_paths(model: nn.Module, keys: tuple[str, ...]) -> list[str]:
    """Returns the paths that a parameter has if layers are looped.

    A parameter of a scanned stack has one path for each layer that is stacked in it.

    Args:
      model: the model.
      keys: the path of the parameter.
    """
    stack = stacks_of(model).get(keys[0])
    if stack is None or not stack.scan or not keys[1].startswith("run_"):
        return ["/".join(keys)]
    index = int(keys[1].removeprefix("run_"))
    first = sum(run.repeats for run in stack.runs[:index])
    layers = range(first, first + stack.runs[index].repeats)
    return ["/".join((keys[0], f"layers_{layer}", *keys[2:])) for layer in layers]


def resolve_dtype(model: _Model, platform: str | None = None) -> _Model:
    """Returns the model with a specific dtype in place of ``"auto"``.

    ``"auto"`` means float32 on CPUs and bfloat16 elsewhere. A model with another dtype is returned
    as it is.

    Args:
      model: a `TokenModel`.
      platform: the platform of the devices: ``cpu``, ``gpu`` or ``tpu``. None means JAX's default
        backend.
    """
    if fields_of(model)["dtype"] != AUTO:
        return model
    return replace(model, dtype=dtype_of(platform))


def dtype_of(platform: str | None = None) -> str:
    """Returns the dtype that ``"auto"`` means on a platform; see `resolve_dtype`."""
    platform = jax.default_backend() if platform is None else platform
    return "float32" if platform == "cpu" else "bfloat16"


def unroll(model: _Model) -> _Model:
    """Returns the same model with looped layers instead of scanned ones, as decoding requires."""
    return replace(model, **{name: replace(s, scan=False) for name, s in stacks_of(model).items()})


def unroll_variables(model: nn.Module, variables: Variables) -> Variables:
    """Returns the variables of a model in the layout of `unroll(model)`."""
    stacks = stacks_of(model)
    return {
        collection: {
            name: unstack_layers(stacks[name], tree) if name in stacks else tree
            for name, tree in trees.items()
        }
        for collection, trees in variables.items()
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What a model has to know about the rows of a batch, besides their tokens.

    Attributes:
      segments: the segment numbers of packed rows, for inputs ``[batch, k]`` and targets
        ``[batch, q]``. They are 1, 2, … in the order of the row, and 0 for padding. None means that
        every row holds one example.
      counted: ``[batch, q]`` bool, the positions that have a target. Modules average their
        additions to a training loss (`LOSSES`) over these positions. None means all positions
        before the padding, or all segments of packed rows.
      max_segments: an upper bound of the number of segments in a row. With it, terms of absolute
        positions can be computed on unpacked rows.
    """

    segments: tuple[jax.Array, jax.Array] | None = None
    counted: jax.Array | None = None
    max_segments: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingCache:
    """What a model keeps between decoding steps.

    Attributes:
      layers: the caches of the decoder's layers.
      memory_mask: which tokens of the memory are real, with one row for each example. It is None if
        there is no memory.
      prefix_lengths: ``[rows]`` number of tokens that all later tokens see, even beyond a window.
        It is None if there is no prefix.
    """

    layers: tuple[LayerCache, ...]
    memory_mask: Mask | None = None
    prefix_lengths: jax.Array | None = None

    def map_rows(self, function: Callable[[jax.Array], jax.Array]) -> DecodingCache:
        """Applies a function to the arrays that have an entry for every row of targets.

        The rows of an example, such as its beams, share the keys and values of the memory, which
        stay as they are.

        Args:
          function: maps ``[rows, ...]`` to ``[other rows, ...]``, such as ``lambda x: x[order]``.
        """
        layers = tuple(layer.map_rows(function) for layer in self.layers)
        prefix = None if self.prefix_lengths is None else function(self.prefix_lengths)
        return dataclasses.replace(self, layers=layers, prefix_lengths=prefix)


class TextToText(TokenModel, kw_only=True):
    """A model that maps inputs to targets.

    It is trained by teacher forcing and decoded step by step. The trainer, the decoding loops and
    the evaluation use only these methods, as in ``apply_method(model.hidden, variables, ...)``.
    """

    @on_any_mesh
    def __call__(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the logits of every next token of the targets.

        Args:
          encoder_tokens: ``[batch, k]`` integers, with padding on either side.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one, padded on the right.
          rows: which rows are packed. None means that no row is packed.

        Returns:
          ``[batch, q, vocab]`` float32.
        """
        return self.logits(self.hidden(encoder_tokens, decoder_tokens, rows=rows))

    def hidden(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the states of the targets before the projection to the vocabulary.

        The arguments are those of `__call__`.

        Returns:
          ``[batch, q, d_model]``, the argument of `logits`.
        """
        raise NotImplementedError

    def encode_inputs(self, tokens: jax.Array) -> PyTree:
        """Returns what `decode` needs from input tokens ``[batch, k]``.

        It is a pytree of the model's own type.
        """
        raise NotImplementedError

    def decode(self, tokens: jax.Array, memory: PyTree) -> jax.Array:
        """Returns the states ``[batch · n, q, d_model]`` of teacher-forced targets, for `logits`.

        Args:
          tokens: ``[batch · n, q]`` the targets shifted right by one, n rows for each input.
          memory: the result of `encode_inputs`, with ``batch`` rows.
        """
        raise NotImplementedError

    def init_cache(self, encoder_tokens: jax.Array, *, max_length: int) -> DecodingCache:
        """Reads the inputs and returns the cache from which `extend` decodes.

        Args:
          encoder_tokens: ``[batch, k]`` integers, with padding on either side.
          max_length: number of target positions that `extend` may reach.

        Raises:
          ValueError: the model cannot decode so many positions, for example because a table is
            shorter.
        """
        raise NotImplementedError

    def extend(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Decodes the next tokens. The layers must be looped, not scanned; see `unroll`.

        Args:
          tokens: ``[batch · n, q]`` the next tokens of the targets, n rows for each example. The
            first token is the start token.
          cache: the cache from `init_cache` or from the previous step. It must have the rows of the
            tokens.

        Returns:
          ``[batch · n, q, d_model]`` states for `logits`, and the new cache.
        """
        raise NotImplementedError
