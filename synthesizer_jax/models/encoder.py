"""Encoder-only models: classifiers, regressors and masked language models."""

from __future__ import annotations

import functools
from typing import Annotated, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import dense_layer
from synthesizer_jax.attention import Mask
from synthesizer_jax.attention.masks import MaskLike
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Length, Number
from synthesizer_jax.mixers.base import take_positions
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.models.token_model import (
    TokenModel,
    move_token_padding_last,
    num_real_tokens,
    token_mask,
)
from synthesizer_jax.primitives.initializers import Initializer, Normal
from synthesizer_jax.primitives.mesh import on_any_mesh
from synthesizer_jax.primitives.norms import LayerNorm
from synthesizer_jax.primitives.parameters import with_axes
from synthesizer_jax.primitives.products import output_product

Pooling: TypeAlias = Annotated[str, Choices(("mean", "first"))]


class Encoded(NamedTuple):
    """The outputs of an encoder for a batch of texts.

    Attributes:
      hidden: ``[batch, length, d_model]`` the states of the tokens.
      pooled: ``[batch, d_model]`` a vector for each text.
      outputs: ``[batch, outputs]`` float32, the logits of a classifier or the values of a
        regressor. None means that the model has no head for classification or regression.
      token_logits: ``[batch, length, vocab]`` float32, the logits of a masked language model. None
        means that the model has no head for masked language modeling.
    """

    hidden: jax.Array
    pooled: jax.Array
    outputs: jax.Array | None
    token_logits: jax.Array | None


@register
class Encoder(TokenModel, kw_only=True):
    """A model with a single stack that reads a whole text.

    See `TokenModel` for more fields.

    Attributes:
      encoder: the stack that reads the text.
      pooling: how the vector of a text is computed. ``"mean"`` averages the states of the real
        tokens, and ``"first"`` takes the state of the first real token ([CLS]).
      pooler: whether the model has a dense layer with tanh after the pooling, as in BERT.
      outputs: number of classes of a classifier, or number of values of a regressor. None means
        that the model is neither a classifier nor a regressor.
      masked_lm: whether the model has BERT's head for masked language modeling. The head consists
        of a dense layer, GELU, a normalization, a product with the embedding (if `tied`) or with a
        projection, and a bias.
      token_types: number of segment embeddings. BERT has two. A value of 0 means that there are no
        segment embeddings.
      tied: whether the head for masked language modeling uses the embedding as its projection.
      head_init: initializer of the heads' kernels.
    """

    encoder: Stack
    pooling: Pooling = "mean"
    pooler: bool = False
    outputs: Length | None = None
    masked_lm: bool = False
    token_types: Number = 0
    tied: bool = True
    head_init: Initializer = Normal(0.02)

    def setup(self) -> None:
        """Creates the embeddings and the heads."""
        super().setup()
        dense = functools.partial(dense_layer, kernel_init=self.head_init, use_bias=True)
        axes: tuple[str | None, ...] = ("embed", None)
        if self.token_types:
            init = with_axes(self.embedding_init, None, "embed")
            self.type_embedding = self.param(
                "type_embedding", init, (self.token_types, self.d_model)
            )
        if self.pooler:
            self.pooler_dense = dense(self.d_model, axes, dtype=self.dtype)
        if self.outputs is not None:
            self.output_dense = dense(self.outputs, axes, dtype=jnp.float32)
        if self.masked_lm:
            self.token_dense = dense(self.d_model, axes, dtype=self.dtype)
            self.token_norm = LayerNorm(epsilon=1e-12)
            init = with_axes(nn.initializers.zeros_init(), "vocab")
            self.token_bias = self.param("token_bias", init, (self.vocab_size,))

    @on_any_mesh
    def __call__(
        self, tokens: jax.Array, *, token_types: jax.Array | None = None, mask: MaskLike = None
    ) -> Encoded:
        """Reads a batch of texts.

        Args:
          tokens: ``[batch, length]`` integers. If there is no mask, the tokens may have padding on
            either side.
          token_types: ``[batch, length]`` the segment numbers of the tokens. None means that all
            segment numbers are 0.
          mask: the mask of self-attention, for the tokens in the order of `tokens`. ``Mask()``
            means that all tokens are real. An array ``[batch, keys]`` is a tokenizer's attention
            mask, which is nonzero for real tokens. An array that masks pairs of queries and keys
            must have four axes, ``[batch or 1, heads or 1, q, keys]``. None means that the padding
            is masked.

        Raises:
          ValueError: if the array in `mask` has a shape that is not listed above.
        """
        hidden, pooled = self._encode(tokens, token_types, mask)
        return Encoded(
            hidden=hidden,
            pooled=pooled,
            outputs=self.output_dense(pooled) if self.outputs is not None else None,
            token_logits=self.token_logits(hidden) if self.masked_lm else None,
        )

    @on_any_mesh
    def token_features(self, tokens: jax.Array) -> jax.Array:
        """Returns the features ``[batch, length, d_model + 1]`` that are projected to token logits.

        The token logits are the product of these features and the result of `token_projection`. The
        last feature is 1, so that the product includes the bias. Losses call this method to compute
        the logits in chunks.

        Args:
          tokens: ``[batch, length]`` integers.
        """
        x = self._token_states(self._encode(tokens, None, None)[0])
        return jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)

    def token_projection(self) -> jax.Array:
        """Returns the projection to the token logits, ``[d_model + 1, vocab]``.

        The last row of the projection is the bias.
        """
        return jnp.concatenate([self.output_kernel()[0], self.token_bias[None]])

    def _encode(
        self, tokens: jax.Array, token_types: jax.Array | None, mask: MaskLike
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `Encoded.hidden` and `Encoded.pooled`."""
        mask = token_mask(mask, batch=tokens.shape[0], length=tokens.shape[1])
        order = None
        if mask is None:
            tokens, order = move_token_padding_last(tokens, self.ids.padding)
            mask = Mask.padded(num_real_tokens(tokens, self.ids.padding))

        x = self.embed(tokens)
        if self.token_types:
            types = jnp.zeros_like(tokens) if token_types is None else token_types
            if order is not None:
                types = take_positions(types, order)
            x = x + jnp.take(self.type_embedding, types, axis=0).astype(x.dtype)

        hidden = self.encoder(x, mask=mask)
        pooled = self.pool(hidden, mask)
        if order is not None:
            # The inverse permutation moves the states back to the original positions of their
            # tokens.
            hidden = take_positions(hidden, jnp.argsort(order, axis=1))
        return hidden, pooled

    def example(self, inputs_length: int, targets_length: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns the abstract arguments of `__call__` for an example, which has only inputs."""
        return super().example(inputs_length, targets_length)[:1]

    def pool(self, hidden: jax.Array, mask: MaskLike) -> jax.Array:
        """Returns a vector for each text, ``[batch, d_model]``.

        Args:
          hidden: ``[batch, length, d_model]`` the states of the tokens.
          mask: the mask that says which tokens are keys, as in `__call__`. Only the states of keys
            are pooled. None means that all states are pooled.
        """
        mask = token_mask(mask, batch=hidden.shape[0], length=hidden.shape[1]) or Mask()
        real = mask.keys(hidden.shape[1])  # [b or 1, k]
        if real is None:
            real = jnp.ones((1, hidden.shape[1]), bool)

        if self.pooling == "first":
            pooled = take_positions(hidden, jnp.argmax(real, axis=1)[:, None])[:, 0]
        else:
            real = real[..., None]
            total = jnp.where(real, hidden, 0).sum(axis=1)  # [b, d].
            # The maximum avoids a division by zero for texts without real tokens.
            pooled = total / jnp.maximum(real.sum(axis=1), 1).astype(hidden.dtype)
        return jnp.tanh(self.pooler_dense(pooled)) if self.pooler else pooled

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        """Returns the logits of the masked language model, ``[batch, length, vocab]``."""
        x = self._token_states(hidden)
        kernel, _ = self.output_kernel()
        return output_product(x, kernel) + self.token_bias

    def _token_states(self, hidden: jax.Array) -> jax.Array:
        """Returns the inputs of the token projection, ``[batch, length, d_model]``."""
        return self.token_norm(jax.nn.gelu(self.token_dense(hidden), approximate=False))
