"""Describes every T5 of other libraries by an `Architecture`.

Readers of checkpoints fill in an `Architecture` and build a model from it. Writers of checkpoints
derive an `Architecture` from a model, which raises an error if the model is not a T5.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn

from synthesizer_jax.alignments import DotProduct, Mixture, RelativeBias
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import to_json
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.data.tokenizer_json import AnyVocabulary
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, Encoder, EncoderDecoder, FeedForward, Run, Stack
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.models.zoo import dot_product
from synthesizer_jax.primitives.norms import RMSNorm
from synthesizer_jax.primitives.parameters import apply_method

MOST_LAYERS = 256
"""The largest number of layers that a stack in a checkpoint may have.

If a file names more layers, the file is damaged, and tracing the model would take hours.
"""


class Pretrained(NamedTuple):
    """A model from another library, with looped layers, which have separate parameter arrays.

    Attributes:
      model: the unbound model.
      params: the parameters as nested dictionaries of `Unread`, which are read when they are
        needed.
      vocabulary: the vocabulary, or `None` if the checkpoint has no supported vocabulary.
      origin: the path of the checkpoint, or ``OWNER/NAME@COMMIT`` for a model of the Hugging Face
        hub.
      folder: the folder or file from which the checkpoint is read, or `None` until
        `open_pretrained` sets it.
    """

    model: EncoderDecoder | Encoder
    params: PyTree
    vocabulary: AnyVocabulary | None
    origin: str = ""
    folder: pathlib.Path | None = None


REMEDY = (
    "Other libraries only have T5s. Keep this model's own checkpoint, or export it with --to "
    "stablehlo, which supports every model."
)
"""The end of an error message about a model that other libraries do not have."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The fields in which published T5s differ.

    Fields with the same names as fields of this package's models have the same meanings.

    Attributes:
      num_decoder_layers: the number of decoder layers. If the number is 0, the model is only an
        encoder.
      tied: whether the embedding is also the output projection, as in T5 1.0.
      scaled: whether the decoder's outputs are divided by √d_model before the output projection, as
        in T5 1.0.
      bias_per_layer: whether every layer has its own relative bias, as in umT5. If `bias_per_layer`
        is false, all layers of a stack share one relative bias.
      dropout_rate: the rate of all dropouts.
      ids: the token ids of padding, of the end of a text, and of the decoder's start.
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
        """Returns the unbound model, which is an `Encoder` if there are no decoder layers."""
        rate = self.dropout_rate
        dot = dot_product(self.head_dim)
        norm = RMSNorm(epsilon=self.epsilon)
        feed_forward = FeedForward(self.d_ff, activations=self.activations, dropout_rate=rate)
        attention = Attention(self.num_heads, self.head_dim, alignment=dot, dropout_rate=rate)

        def stack(num_layers: int, cross: Attention | None) -> Stack:
            """Returns a decoder with cross-attention `cross`, or an encoder if `cross` is None."""
            bias = RelativeBias(self.num_buckets, self.max_distance, bidirectional=cross is None)
            mixer = attention
            if self.bias_per_layer:
                # If every layer has its own relative bias, the alignment of the layer contains the
                # bias.
                mixer = attention.copy(alignment=Mixture((dot, bias), weights="sum"))
            block = Block(mixer, feed_forward, cross_mixer=cross, dropout_rate=rate, norm=norm)
            return Stack(
                (Run(block, num_layers),),
                bias=None if self.bias_per_layer else bias,
                norm=norm,
                dropout_rate=rate,
            )

        encoder = stack(self.num_layers, None)
        if not self.num_decoder_layers:
            return Encoder(
                vocab_size=self.vocab_size, d_model=self.d_model, encoder=encoder, ids=self.ids
            )

        logits_scale = None
        if self.scaled != self.tied:
            # If `logits_scale` is `None`, the outputs are scaled if and only if the embedding is
            # tied. Models that do not follow this rule need an explicit scale.
            logits_scale = self.d_model**-0.5 if self.scaled else 1.0
        return EncoderDecoder(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            encoder=encoder,
            decoder=stack(self.num_decoder_layers, attention),
            tied=self.tied,
            ids=self.ids,
            logits_scale=logits_scale,
        )

    @classmethod
    def of(cls, model: nn.Module) -> Architecture:
        """Returns the architecture of a model.

        Raises:
          ValueError: if the model is not a T5. The message names a part of the model that differs
            from a T5.
        """
        if not isinstance(model, EncoderDecoder | Encoder):
            raise ValueError(f"A {type(model).__name__} is not a T5. {REMEDY}")
        block, mixer, feed_forward = first_block(model.encoder, "encoder")

        # Find the relative bias. If all layers share a bias, it belongs to the stack. If the layers
        # share no bias, the alignment of each layer contains a bias.
        alignment = mixer.alignment
        bias = model.encoder.bias
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

        # The fields above describe only a few parts of the model. Compare the whole model with the
        # T5 that has these fields, because the other parts may differ.
        check_same_function(model, architecture.build())
        return architecture


def first_block(stack: Stack, name: str) -> tuple[Block, Attention, FeedForward]:
    """Returns the first block of a stack, the block's attention, and its feed-forward layer.

    Args:
      stack: the stack.
      name: the stack's name in error messages.

    Raises:
      ValueError: if the block's mixer is not an `Attention`, or its other layer is not a
        `FeedForward`.
    """
    block = stack.runs[0].block
    mixer = block.self_mixer
    feed_forward = block.feed_forward
    if not isinstance(feed_forward, FeedForward):
        raise ValueError(other_part(f"{name}.layers.0", type(feed_forward).__name__))
    if not isinstance(mixer, Attention):
        raise ValueError(other_part(f"{name}.layers.0", type(mixer).__name__))
    return block, mixer, feed_forward


def check_same_function(model: nn.Module, published: nn.Module) -> None:
    """Raises a `ValueError` if a model does not compute the same function as a published model.

    The error message names the first part in which the two models differ. Settings that do not
    change the function, such as the dtype, are not compared.
    """
    expected = dict(_settings(to_json(published)))
    given = dict(_settings(to_json(model)))
    for path in sorted(expected.keys() | given.keys()):
        if expected.get(path) != given.get(path):
            raise ValueError(other_part(path, given.get(path)))


def with_output_of_t5(model: TokenModel, params: PyTree) -> tuple[TokenModel, PyTree]:
    """Returns an equivalent T5 and its parameters, in the form that other libraries support.

    Other libraries divide the decoder's outputs by √d_model if and only if the output projection is
    the embedding. If the given model does not follow this rule, the returned model has a separate
    output projection, into which the scale is multiplied. The given model and the returned model
    compute the same logits.

    Raises:
      ValueError: if the model is not a T5. The message names a part of the model that differs from
        a T5.
    """
    architecture = Architecture.of(model)
    if architecture.scaled == architecture.tied:
        return model, params
    kernel, scale = apply_method(model.output_kernel, {"params": params})
    return model.copy(tied=False, logits_scale=None), {**params, "logits_kernel": kernel * scale}


_FREE = (
    "dropout_rate",
    "elementwise_dropout",
    "drop_output",
    "dtype",
    "scan",
    "remat",
    "implementation",
)
"""The fields that change neither the parameters nor the outputs of a model without dropout."""


def _settings(data: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields the path and value of every setting that influences the outputs of a model.

    A run of equal layers is expanded to its single layers. Two models with the same layers
    therefore have the same settings, even if their layers are grouped into runs differently.
    """
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
    """Returns the error message about a part of a model that no published T5 has."""
    return f"{path} is {value!r}, which no published T5 has. {REMEDY}"
