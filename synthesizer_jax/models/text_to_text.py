"""The interface of models that read inputs and write targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from synthesizer_jax.attention import Mask
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.models.block import LayerCache
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.mesh import on_any_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What a model needs to know of the rows of a batch besides their tokens.

    Attributes:
      segments: of packed rows the segment numbers of inputs ``[batch, k]`` and targets ``[batch, q]``,
        1, 2, … in the order of the row, 0 for padding; None: every row is one example.
      counted: ``[batch, q]`` bool, the positions with a target, over which modules average what they add
        to a training loss (`LOSSES`); None: up to the last non-zero token, in packed rows all segments.
      max_segments: no row has more segments; lets terms of absolute positions run on unpacked rows.
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
      memory_mask: which tokens of the memory are real, one row per example; None without a memory.
    """

    layers: tuple[LayerCache, ...]
    memory_mask: Mask | None = None

    def map_rows(self, function: Callable[[jax.Array], jax.Array]) -> DecodingCache:
        """Applies a function to the arrays that every row of targets has for itself.

        The rows of an example, such as its beams, share the keys and values of the memory.

        Args:
          function: maps ``[rows, ...]`` to ``[other rows, ...]``, such as ``lambda x: x[order]``.
        """
        layers = tuple(layer.map_rows(function) for layer in self.layers)
        return dataclasses.replace(self, layers=layers)


class TextToText(TokenModel, kw_only=True):
    """A model from inputs to targets, trained by teacher forcing and decoded step by step.

    The trainer, the decoding loops and the evaluation use these methods only, as in
    ``apply_method(model.hidden, variables, ...)``.
    """

    @on_any_mesh
    def __call__(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the logits of every next token of the targets.

        Args:
          encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
          decoder_tokens: ``[batch, q]`` the targets shifted right by one, padded on the right.
          rows: which rows are packed; None: none.

        Returns:
          ``[batch, q, vocab]`` float32.
        """
        return self.logits(self.hidden(encoder_tokens, decoder_tokens, rows=rows))

    def hidden(
        self, encoder_tokens: jax.Array, decoder_tokens: jax.Array, *, rows: Rows | None = None
    ) -> jax.Array:
        """Returns the targets' states before the projection to the vocabulary.

        Arguments are those of `__call__`. Returns ``[batch, q, d_model]``, for `logits`.
        """
        raise NotImplementedError

    def encode_inputs(self, tokens: jax.Array) -> PyTree:
        """Returns what `decode` needs of ``[batch, k]`` input tokens, a pytree of the model's own."""
        raise NotImplementedError

    def decode(self, tokens: jax.Array, memory: PyTree) -> jax.Array:
        """Returns the states ``[batch · n, q, d_model]`` of teacher-forced targets, for `logits`.

        Args:
          tokens: ``[batch · n, q]`` the targets shifted right by one, n rows for each input.
          memory: from `encode_inputs`, ``batch`` rows.
        """
        raise NotImplementedError

    def init_cache(self, encoder_tokens: jax.Array, *, max_length: int) -> DecodingCache:
        """Reads the inputs and returns the cache from which `extend` decodes.

        Args:
          encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
          max_length: number of target positions that `extend` may reach.

        Raises:
          ValueError: among others, the model has fewer positions.
        """
        raise NotImplementedError

    def extend(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Decodes the next tokens; the layers must be looped, not scanned (`unroll`).

        Args:
          tokens: ``[batch · n, q]`` the targets' next tokens, n rows for each example; first the
            start token (T5: 0).
          cache: from `init_cache` or the step before; its rows are those of the tokens.

        Returns:
          ``[batch · n, q, d_model]`` states for `logits`, and the new cache.
        """
        raise NotImplementedError
