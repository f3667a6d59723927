"""The T5s of other libraries: one architecture with a few fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn

from synthesizer_jax.alignments import DotProduct, Mixture, RelativeBias
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import to_json
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, Encoder, EncoderDecoder, FeedForward, Run, Stack
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.models.zoo import dot_product
from synthesizer_jax.primitives.norms import RMSNorm
from synthesizer_jax.primitives.parameters import apply_method

MOST_LAYERS = 256
"""Of a stack; a file that names more is damaged, and tracing them would take hours."""


class Pretrained(NamedTuple):
    """A model of another library, with looped layers: its `Unread` parameters and, if known, vocabulary.

    `origin` is the path, or ``OWNER/NAME@COMMIT`` of the Hugging Face hub.
    """

    model: EncoderDecoder | Encoder
    params: PyTree
    vocabulary: Bytes | SentencePiece | None
    origin: str = ""


REMEDY = (
    "other libraries have T5s only, so keep this model's own checkpoint, or export it with --to stablehlo, "
    "which takes every model"
)
"""What to do with a model that other libraries lack."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The fields in which published T5s differ; those that models here have too are named as there.

    Attributes:
      num_decoder_layers: 0: there is only an encoder.
      tied: the embedding is also the output projection (T5 1.0).
      scaled: the decoder's outputs are divided by √d_model before that projection (T5 1.0).
      bias_per_layer: every layer has a relative bias of its own (umT5), not the first of a stack.
      dropout_rate: one rate for all dropouts.
      ids: of padding, of the end and of the start.
    """

    vocab_size: int
    d_model: int
    num_heads: int
    head_dim: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    activations: tuple[str, ...]
    tied: bool
    scaled: bool
    num_buckets: int = 32
    max_distance: int = 128
    bias_per_layer: bool = False
    epsilon: float = 1e-6
    dropout_rate: float = 0.1
    ids: SpecialIds = T5_IDS

    def build(self) -> EncoderDecoder | Encoder:
        """Returns the unbound model."""
        rate, dot = self.dropout_rate, dot_product(self.head_dim)
        norm = RMSNorm(epsilon=self.epsilon)
        feed_forward = FeedForward(self.d_ff, activations=self.activations, dropout_rate=rate)
        attention = Attention(self.num_heads, self.head_dim, alignment=dot, dropout_rate=rate)

        def stack(num_layers: int, cross: Attention | None) -> Stack:
            bias = RelativeBias(self.num_buckets, self.max_distance, bidirectional=cross is None)
            mixer = attention
            if self.bias_per_layer:
                mixer = attention.copy(alignment=Mixture((dot, bias), weights="sum"))
            block = Block(mixer, feed_forward, cross_mixer=cross, dropout_rate=rate, norm=norm)
            return Stack(
                (Run(block, num_layers),),
                bias=None if self.bias_per_layer else bias,
                norm=norm,
                dropout_rate=rate,
            )

        scale = self.d_model**-0.5 if self.scaled else 1.0
        encoder = stack(self.num_layers, None)
        if not self.num_decoder_layers:
            return Encoder(vocab_size=self.vocab_size, d_model=self.d_model, encoder=encoder, ids=self.ids)
        return EncoderDecoder(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            encoder=encoder,
            decoder=stack(self.num_decoder_layers, attention),
            tied=self.tied,
            ids=self.ids,
            logits_scale=None if self.scaled == self.tied else scale,
        )

    @classmethod
    def of(cls, model: nn.Module) -> Architecture:
        """Returns the architecture of a model.

        Raises:
          ValueError: the model is not a T5; the message names a part that differs.
        """
        if not isinstance(model, EncoderDecoder | Encoder):
            raise ValueError(f"a {type(model).__name__} is not a T5; {REMEDY}")
        block, mixer, feed_forward = first_block(model.encoder, "encoder")
        alignment, bias = mixer.alignment, model.encoder.bias
        if bias is None and isinstance(alignment, Mixture):
            bias = next((part for part in alignment.parts if isinstance(part, RelativeBias)), None)
        if bias is None and not isinstance(alignment, DotProduct):
            path = "encoder.layers.0.self_mixer.alignment"
            raise ValueError(other_part(path, type(alignment).__name__))
        if not isinstance(bias, RelativeBias):
            raise ValueError(other_part("encoder.bias", bias and type(bias).__name__))
        decoder = model.decoder if isinstance(model, EncoderDecoder) else None
        tied = model.tied
        architecture = cls(
            vocab_size=model.vocab_size,
            d_model=model.d_model,
            num_heads=mixer.num_heads,
            head_dim=mixer.head_dim,
            d_ff=feed_forward.hidden_dim,
            num_layers=model.encoder.num_layers,
            num_decoder_layers=0 if decoder is None else decoder.num_layers,
            activations=feed_forward.activations,
            tied=tied,
            scaled=tied if model.logits_scale is None else model.logits_scale != 1.0,
            num_buckets=bias.num_buckets,
            max_distance=bias.max_distance,
            bias_per_layer=model.encoder.bias is None,
            epsilon=block.norm.epsilon if isinstance(block.norm, RMSNorm) else 1e-6,
            dropout_rate=block.dropout_rate,
            ids=model.ids,
        )
        check_same_function(model, architecture.build())
        return architecture


def first_block(stack: Stack, name: str) -> tuple[Block, Attention, FeedForward]:
    """Returns the first block of a stack, its attention and its feed-forward layer.

    Raises:
      ValueError: it has others in their places.
    """
    block = stack.runs[0].block
    mixer, feed_forward = block.self_mixer, block.feed_forward
    if not isinstance(mixer, Attention) or not isinstance(feed_forward, FeedForward):
        other = mixer if isinstance(feed_forward, FeedForward) else feed_forward
        raise ValueError(other_part(f"{name}.layers.0", type(other).__name__))
    return block, mixer, feed_forward


def check_same_function(model: nn.Module, published: nn.Module) -> None:
    """Raises a `ValueError` that names what a model computes otherwise than a published one."""
    expected, given = (dict(_settings(to_json(m))) for m in (published, model))
    for path in sorted(expected.keys() | given.keys()):
        if expected.get(path) != given.get(path):
            raise ValueError(other_part(path, given.get(path)))


def with_output_of_t5(model: TokenModel, params: PyTree) -> tuple[TokenModel, PyTree]:
    """Returns a T5 whose outputs are scaled exactly if it is tied, as all other libraries have them.

    Any other T5 is given an output projection of its own, with which it computes the same.

    Raises:
      ValueError: the model is not a T5; the message names a part that differs.
    """
    architecture = Architecture.of(model)
    if architecture.scaled == architecture.tied:
        return model, params
    kernel, scale = apply_method(model.output_kernel, {"params": params})
    return model.copy(tied=False, logits_scale=None), {**params, "logits_kernel": kernel * scale}


_FREE = ("dropout_rate", "elementwise_dropout", "drop_output", "dtype", "scan", "remat", "implementation")
"""Fields that change neither the parameters nor, without dropout, what is computed from them."""


def _settings(data: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields the paths and values of a model's JSON on which its function depends, layer by layer."""
    if isinstance(data, dict):
        runs = data.get("runs")
        if runs is not None:
            layers = [run["block"] for run in runs for _ in range(run["repeats"])]
            data = {**data, "runs": None, "layers": layers}
        for key, value in data.items():
            if key not in _FREE and not key.endswith("_init"):
                yield from _settings(value, f"{path}.{key}" if path else key)
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from _settings(value, f"{path}.{i}")
    else:
        yield path, data


def other_part(path: str, value: object) -> str:
    """Returns the message for a part that no T5 has."""
    return f"{path} is {value!r}, which no published T5 has; {REMEDY}"
