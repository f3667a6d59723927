"""Models here as one of the architectures of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Architecture
from synthesizer_jax.pretrained.huggingface import names, t5gemma
from synthesizer_jax.pretrained.huggingface.config import write_config
from synthesizer_jax.pretrained.tensors import NameOf


class Kind(NamedTuple):
    """The fields of a model's ``config.json`` for the dtype of its tensors, and their names."""

    config: Callable[[str], dict[str, Any]]
    name_of: NameOf


def kind_of(model: TokenModel) -> Kind:
    """Returns how transformers has a model with looped layers.

    Raises:
      ValueError: it has none such; the message names a part that differs.
    """
    if t5gemma.is_t5gemma(model):
        whole = isinstance(model, EncoderDecoder)
        name_of = t5gemma.torch_name if whole else t5gemma.torch_name_in_encoder
        return Kind(t5gemma.T5Gemma.of(model).write, name_of)
    return Kind(functools.partial(write_config, Architecture.of(model)), names.torch_name)
