"""The base classes of models over a vocabulary, and of models that map inputs to targets."""

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
from synthesizer_jax.base.typing import AUTO, AutoDtype, Length, Number, Positive, PyTree
from synthesizer_jax.mixers.base import take_positions
from synthesizer_jax.models.block import LayerCache
from synthesizer_jax.models.stack import Stack, unstack_layers
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.mesh import map_over_batch, mesh_axes, on_any_mesh
from synthesizer_jax.primitives.parameters import Variables, with_axes
from synthesizer_jax.primitives.products import output_product

_Model = TypeVar("_Model", bound=nn.Module)


class TokenModel(nn.Module, kw_only=True):
    """The base class of models with an embedding and an output projection over one vocabulary.

    Dropout is active if the random stream ``dropout`` is given, as in
    ``model.apply(variables, ..., rngs={"dropout": key})``. If the random stream is not given,
    nothing is dropped, not even in training. Compute gradients only with respect to the collection
    ``params``. Arrays that are never trained, such as a Fixed Random table, are in the collection
    ``constants``.

    Attributes:
      vocab_size: number of rows of the embedding. T5 has 32,128 rows for the 32,100 pieces of its
        vocabulary.
      d_model: width of the model.
      tied: whether the embedding is also the output projection.
      embedding_scale: factor of the embedded tokens. The original Transformer uses √d_model.
      logits_scale: factor of the input of the output projection. None means 1/√d_model if `tied`
        (T5 1.0), and 1 otherwise.
      logits_soft_cap: a number ``cap``. The logits x become ``cap · tanh(x / cap)``, as in Gemma 2.
        None means that logits are not capped.
      dtype: dtype of the computation, ``"float32"`` or ``"bfloat16"``. Float16 is not allowed,
        because it is too narrow for activations of T5's feed-forward layers. Parameters are always
        float32. In an experiment, the dtype may be ``"auto"``. A model whose dtype is ``"auto"``
        cannot be applied; see `resolve_dtype`.
      ids: the ids of padding, of the end of a text and of the decoder's first input.
      separate_input: an id whose input vector is a parameter of its own, which is not scaled, like
        the vector for the end of an image in T5Gemma 2. The row of the embedding with this id is
        used only by a tied output projection. None means that all input vectors are rows of the
        embedding.
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
    separate_input: Number | None = None
    embedding_init: Initializer = Normal(1.0)
    logits_init: Initializer = FanIn()

    def setup(self) -> None:
        """Creates the embedding, and the output projection if it is not tied."""
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
        if self.separate_input is not None:
            init = with_axes(self.embedding_init, "embed")
            self.separate_embedding = self.param("separate_embedding", init, shape[1:])
        if not self.tied:
            init = with_axes(self.logits_init, "embed", "vocab")
            self.logits_kernel = self.param("logits_kernel", init, shape[::-1])

    def example(self, inputs_length: int, targets_length: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the abstract arguments of `__call__` for an example with inputs and targets."""
        lengths = (inputs_length, targets_length)
        return tuple(jax.ShapeDtypeStruct((1, length), jnp.int32) for length in lengths)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeds tokens ``[batch, length]`` as ``[batch, length, d_model]``, in `dtype`."""
        x = self.look_up(self.embedding, tokens, self.embedding_scale)
        if self.separate_input is None:
            return x
        is_separate = (tokens == self.separate_input)[..., None]  # [batch, length, 1]
        return jnp.where(is_separate, self.separate_embedding.astype(x.dtype), x)

    def look_up(self, table: jax.Array, tokens: jax.Array, scale: float) -> jax.Array:
        """Looks up tokens ``[batch, length]`` in a table ``[vocab, d]``, and scales the result."""
        if mesh_axes("batch"):
            # Each device first sums the gradient of the table over its own examples.
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
        """Returns the output projection ``[d_model, vocab]``, and the factor of its input.

        The caller must apply `logits_soft_cap` to the logits.
        """
        scale = self.logits_scale
        if self.tied:
            return self.embedding.T, self.d_model**-0.5 if scale is None else scale
        return self.logits_kernel, 1.0 if scale is None else scale


@jax.custom_vjp
def _embedding_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks up rows ``[..., d]`` of a table. Each device sums the table's gradient in float32.

    The sums of all devices are added in the table's dtype, like the gradients of other parameters.
    """
    return jnp.take(table, tokens, axis=0)


_Residuals: TypeAlias = tuple[jax.Array, jax.Array]
"""An empty array ``[0, vocab, d]`` with the table's shape and dtype, and the tokens."""


def _embedding_lookup_fwd(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, _Residuals]:
    """Returns the rows of the table, and residuals without a copy of the table."""
    empty = jnp.zeros_like(table, shape=(0, *table.shape))
    return _embedding_lookup(table, tokens), (empty, tokens)


def _embedding_lookup_bwd(residuals: _Residuals, g: jax.Array) -> tuple[jax.Array, None]:
    """Returns the cotangent of the table, summed in float32, and None for the tokens."""
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

    Models call this function on their inputs, so that positions count only real tokens. The outputs
    of a model therefore do not depend on where the padding is.

    Returns:
      The tokens in their new order, and the old index of each token, both ``[batch, n]``.
    """
    # The sort is stable, so the real tokens of a row keep their order.
    order = jnp.argsort(tokens == padding, axis=1, stable=True)
    return take_positions(tokens, order), order


def token_mask(mask: MaskLike, *, batch: int, length: int) -> Mask | None:
    """Converts the argument `mask` of a model to a `Mask`. None is returned unchanged.

    If the mask of a model is an array with two axes, it says which tokens are real, like a
    tokenizer's attention mask. In contrast, an array with two axes in a call of a layer means
    ``[q, k]``, as in Flax; see `Mask.of`. Arrays hide only keys. As in transformers, a padding
    position has the state of a query that sees all real tokens.

    Args:
      mask: None, a `Mask`, or an array of booleans or of zeros and ones. The shape of an array is
        ``[batch or 1, keys]`` or ``[batch or 1, heads or 1, q or 1, keys]``.
      batch: number of rows of the tokens.
      length: number of tokens in a row.

    Raises:
      ValueError: if an array has a shape that is not listed above, or contains numbers other than
        zero and one.
      TypeError: if `mask` has a type that is not listed above.
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
    """Returns whether each position ``[batch, q]`` of shifted targets is before the padding.

    The first position always counts as real, because its input is the start token, which may have
    the same id as padding.
    """
    # `last` is the position of each row's last token, [b]. Padding before the last token is part of
    # the targets.
    is_token = tokens != padding
    positions = jnp.arange(tokens.shape[1])[None]
    last = jnp.max(jnp.where(is_token, positions, 0), axis=1, initial=0)
    return jnp.arange(tokens.shape[1])[None] <= last[:, None]


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Returns the stacks of a model by the names of the model's fields."""
    return {name: field for name, field in fields_of(model).items() if isinstance(field, Stack)}


def looped_paths(model: nn.Module, keys: tuple[str, ...]) -> list[str]:
    """Returns the paths that a parameter would have if the layers were looped.

    A parameter of a scanned stack has one path for each layer whose values are stacked in the
    parameter.

    Args:
      model: the model.
      keys: the path of the parameter in the model.
    """
    stack = stacks_of(model).get(keys[0])
    if stack is None or not stack.scan or not keys[1].startswith("run_"):
        return ["/".join(keys)]
    index = int(keys[1].removeprefix("run_"))
    first = sum(run.repeats for run in stack.runs[:index])
    layers = range(first, first + stack.runs[index].repeats)
    return ["/".join((keys[0], f"layers_{layer}", *keys[2:])) for layer in layers]


def resolve_dtype(model: _Model, platform: str | None = None) -> _Model:
    """Returns a copy of a model in which the dtype ``"auto"`` is replaced by a specific dtype.

    The dtype ``"auto"`` becomes float32 on CPUs and bfloat16 on other platforms. A model whose
    dtype is not ``"auto"`` is returned unchanged.

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
    """Returns a copy of a model with looped layers instead of scanned layers, for decoding."""
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
    """Describes the rows of a batch, such as the segments of packed rows.

    Attributes:
      segments: the segment numbers of packed rows, for inputs ``[batch, k]`` and targets
        ``[batch, q]``. The segments of a row are numbered 1, 2, …, and padding has the number 0.
        None means that every row holds one example.
      counted: ``[batch, q]`` bool, which says which positions have a target. Modules average their
        additions to a training loss (`LOSSES`) over the positions that have a target. None means
        all positions before the padding, or all segments of packed rows.
      max_segments: an upper bound of the number of segments in a row. If the bound is given, terms
        of absolute positions can be computed on unpacked rows.
    """

    segments: tuple[jax.Array, jax.Array] | None = None
    counted: jax.Array | None = None
    max_segments: int | None = dataclasses.field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodingCache:
    """The state that a model keeps between decoding steps.

    Attributes:
      layers: the caches of the decoder's layers.
      memory_mask: the mask that says which tokens of the memory are real, with one row for each
        example. None means that the model has no memory.
      prefix_lengths: ``[rows]`` the number of tokens that all later tokens see, even beyond a
        window. None means that there is no prefix.
    """

    layers: tuple[LayerCache, ...]
    memory_mask: Mask | None = None
    prefix_lengths: jax.Array | None = None

    def map_rows(self, function: Callable[[jax.Array], jax.Array]) -> DecodingCache:
        """Applies a function to all arrays that have an entry for every row of targets.

        The rows of an example, such as its beams, share the keys and values of the memory. The
        function is not applied to arrays that the rows of an example share.

        Args:
          function: a function from ``[rows, ...]`` to ``[other rows, ...]``, such as
            ``lambda x: x[order]``.
        """
        layers = tuple(layer.map_rows(function) for layer in self.layers)
        prefix = None if self.prefix_lengths is None else function(self.prefix_lengths)
        return dataclasses.replace(self, layers=layers, prefix_lengths=prefix)

    def share_among_beams(self, beams: int) -> DecodingCache:
        """Returns the cache of `beams` rows of targets for each example; see `LayerCache`."""
        layers = tuple(layer.share_among_beams(beams) for layer in self.layers)
        prefix = self.prefix_lengths
        if prefix is not None:
            prefix = jnp.repeat(prefix, beams)
        return dataclasses.replace(self, layers=layers, prefix_lengths=prefix)

    def reorder_beams(self, source: jax.Array) -> DecodingCache:
        """Returns the cache after every beam has taken over the past of another beam.

        Args:
          source: ``[b, n]`` the beam whose past each beam takes over.
        """
        layers = tuple(layer.reorder_beams(source) for layer in self.layers)
        # The beams of an example have the same prefix.
        return dataclasses.replace(self, layers=layers)


class TextToText(TokenModel, kw_only=True):
    """The base class of models that map inputs to targets.

    A `TextToText` model is trained by teacher forcing and decoded step by step. The trainer, the
    decoding loops and the evaluation call only the methods of this class, as in
    ``apply_method(model.hidden, variables, ...)``.
    """

    @on_any_mesh
    def __call__(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the logits of every next token of the targets.

        Args:
          encoder_tokens: ``[batch, k]`` integers, with padding on either side.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one, padded on the right.
          rows: the segment numbers of packed rows. None means that no row is packed.

        Returns:
          ``[batch, q, vocab]`` float32.
        """
        return self.logits(self.hidden(encoder_tokens, decoder_tokens, rows=rows))

    def hidden(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the states of the targets before the projection to the vocabulary.

        The arguments are the same as those of `__call__`.

        Returns:
          ``[batch, q, d_model]`` states, which are the argument of `logits`.
        """
        raise NotImplementedError

    def encode_inputs(self, tokens: jax.Array) -> PyTree:
        """Reads input tokens ``[batch, k]``, and returns the memory for `decode`.

        The memory is a pytree, and each model has its own type of memory.
        """
        raise NotImplementedError

    def decode(self, tokens: jax.Array, memory: PyTree) -> jax.Array:
        """Returns the states ``[batch · n, q, d_model]`` of the targets, with teacher forcing.

        Args:
          tokens: ``[batch · n, q]`` the targets shifted right by one, with n rows for each input.
          memory: the result of `encode_inputs`, with ``batch`` rows.
        """
        raise NotImplementedError

    def init_cache(self, encoder_tokens: jax.Array, *, max_length: int) -> DecodingCache:
        """Reads the inputs and returns the cache from which `extend` decodes.

        Args:
          encoder_tokens: ``[batch, k]`` integers, with padding on either side.
          max_length: the largest number of target positions that `extend` can fill.

        Raises:
          ValueError: if the model cannot decode `max_length` positions, for example because a table
            is shorter.
        """
        raise NotImplementedError

    def extend(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Decodes the next tokens. The layers must be looped, not scanned; see `unroll`.

        Args:
          tokens: ``[batch · n, q]`` the next tokens of the targets, with n rows for each example.
            The first token of the targets is the start token.
          cache: the cache from `init_cache` or from the previous step. The rows of the cache and of
            the tokens must correspond.

        Returns:
          ``[batch · n, q, d_model]`` states for `logits`, and the new cache.
        """
        raise NotImplementedError
