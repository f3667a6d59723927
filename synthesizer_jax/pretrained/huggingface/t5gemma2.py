"""T5Gemma 2 in transformers: its ``config.json`` and the names of its parameters.

A published T5Gemma 2 also has a vision tower and a projection of images. This package reads only
the parameters that a text needs.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import flax.linen as nn

from synthesizer_jax.alignments import DotProduct
from synthesizer_jax.base.files import describing
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import check_types, fields_of, format_value
from synthesizer_jax.base.typing import Choices, Length, Number, Positive, Rate
from synthesizer_jax.mixers.attention import window_reach
from synthesizer_jax.models import Encoder, EncoderDecoder, Stack
from synthesizer_jax.models.t5gemma2 import (
    END_OF_IMAGE,
    Rotary,
    StackSettings,
    t5gemma2,
    window_pattern,
)
from synthesizer_jax.pretrained.architecture import check_same_function, first_block
from synthesizer_jax.pretrained.huggingface import t5gemma
from synthesizer_jax.pretrained.huggingface.config import (
    CONFIG,
    T5GEMMA2,
    T5GEMMA2_ENCODER,
    TAKEN,
    read_json,
)
from synthesizer_jax.pretrained.huggingface.gemma_fields import (
    ACTIVATIONS,
    UNLIMITED,
    WINDOWED,
    RotaryFields,
    StackFields,
    alignment_of,
    fields_of_layers,
    read_architectures,
    read_gemma_ids,
    write_gemma_ids,
)
from synthesizer_jax.pretrained.tensors import SAME, Layout
from synthesizer_jax.primitives.norms import RMSNorm

PREFIX = "model.encoder."
"""The prefix of the encoder's tensors in a whole model.

If a folder contains only the encoder, the names of its tensors do not have this prefix.
"""

_TEXT_MODULE = "model.encoder.text_model."
"""The prefix of the encoder's parameters in PyTorch's module of a whole model."""

EMBEDDING = "model.encoder.embed_tokens.weight"
"""The name of the embedding, which is also the decoder's embedding and the output projection."""

END_OF_IMAGE_VECTOR = "model.encoder.embed_tokens.eoi_embedding"
"""The name of the input vector for the end of an image."""

COPIES = {
    "model.decoder.embed_tokens.weight": EMBEDDING,
    t5gemma.OUTPUT: EMBEDDING,
    "model.decoder.embed_tokens.eoi_embedding": END_OF_IMAGE_VECTOR,
}
"""Maps the names of copies of tensors, which a folder may contain, to the original names."""

DECODER_EMBEDDING = "model.decoder.embed_tokens"
"""The module of the decoder that shares the encoder's embedding."""

_OF_IMAGES = ("vision_tower.", "multi_modal_projector.")
"""The prefixes of the encoder's tensors that are only needed for images."""

VISION_MODULES = [
    f"model.encoder.vision_tower.encoder.layers.0.{name}"
    for name in (
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "out_proj")),
        *("mlp.fc1", "mlp.fc2", "layer_norm1", "layer_norm2"),
    )
]
"""The modules of one layer of the vision tower."""

_NO_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 8,
    "vision_use_head": False,
}
"""The vision tower in the ``config.json`` of an exported model.

Transformers cannot build a T5Gemma 2 without a vision tower. The exported folder has no tensors for
this smallest possible tower, so transformers warns that its parameters are random.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stack(StackFields):
    """The fields of a text model that are used, with the defaults of transformers."""

    vocab_size: Length = 262_208
    sliding_window: Length = 4096
    sliding_window_pattern: Length = 6
    attn_logit_softcapping: Annotated[float | None, Choices((None,))] = None
    final_logit_softcapping: Positive | None = None
    windowed: RotaryFields
    unlimited: RotaryFields

    @classmethod
    def read(cls, data: dict[str, Any], path: str) -> _Stack:
        """Returns the fields of the encoder's or the decoder's text model in ``config.json``.

        Args:
          data: the JSON object of the text model.
          path: the name of the text model in error messages.

        Raises:
          ValueError: if a field has a value that is not supported.
        """
        stack = cls.read_fields({**data, **_read_rotary(data, path)}, path)
        types = stack.layer_types
        if types is not None and len(types) != stack.num_hidden_layers:
            raise ValueError(
                f"{path}.layer_types has {len(types)} entries, but {path}.num_hidden_layers is "
                f"{stack.num_hidden_layers}"
            )
        return stack

    def build(self, *, dropout_rate: float, attention_dropout: float) -> StackSettings:
        """Returns the settings of the stack."""
        has_window = window_pattern(self.num_hidden_layers, self.sliding_window_pattern)
        if self.layer_types is not None:
            has_window = tuple(kind == WINDOWED for kind in self.layer_types)
        return StackSettings(
            has_window=has_window,
            d_ff=self.intermediate_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            window=self.sliding_window,
            windowed=_rotary(self.windowed),
            unlimited=_rotary(self.unlimited),
            scale=self.query_pre_attn_scalar**-0.5,
            activation=ACTIVATIONS[self.hidden_activation],
            epsilon=self.rms_norm_eps,
            dropout_rate=dropout_rate,
            attention_dropout=attention_dropout,
        )

    @classmethod
    def of(cls, stack: Stack, name: str, **fields: Any) -> _Stack:
        """Returns the fields that describe a stack.

        Raises:
          ValueError: if the fields cannot describe a part of the stack. The message names the part.
        """
        layers = fields_of_layers(stack, name)
        # The fields describe a layer with a window and a layer without one. If the stack has only
        # one type of layers, the settings of the other type do not matter.
        dots: dict[bool, DotProduct] = {}
        has_window: list[bool] = []
        window = 1
        for run in stack.runs:
            run_mixer = run.block.self_mixer
            dot = alignment_of(run_mixer, f"{name}.layers.{len(has_window)}.self_mixer")
            limit = getattr(run_mixer, "window", None)
            dots.setdefault(limit is not None, dot)
            has_window += [limit is not None] * run.repeats
            if isinstance(limit, tuple):
                window = sum(window_reach(limit)) + 1  # a window of the encoder
            elif limit is not None:
                window = limit
        first = next(iter(dots.values()))
        return cls(
            **layers,
            sliding_window=window,
            layer_types=tuple(WINDOWED if w else UNLIMITED for w in has_window),
            windowed=RotaryFields.of(dots.get(True, first)),
            unlimited=RotaryFields.of(dots.get(False, first)),
            **fields,
        )

    def write(self) -> dict[str, Any]:
        """Returns the fields of the text model in ``config.json``."""
        fields = fields_of(self)
        del fields["sliding_window_pattern"]
        rotary = {WINDOWED: fields.pop("windowed"), UNLIMITED: fields.pop("unlimited")}
        return {**fields, "rope_parameters": {kind: x.write() for kind, x in rotary.items()}}


def _rotary(fields: RotaryFields) -> Rotary:
    """Returns the settings of rotary positions in the form of the model."""
    factor = 1.0 if fields.scaling is None else fields.scaling.factor
    return Rotary(fields.rope_theta, factor)


def _read_rotary(data: dict[str, Any], path: str) -> dict[str, RotaryFields]:
    """Returns the settings of the rotary positions of a text model.

    Folders in the format of version 4 of transformers have ``rope_scaling`` for layers without a
    window, and the bases of both types of layers in ``rope_theta`` and ``rope_local_base_freq``.
    """
    given = data.get("rope_parameters") or {}
    if not isinstance(given, dict) or not given.keys() <= {WINDOWED, UNLIMITED}:
        raise ValueError(
            f"{path}.rope_parameters may only have the keys {UNLIMITED} and {WINDOWED}"
        )
    found = {}
    for field, kind, old_name, base in (
        ("windowed", WINDOWED, "rope_local_base_freq", 10_000.0),
        ("unlimited", UNLIMITED, "rope_theta", 1_000_000.0),
    ):
        settings = dict(given.get(kind) or {})
        if kind == UNLIMITED:
            settings.update(data.get("rope_scaling") or {})
        path_of_kind = f"{path}.rope_parameters.{kind}"
        found[field] = RotaryFields.read(settings, data.get(old_name, base), path_of_kind)
    return found


@dataclasses.dataclass(frozen=True)
class T5Gemma2:
    """The configuration of a T5Gemma 2 for texts.

    Attributes:
      encoder: the fields of the encoder's text model.
      decoder: the fields of the decoder. `None` means that the model is only an encoder.
      end_of_image: the id of the token for the end of an image.
      dropout_rate: the dropout rate everywhere except on attention weights.
      attention_dropout: the dropout rate of the attention weights.
      ids: the token ids of padding, of the end of a text, and of the decoder's start.
    """

    encoder: _Stack
    decoder: _Stack | None
    end_of_image: Number
    dropout_rate: Rate
    attention_dropout: Rate
    ids: SpecialIds

    @classmethod
    def read(cls, folder: pathlib.Path, *, encoder_only: bool = False) -> T5Gemma2:
        """Returns the configuration that a folder's ``config.json`` describes."""
        path = folder / CONFIG
        data = read_json(path)
        with describing(path, f"Give the folder of a {TAKEN}."):
            is_whole = data.get("model_type") != T5GEMMA2_ENCODER
            name = "encoder.text_config" if is_whole else "text_config"
            encoder_data = (data.get("encoder") or {}) if is_whole else data
            text = encoder_data.get("text_config") or {}
            if not text and encoder_data.get("vision_config"):
                raise ValueError("it describes a vision tower and no text model")
            encoder = _Stack.read(text, name)
            decoder = None
            fields = text
            if is_whole:
                fields = data.get("decoder") or {}
                decoder = _Stack.read(fields, "decoder")
                _check_same_sizes(encoder, decoder)
            read_architectures(data)
            if data.get("tie_word_embeddings", True) is not True:
                raise ValueError(
                    f"tie_word_embeddings is {format_value(data['tie_word_embeddings'])}, but a "
                    "T5Gemma 2 has only one embedding"
                )
            rates = {n: data.get(n, 0.0) for n in ("dropout_rate", "attention_dropout")}
            end_of_image = encoder_data.get("eoi_token_index", END_OF_IMAGE)
            check_types(cls, {"end_of_image": end_of_image, **rates})

        bos = (decoder or encoder).bos_token_id
        return cls(
            encoder,
            None if encoder_only else decoder,
            end_of_image,
            ids=read_gemma_ids(folder, data, fields, bos),
            **rates,
        )

    @classmethod
    def of(cls, model: nn.Module) -> T5Gemma2:
        """Returns the configuration of a model.

        Raises:
          ValueError: if the model is not a T5Gemma 2. The message names a part that differs from a
            T5Gemma 2.
        """
        assert isinstance(model, EncoderDecoder | Encoder)
        common: dict[str, Any] = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.d_model,
            "bos_token_id": model.ids.start,
            "final_logit_softcapping": model.logits_soft_cap,
        }
        decoder = None
        if isinstance(model, EncoderDecoder):
            decoder = _Stack.of(model.decoder, "decoder", **common)
        block, mixer, _ = first_block(model.encoder, "encoder")
        config = cls(
            _Stack.of(model.encoder, "encoder", **common),
            decoder,
            END_OF_IMAGE if model.separate_input is None else model.separate_input,
            block.dropout_rate,
            mixer.dropout_rate,
            model.ids,
        )
        check_same_function(model, config.build())
        return config

    def build(self) -> EncoderDecoder | Encoder:
        """Returns the unbound model, which is an `Encoder` if there is no decoder."""
        rates = {"dropout_rate": self.dropout_rate, "attention_dropout": self.attention_dropout}
        return t5gemma2(
            self.encoder.build(**rates),
            None if self.decoder is None else self.decoder.build(**rates),
            vocab_size=self.encoder.vocab_size,
            d_model=self.encoder.hidden_size,
            end_of_image=self.end_of_image,
            logits_soft_cap=None if self.decoder is None else self.decoder.final_logit_softcapping,
            ids=self.ids,
        )

    def write(self, dtype: str) -> dict[str, Any]:
        """Returns the fields of a ``config.json`` that transformers 5 reads as the same model.

        The argument `dtype` is the name of the tensors' dtype.
        """
        ids = write_gemma_ids(self.ids)
        rates = {"dropout_rate": self.dropout_rate, "attention_dropout": self.attention_dropout}
        encoder = {
            "text_config": {
                "model_type": "t5gemma2_text",
                **self.encoder.write(),
                **ids,
                **rates,
            },
            "vision_config": _NO_VISION,
            "mm_tokens_per_image": 1,
            "eoi_token_index": self.end_of_image,
            "tie_word_embeddings": True,
        }
        common = {**ids, **rates, "tie_word_embeddings": True, "torch_dtype": dtype}
        if self.decoder is None:
            return {
                "architectures": ["T5Gemma2Encoder"],
                "model_type": T5GEMMA2_ENCODER,
                **encoder,
                **common,
            }
        return {
            "architectures": ["T5Gemma2ForConditionalGeneration"],
            "model_type": T5GEMMA2,
            "encoder": {"model_type": T5GEMMA2_ENCODER, **encoder},
            "decoder": {"model_type": "t5gemma2_decoder", **self.decoder.write(), **ids, **rates},
            "is_encoder_decoder": True,
            "vocab_size": self.encoder.vocab_size,
            **common,
        }


def _check_same_sizes(encoder: _Stack, decoder: _Stack) -> None:
    """Raises a `ValueError` if the stacks cannot share one embedding."""
    for field in ("hidden_size", "vocab_size"):
        of_encoder, of_decoder = getattr(encoder, field), getattr(decoder, field)
        if of_encoder != of_decoder:
            raise ValueError(
                f"encoder.text_config.{field} is {of_encoder} and decoder.{field} is {of_decoder}, "
                "but the stacks of a T5Gemma 2 share one embedding"
            )


def is_t5gemma2(model: nn.Module) -> bool:
    """Returns whether the encoder normalizes its queries and the outputs of its layers.

    Among the models of transformers that this package supports, only T5Gemma 2 does both.
    `T5Gemma2.of` checks the other parts of the model.
    """
    if not t5gemma.has_output_norm(model):
        return False
    alignment = getattr(model.encoder.runs[0].block.self_mixer, "alignment", None)
    return isinstance(alignment, DotProduct) and isinstance(alignment.normalize_qk, RMSNorm)


def is_of_images(name: str) -> bool:
    """Returns whether the tensor with this name is only needed for images."""
    return name.removeprefix(PREFIX).startswith(_OF_IMAGES)


def is_of_decoder(name: str) -> bool:
    """Returns whether a tensor is needed only by the decoder or by the output projection."""
    return name.startswith(("model.decoder.", "lm_head."))


def saved_name(name: str) -> str:
    """Returns the name under which transformers saves a tensor of the encoder's text model.

    The text model is the module ``text_model`` of the encoder. If transformers saves a model, it
    removes this part from the names of tensors, but other programs do not.
    """
    for module, saved in ((_TEXT_MODULE, PREFIX), (_TEXT_MODULE.removeprefix(PREFIX), "")):
        if name.startswith(module):
            return saved + name.removeprefix(module)
    return name


def module_name(name: str) -> str:
    """Returns the name that a module of the model has in PyTorch.

    The argument `name` is the beginning of the name of a saved tensor; see `saved_name`.
    """
    if is_of_decoder(f"{name}."):
        return name
    prefix = PREFIX if name.startswith(PREFIX) else ""
    return prefix + _TEXT_MODULE.removeprefix(PREFIX) + name.removeprefix(prefix)


def torch_name(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns the name and layout of a parameter in ``T5Gemma2ForConditionalGeneration``.

    The argument `path` is the path of a parameter in an `EncoderDecoder` with looped layers.
    """
    if path == ("embedding",):
        return EMBEDDING, SAME
    if path == ("separate_embedding",):
        return END_OF_IMAGE_VECTOR, SAME
    return t5gemma.torch_name(path)


def torch_name_in_encoder(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns the name and layout in ``T5Gemma2Encoder`` of a parameter of an `Encoder`."""
    name, layout = torch_name(path)
    return name.removeprefix(PREFIX), layout
