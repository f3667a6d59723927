"""What models over a vocabulary share: the embedding and the output projection."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.ambient import mesh_axes, over_rows
from synthesizer_jax.initializers import FanIn, Initializer, Normal
from synthesizer_jax.models.stack import Stack, unstack_layers
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import fields_of, replace


class TokenModel(nn.Module, kw_only=True):
    """Embedding and output projection over one vocabulary.

    Attributes:
      vocab_size: rows of the embedding (T5: 32,128 for 32,100 pieces).
      d_model: width of the model.
      tied: the embedding is also the output projection.
      embedding_scale: factor of the embedded tokens; √d_model in the original Transformer.
      logits_scale: factor of what the output projection reads; None: 1/√d_model where `tied` (T5
        1.0), else 1.
      dtype: dtype of the computation, ``"float32"`` or ``"bfloat16"``; parameters are float32.
    """

    vocab_size: int
    d_model: int
    tied: bool = False
    embedding_scale: float = 1.0
    logits_scale: float | None = None
    dtype: str = "float32"
    embedding_init: Initializer = Normal(1.0)
    logits_init: Initializer = FanIn()

    def setup(self) -> None:
        """Makes the embedding and, unless tied, the output projection."""
        shape = (self.vocab_size, self.d_model)
        self.embedding = self.param(
            "embedding", with_axes(self.embedding_init, "vocab", "embed"), shape
        )
        if not self.tied:
            init = with_axes(self.logits_init, "embed", "vocab")
            self.logits_kernel = self.param("logits_kernel", init, shape[::-1])

    def example(self, inputs_length: int, targets_length: int) -> tuple[Any, ...]:
        """Abstract arguments of `__call__` for one example: inputs and targets."""
        shape = lambda n: jax.ShapeDtypeStruct((1, n), jnp.int32)
        return shape(inputs_length), shape(targets_length)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """``[batch, length]`` tokens to ``[batch, length, d_model]`` in the computation's dtype."""
        if mesh_axes("batch"):
            x = over_rows(look_up, self.embedding.astype(self.dtype), tokens)
        else:
            x = jnp.take(self.embedding, tokens, axis=0)
        return (x if self.embedding_scale == 1.0 else x * self.embedding_scale).astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[batch, q, d_model]`` to ``[batch, q, vocab]``."""
        kernel, scale = self.output_kernel()
        return (hidden * jnp.asarray(scale, hidden.dtype)) @ kernel.astype(hidden.dtype)

    def output_kernel(self) -> tuple[jax.Array, float]:
        """The projection ``[d_model, vocab]`` and the factor of its input, for chunked losses."""
        scale = self.logits_scale
        if self.tied:
            return self.embedding.T, self.d_model**-0.5 if scale is None else scale
        return self.logits_kernel, 1.0 if scale is None else scale


@jax.custom_vjp
def look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows ``[..., d]`` of a table; a device sums their cotangents in float32.

    The devices' sums come together in the table's dtype, like the gradients of all other parameters.
    """
    return jnp.take(table, tokens, axis=0)


def _look_up_forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, Any]:
    return look_up(table, tokens), (jnp.zeros_like(table, shape=(0, *table.shape)), tokens)


def _look_up_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, None]:
    like, tokens = saved
    total = jnp.zeros(like.shape[1:], jnp.float32).at[tokens].add(g.astype(jnp.float32))
    return total.astype(like.dtype), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def lengths(tokens: jax.Array) -> jax.Array:
    """Number of real tokens per row, ``[batch]``; padding (0) is a suffix."""
    return (tokens != 0).sum(axis=-1, dtype=jnp.int32)


def stacks(model: nn.Module) -> dict[str, Stack]:
    """The stacks of a model, by the names of their fields."""
    return {name: field for name, field in fields_of(model).items() if isinstance(field, Stack)}


def unroll(model: Any) -> Any:
    """The same model with looped layers, as decoding needs it."""
    return replace(model, **{name: replace(s, scan=False) for name, s in stacks(model).items()})


def unroll_variables(model: nn.Module, variables: dict[str, Any]) -> dict[str, Any]:
    """A model's variables in the layout of `unroll(model)`, each layer's slice taken once."""
    found = stacks(model)
    return {
        collection: {
            name: unstack_layers(found[name], tree) if name in found else tree
            for name, tree in trees.items()
        }
        for collection, trees in variables.items()
    }
