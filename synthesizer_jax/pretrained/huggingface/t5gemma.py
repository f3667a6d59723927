"""T5Gemma in transformers: its ``config.json`` and the names of its parameters (Zhang et al. 2025).

The layers of the encoder and of the decoder are like those of Gemma 2. The encoder and the decoder
may have different sizes, and each of them has its own embedding.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import flax.linen as nn

from synthesizer_jax.alignments import DotProduct
from synthesizer_jax.base.files import describing
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import check_types, fields_of
from synthesizer_jax.base.typing import Length, Positive
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import Block, Encoder, EncoderDecoder, FeedForward, Run, Stack
from synthesizer_jax.pretrained.architecture import check_same_function, first_block
from synthesizer_jax.pretrained.huggingface.config import CONFIG, T5GEMMA, TAKEN, read_json
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
from synthesizer_jax.pretrained.huggingface.names import HEADS_OF_OUTPUTS, TRANSPOSED
from synthesizer_jax.pretrained.tensors import SAME, Layout
from synthesizer_jax.primitives.norms import RMSNorm

PREFIX = "model."
"""The prefix of tensors' names in whole models. The names in encoders have no prefix."""

OUTPUT = "lm_head.out_proj.weight"
"""The name of the output projection."""

_EMBEDDING = "embed_tokens.weight"
"""The last part of the names of embeddings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stack(StackFields):
    """The fields of ``encoder`` and ``decoder`` that are used, with transformers' defaults."""

    vocab_size: Length = 256_000
    sliding_window: Length | None = 4096
    attn_logit_softcapping: Positive | None = 50.0
    final_logit_softcapping: Positive | None = 30.0
    rotary: RotaryFields

    @classmethod
    def read(cls, data: dict[str, Any], path: str) -> _Stack:
        """Returns the fields of the encoder or the decoder in ``config.json``.

        Args:
          data: the part's JSON object.
          path: the name of the stack in error messages.

        Raises:
          ValueError: if a field has a value that is not supported.
        """
        return cls.read_fields({**data, "rotary": _read_rotary(data, path)}, path)

    def build(self, *, in_decoder: bool, dropout_rate: float, attention_dropout: float) -> Stack:
        """Returns the stack that the fields describe."""
        scale = self.query_pre_attn_scalar**-0.5
        # Cross-attention has no position information, and every query sees all keys of the encoder.
        # Self-attention has rotary positions. In some layers, self-attention is restricted to a
        # window.
        cross = Attention(
            self.num_attention_heads,
            self.head_dim,
            alignment=DotProduct(scale=scale),
            num_kv_heads=self.num_key_value_heads,
            soft_cap=self.attn_logit_softcapping,
            dropout_rate=attention_dropout,
        )
        rotary = DotProduct(
            scale=scale,
            rotary_base=self.rotary.rope_theta,
            rotary_scaling=self.rotary.scaling,
        )
        global_mixer = cross.copy(alignment=rotary)
        window = self.sliding_window
        if window is not None and not in_decoder:
            # In the encoders of transformers 5, a window reaches one key further on each side than
            # a window of the same size in this package.
            window += 1

        activations = (ACTIVATIONS[self.hidden_activation], "linear")
        norm = RMSNorm(epsilon=self.rms_norm_eps, offset=1.0)
        block = Block(
            global_mixer,
            FeedForward(self.intermediate_size, activations, dropout_rate),
            cross_mixer=cross if in_decoder else None,
            dropout_rate=dropout_rate,
            norm=norm,
            output_norm=True,
        )
        blocks = {
            UNLIMITED: block,
            WINDOWED: block.copy(self_mixer=global_mixer.copy(window=window)),
        }
        # By default, layers with and without a window alternate, beginning with a window.
        kinds = self.layer_types or (WINDOWED, UNLIMITED) * self.num_hidden_layers
        runs = tuple(Run(blocks[kind], 1) for kind in kinds[: self.num_hidden_layers])
        return Stack(runs, norm=norm, dropout_rate=dropout_rate)

    @classmethod
    def of(cls, stack: Stack, name: str, **fields: Any) -> _Stack:
        """Returns the fields that describe a stack.

        Raises:
          ValueError: if the fields cannot describe a part of the stack. The message names the part.
        """
        layers = fields_of_layers(stack, name)
        block, mixer, _ = first_block(stack, name)
        dot = alignment_of(mixer, f"{name}.layers.0.self_mixer")

        mixers = [run.block.self_mixer for run in stack.runs for _ in range(run.repeats)]
        windows = [getattr(other, "window", None) for other in mixers]
        window = next(filter(None, windows), None)
        if window is not None and block.cross_mixer is None:
            # Undo the increment in `build`. Blocks without cross-attention are blocks of an
            # encoder.
            window -= 1

        return cls(
            **layers,
            sliding_window=window,
            layer_types=tuple(WINDOWED if w else UNLIMITED for w in windows),
            attn_logit_softcapping=mixer.soft_cap,
            rotary=RotaryFields.of(dot),
            **fields,
        )


def _read_rotary(data: dict[str, Any], path: str) -> RotaryFields:
    """Returns the settings of the rotary position embeddings of a stack.

    Version 4 of transformers calls the settings ``rope_scaling``. Version 5 calls the settings
    ``rope_parameters``. If a stack has both keys, this function uses ``rope_scaling``, as version 5
    does.
    """
    name = "rope_scaling" if data.get("rope_scaling") else "rope_parameters"
    settings = data.get(name) or {}
    if not isinstance(settings, dict) or any(isinstance(x, dict) for x in settings.values()):
        raise ValueError(f"{path}.{name} must be one set of settings for all layers")
    # In configurations of version 4, these two settings are beside ``rope_scaling``.
    names = ("rope_theta", "partial_rotary_factor")
    beside: dict[str, Any] = {key: data[key] for key in names if key in data}
    return RotaryFields.read({**beside, **settings}, 10_000.0, f"{path}.{name}")


@dataclasses.dataclass(frozen=True)
class T5Gemma:
    """The configuration of a T5Gemma.

    Attributes:
      encoder: the fields of the encoder.
      decoder: the fields of the decoder. `None` means that the model is only an encoder.
      tied: whether the decoder's embedding is also the output projection.
      dropout_rate: the dropout rate everywhere except on attention weights.
      attention_dropout: the dropout rate of the attention weights.
      ids: the token ids of padding, of the end of a text, and of the decoder's start.
    """

    encoder: _Stack
    decoder: _Stack | None
    tied: bool
    dropout_rate: float
    attention_dropout: float
    ids: SpecialIds

    @classmethod
    def read(cls, folder: pathlib.Path, *, encoder_only: bool = False) -> T5Gemma:
        """Returns the configuration that a folder's ``config.json`` describes."""
        path = folder / CONFIG
        data = read_json(path)
        with describing(path, f"Give the folder of a {TAKEN}."):
            decoder_fields = data.get("decoder") or {}
            encoder = _Stack.read(data.get("encoder") or {}, "encoder")
            decoder = _Stack.read(decoder_fields, "decoder")
            for name in read_architectures(data):
                encoder_only = encoder_only or name.endswith("EncoderModel")
            rates = {name: data.get(name, 0.0) for name in ("dropout_rate", "attention_dropout")}
            tied = data.get("tie_word_embeddings", True)
            check_types(cls, {"tied": tied, **rates})
        return cls(
            encoder,
            None if encoder_only else decoder,
            tied,
            ids=read_gemma_ids(folder, data, decoder_fields, decoder.bos_token_id),
            **rates,
        )

    @classmethod
    def of(cls, model: nn.Module) -> T5Gemma:
        """Returns the configuration of a model.

        Raises:
          ValueError: if the model is not a T5Gemma. The message names a part that differs from a
            T5Gemma.
        """
        assert isinstance(model, EncoderDecoder | Encoder)
        common: dict[str, Any] = {
            "vocab_size": model.vocab_size,
            "bos_token_id": model.ids.start,
            "final_logit_softcapping": model.logits_soft_cap,
        }
        width = model.d_model
        decoder = None
        if isinstance(model, EncoderDecoder):
            width = model.width("encoder")
            decoder = _Stack.of(model.decoder, "decoder", hidden_size=model.d_model, **common)
        encoder = _Stack.of(model.encoder, "encoder", hidden_size=width, **common)
        block, mixer, _ = first_block(model.encoder, "encoder")
        config = cls(
            encoder, decoder, model.tied, block.dropout_rate, mixer.dropout_rate, model.ids
        )
        check_same_function(model, config.build())
        return config

    def build(self) -> EncoderDecoder | Encoder:
        """Returns the unbound model, which is an `Encoder` if there is no decoder."""
        rates = {"dropout_rate": self.dropout_rate, "attention_dropout": self.attention_dropout}
        encoder = self.encoder.build(in_decoder=False, **rates)
        width = self.encoder.hidden_size
        common: Any = {"vocab_size": self.encoder.vocab_size, "ids": self.ids}
        if self.decoder is None:
            return Encoder(d_model=width, encoder=encoder, embedding_scale=width**0.5, **common)
        return EncoderDecoder(
            d_model=self.decoder.hidden_size,
            encoder=encoder,
            decoder=self.decoder.build(in_decoder=True, **rates),
            tied=self.tied,
            embedding_scale=self.decoder.hidden_size**0.5,
            logits_scale=1.0,
            logits_soft_cap=self.decoder.final_logit_softcapping,
            encoder_d_model=width,
            encoder_embedding_scale=width**0.5,
            **common,
        )

    def write(self, dtype: str) -> dict[str, Any]:
        """Returns the fields of a ``config.json`` that transformers 4 and 5 read as the same model.

        The argument `dtype` is the name of the tensors' dtype.
        """
        ids = write_gemma_ids(self.ids)

        def part(stack: _Stack) -> dict[str, Any]:
            """Returns the fields of one stack."""
            fields = fields_of(stack)
            rotary = fields.pop("rotary").write()
            rope = {"rope_parameters": rotary, "rope_theta": rotary["rope_theta"]}
            if stack.rotary.scaling is not None:
                # Write ``rope_scaling``, because version 4 of transformers reads only this key, and
                # version 5 prefers it.
                rope["rope_scaling"] = {k: x for k, x in rotary.items() if k != "rope_theta"}
            return {"model_type": "t5_gemma_module", **fields, **rope, **ids}

        kind = "ForConditionalGeneration" if self.decoder else "EncoderModel"
        return {
            "architectures": [f"T5Gemma{kind}"],
            "model_type": T5GEMMA,
            "encoder": part(self.encoder),
            "decoder": part(self.decoder or self.encoder),
            "is_encoder_decoder": self.decoder is not None,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.encoder.vocab_size,
            "dropout_rate": self.dropout_rate,
            "attention_dropout": self.attention_dropout,
            **ids,
            "torch_dtype": dtype,
        }


_SUBLAYERS = {
    "attention": "self_attn",
    "self_attention": "self_attn",
    "cross_attention": "cross_attn",
    "encoder_decoder_attention": "cross_attn",
}
"""Maps the names of attention in this package to the names of attention in transformers.

The name of a norm contains the name of the attention to which the norm belongs. All other
parameters of a layer belong to the feed-forward layer.
"""

_LEAVES = {
    "query": "q_proj",
    "key": "k_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
    "value": "v_proj",
    "out": "o_proj",
    "wi_0": "gate_proj",
    "wi_1": "up_proj",
    "wo": "down_proj",
}
"""Maps the names of kernels, and of norms of queries and keys, to their names in transformers."""


def has_output_norm(model: nn.Module) -> bool:
    """Returns whether the encoder's blocks normalize the outputs of their layers, as in a T5Gemma.

    `T5Gemma.of` and `T5Gemma2.of` check the other parts of the model.
    """
    stack = getattr(model, "encoder", None)
    return isinstance(stack, Stack) and stack.runs[0].block.output_norm


def torch_name(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns the name and layout of a parameter in ``T5GemmaForConditionalGeneration``.

    The argument `path` is the path of a parameter in an `EncoderDecoder` with looped layers.
    """
    if path == ("logits_kernel",):
        return OUTPUT, TRANSPOSED
    if path == ("embedding",):
        return f"{PREFIX}decoder.{_EMBEDDING}", SAME
    name, layout = torch_name_in_encoder(path)
    return PREFIX + name, layout


def torch_name_in_encoder(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns the name and layout in ``T5GemmaEncoderModel`` of a parameter of an `Encoder`."""
    if path in (("embedding",), ("encoder_embedding",)):
        return f"encoder.{_EMBEDDING}", SAME
    stack, part, *rest = path
    if part == "final_norm":
        return f"{stack}.norm.weight", SAME
    layer = f"{stack}.layers.{part.removeprefix('layers_')}"
    if rest[0].endswith("_layer_norm"):
        # An example of a norm's name in this package is ``pre_self_attention_layer_norm``.
        position, _, sublayer = rest[0].removesuffix("_layer_norm").partition("_")
        name = _SUBLAYERS.get(sublayer, "feedforward")
        return f"{layer}.{position}_{name}_layernorm.weight", SAME
    leaf = rest[-2]
    name = f"{layer}.{_SUBLAYERS.get(rest[0], 'mlp')}.{_LEAVES[leaf]}.weight"
    layouts = {"out": HEADS_OF_OUTPUTS, "query_norm": SAME, "key_norm": SAME}
    return name, layouts.get(leaf, TRANSPOSED)
