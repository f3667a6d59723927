"""The fields of ``config.json`` that T5Gemma and T5Gemma 2 have in common."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any, Self

from synthesizer_jax.alignments import DotProduct, LinearScaling
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import check_types
from synthesizer_jax.base.typing import Choices, Length, Number, Positive
from synthesizer_jax.models import Stack
from synthesizer_jax.pretrained.architecture import first_block, other_part
from synthesizer_jax.pretrained.huggingface.config import (
    FORCED,
    IDS,
    Layers,
    read_ids,
    write_ids,
)
from synthesizer_jax.primitives.norms import RMSNorm

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "silu": "silu", "relu": "relu"}
"""Maps transformers' names of activations to the names in this package."""

WINDOWED = "sliding_attention"
"""The value of ``layer_types`` for self-attention with a window."""

UNLIMITED = "full_attention"
"""The value of ``layer_types`` for self-attention without a window."""

_UNSCALED = "default"
"""The value of ``rope_type`` for rotary positions that are not scaled."""

_LINEAR = "linear"
"""The value of ``rope_type`` for rotary positions that are divided by a factor."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryFields:
    """The settings of rotary positions, with the defaults of transformers."""

    rope_theta: Positive
    rope_type: Annotated[str, Choices((_UNSCALED, _LINEAR))] = _UNSCALED
    factor: Positive | None = None
    partial_rotary_factor: Annotated[float, Choices((1.0,))] = 1.0

    @classmethod
    def read(cls, data: dict[str, Any], base: object, path: str) -> RotaryFields:
        """Returns the settings in a JSON object.

        Args:
          data: the JSON object.
          base: the base of the rotary positions if `data` does not contain it.
          path: the name of the settings in error messages.

        Raises:
          ValueError: if a setting has a value that is not supported.
        """
        data = {"rope_theta": base, "rope_type": data.get("type", _UNSCALED), **data}
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        check_types(cls, fields, path)
        rotary = cls(**fields)
        if rotary.rope_type == _LINEAR and rotary.factor is None:
            raise ValueError(f"{path} has the rope_type {_LINEAR!r}, but no factor")
        return rotary

    @classmethod
    def of(cls, dot: DotProduct) -> RotaryFields:
        """Returns the settings of an alignment."""
        # `check_same_function` reports an alignment that has no rotary positions.
        base = dot.rotary_base or 1.0
        scaling = dot.rotary_scaling
        if not isinstance(scaling, LinearScaling):
            return cls(rope_theta=base)
        return cls(rope_theta=base, rope_type=_LINEAR, factor=scaling.factor)

    @property
    def scaling(self) -> LinearScaling | None:
        """The scaling of the positions, or `None` if they are not scaled."""
        if self.rope_type == _LINEAR and self.factor is not None:
            return LinearScaling(self.factor)
        return None

    def write(self) -> dict[str, Any]:
        """Returns the JSON object of the settings."""
        written = {"rope_type": self.rope_type, "rope_theta": self.rope_theta}
        return written if self.factor is None else {**written, "factor": self.factor}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackFields:
    """The fields of a stack that have the same defaults for T5Gemma and T5Gemma 2."""

    hidden_size: Length = 2304
    intermediate_size: Length = 9216
    num_hidden_layers: Layers = 26
    num_attention_heads: Length = 8
    num_key_value_heads: Length = 4
    head_dim: Length = 256
    hidden_activation: Annotated[str, Choices(tuple(ACTIVATIONS))] = "gelu_pytorch_tanh"
    rms_norm_eps: Positive = 1e-6
    query_pre_attn_scalar: Length = 256
    layer_types: tuple[Annotated[str, Choices((WINDOWED, UNLIMITED))], ...] | None = None
    attention_bias: Annotated[bool, Choices((False,))] = False
    bos_token_id: Number = 2

    @classmethod
    def read_fields(cls, data: dict[str, Any], path: str) -> Self:
        """Returns the fields in a JSON object, whose other entries are ignored.

        Args:
          data: the JSON object. The caller has already read its rotary settings.
          path: the name of the stack in error messages.

        Raises:
          ValueError: if a field has a value that is not supported.
        """
        if isinstance(data.get("layer_types"), list):
            data = {**data, "layer_types": tuple(data["layer_types"])}
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        check_types(cls, fields, path)
        return cls(**fields)


def alignment_of(mixer: object, path: str) -> DotProduct:
    """Returns the alignment of a layer's self-attention, which has a scale.

    Args:
      mixer: the self-attention.
      path: the name of the self-attention in error messages.

    Raises:
      ValueError: if the alignment is not a dot product with a scale.
    """
    dot = getattr(mixer, "alignment", None)
    if not isinstance(dot, DotProduct) or not dot.scale:
        raise ValueError(other_part(f"{path}.alignment", type(dot).__name__))
    return dot


def fields_of_layers(stack: Stack, name: str) -> dict[str, Any]:
    """Returns the fields whose values are the same for all layers of a stack.

    Args:
      stack: the stack.
      name: the name of the stack in error messages.

    Raises:
      ValueError: if the fields cannot describe the first layer of the stack; see `first_block` and
        `alignment_of`.
    """
    block, mixer, feed_forward = first_block(stack, name)
    scale = alignment_of(mixer, f"{name}.layers.0.self_mixer").scale
    assert scale is not None
    activations = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return {
        "intermediate_size": feed_forward.hidden_dim,
        "num_hidden_layers": stack.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_value_heads,
        "head_dim": mixer.head_dim,
        # `check_same_function` reports activations that the fields cannot describe.
        "hidden_activation": activations.get(feed_forward.activations[0], "relu"),
        "rms_norm_eps": block.norm.epsilon if isinstance(block.norm, RMSNorm) else 1e-6,
        "query_pre_attn_scalar": round(scale**-2),
    }


def read_architectures(data: dict[str, Any]) -> list[str]:
    """Returns the names of the classes in ``architectures``.

    Raises:
      ValueError: if one of the classes is a classifier.
    """
    names = [str(name) for name in data.get("architectures") or ()]
    for name in names:
        if name.endswith("Classification"):
            raise ValueError(f"a {name} is not supported")
    return names


def read_gemma_ids(
    folder: pathlib.Path, data: dict[str, Any], stack_data: dict[str, Any], bos: int
) -> SpecialIds:
    """Returns the special ids of a model; see `read_ids` for errors.

    Args:
      folder: the folder of the model.
      data: the content of ``config.json``.
      stack_data: the JSON object of the decoder, or of the encoder if there is no decoder. Ids in
        `data` take precedence over ids in this object.
      bos: the id of BOS, which is the first input of the decoder unless the configuration names a
        different id.
    """
    ids = {name: stack_data.get(name) for name in IDS}
    return read_ids(folder, {**ids, **data}, SpecialIds(start=bos))


def write_gemma_ids(ids: SpecialIds) -> dict[str, object]:
    """Returns the fields of ``config.json`` that contain ids."""
    fields = {name: value for name, value in write_ids(ids).items() if name not in FORCED}
    return {**fields, "bos_token_id": ids.start}
