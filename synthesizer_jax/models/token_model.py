"""What models over a vocabulary share: the embedding and the output projection."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.base.registry import check_types, fields_of, replace
from synthesizer_jax.base.typing import Dtype, Length
from synthesizer_jax.mixers.decoding import take_positions
from synthesizer_jax.models.stack import Stack, unstack_layers
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.mesh import map_over_batch, mesh_axes
from synthesizer_jax.primitives.parameters import Variables, with_axes
from synthesizer_jax.primitives.products import output_product

_Model = TypeVar("_Model", bound=nn.Module)


class TokenModel(nn.Module, kw_only=True):
    """Embedding and output projection over one vocabulary.

    Dropout acts where the random stream ``dropout`` is given, as in ``model.apply(variables, ...,
    rngs={"dropout": key})``; without it nothing is dropped, in training neither. Gradients belong to
    the collection ``params`` alone: what is frozen, such as a Fixed Random table, is in ``constants``.

    Attributes:
      vocab_size: rows of the embedding (T5: 32,128 for 32,100 pieces).
      d_model: width of the model.
      tied: the embedding is also the output projection.
      embedding_scale: factor of the embedded tokens; √d_model in the original Transformer.
      logits_scale: factor of what the output projection reads; None: 1/√d_model where `tied` (T5
        1.0), else 1.
      dtype: dtype of the computation, ``"float32"`` or ``"bfloat16"`` (activations of T5's feed-forward
        layers overflow float16); parameters are float32.
    """

    vocab_size: Length
    d_model: Length
    tied: bool = False
    embedding_scale: float = 1.0
    logits_scale: float | None = None
    dtype: Dtype = "float32"
    embedding_init: Initializer = Normal(1.0)
    logits_init: Initializer = FanIn()

    def setup(self) -> None:
        """Creates the embedding and, unless tied, the output projection."""
        check_types(type(self), fields_of(self), type(self).__name__)
        shape = (self.vocab_size, self.d_model)
        self.embedding = self.param("embedding", with_axes(self.embedding_init, "vocab", "embed"), shape)
        if not self.tied:
            init = with_axes(self.logits_init, "embed", "vocab")
            self.logits_kernel = self.param("logits_kernel", init, shape[::-1])

    def example(self, inputs_length: int, targets_length: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns abstract arguments of `__call__` for one example: inputs and targets."""
        shape = lambda n: jax.ShapeDtypeStruct((1, n), jnp.int32)
        return shape(inputs_length), shape(targets_length)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embeds tokens ``[batch, length]`` as ``[batch, length, d_model]`` in the computation's dtype."""
        if mesh_axes("batch"):
            x = map_over_batch(_embedding_lookup, self.embedding.astype(self.dtype), tokens)
        else:
            x = jnp.take(self.embedding, tokens, axis=0)
        return (x if self.embedding_scale == 1.0 else x * self.embedding_scale).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the float32 logits ``[batch, q, vocab]`` of states ``[batch, q, d_model]``."""
        kernel, scale = self.output_kernel()
        return output_product(hidden * jnp.asarray(scale, hidden.dtype), kernel)

    def output_kernel(self) -> tuple[jax.Array, float]:
        """Returns the projection ``[d_model, vocab]`` and its input's factor, for the training loss."""
        scale = self.logits_scale
        if self.tied:
            return self.embedding.T, self.d_model**-0.5 if scale is None else scale
        return self.logits_kernel, 1.0 if scale is None else scale


@jax.custom_vjp
def _embedding_lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks up rows ``[..., d]`` of a table; a device sums their cotangents in float32.

    The sums of the devices are added in the table's dtype, like the gradients of all other parameters.
    """
    return jnp.take(table, tokens, axis=0)


_Residuals: TypeAlias = tuple[jax.Array, jax.Array]
"""An empty array ``[0, vocab, d]`` with the table's shape and dtype; the tokens."""


def _embedding_lookup_fwd(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, _Residuals]:
    return _embedding_lookup(table, tokens), (
        jnp.zeros_like(table, shape=(0, *table.shape)),
        tokens,
    )


def _embedding_lookup_bwd(residuals: _Residuals, g: jax.Array) -> tuple[jax.Array, None]:
    empty, tokens = residuals
    dtable = jnp.zeros(empty.shape[1:], jnp.float32).at[tokens].add(g.astype(jnp.float32))
    return dtable.astype(empty.dtype), None


_embedding_lookup.defvjp(_embedding_lookup_fwd, _embedding_lookup_bwd)


def num_real_tokens(tokens: jax.Array) -> jax.Array:
    """Returns the number of real tokens per row, ``[batch]``; 0 is padding."""
    return (tokens != 0).sum(axis=-1, dtype=jnp.int32)


def move_token_padding_last(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Moves the padding (0) of rows ``[batch, n]`` to the end; returns them and the order.

    Models read inputs through this, so that padding on the left, or anywhere, changes nothing:
    positions count real tokens.
    """
    order = jnp.argsort(tokens == 0, axis=1, stable=True)
    return take_positions(tokens, order), order


def real_targets_mask(tokens: jax.Array) -> jax.Array:
    """Returns the mask ``[batch, q]`` of shifted targets up to the last non-zero one; the first is real."""
    last = jnp.max(jnp.where(tokens != 0, jnp.arange(tokens.shape[1])[None], 0), axis=1, initial=0)
    return jnp.arange(tokens.shape[1])[None] <= last[:, None]


def stacks_of(model: nn.Module) -> dict[str, Stack]:
    """Returns the stacks of a model by the names of their fields."""
    return {name: field for name, field in fields_of(model).items() if isinstance(field, Stack)}


def unroll(model: _Model) -> _Model:
    """Returns the same model with looped layers, as decoding needs it."""
    return replace(model, **{name: replace(s, scan=False) for name, s in stacks_of(model).items()})


def unroll_variables(model: nn.Module, variables: Variables) -> Variables:
    """Returns a model's variables in the layout of `unroll(model)`, each layer's slice taken once."""
    stacks = stacks_of(model)
    return {
        collection: {
            name: unstack_layers(stacks[name], tree) if name in stacks else tree
            for name, tree in trees.items()
        }
        for collection, trees in variables.items()
    }
