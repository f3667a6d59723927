"""The modules of transformers that PEFT adapts, and PEFT's names of their tensors."""

from __future__ import annotations

from typing import NamedTuple

from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.huggingface import t5gemma, t5gemma2
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.names import EMBEDDINGS, OUTPUT
from synthesizer_jax.pretrained.tensors import Correspondence, correspondences

PREFIX = "base_model.model."
"""The prefix of every tensor's name in a folder of PEFT."""

WEIGHT = ".weight"
"""The suffix of the names of most tensors. The part before it is the name of a module."""

SHARED, *EMBEDDINGS_OF_STACKS = (name.removesuffix(WEIGHT) for name in EMBEDDINGS)
"""The modules of a T5 that hold the embedding: the shared module, and a module in each stack."""

OUTPUTS = tuple(name.removesuffix(WEIGHT) for name in (OUTPUT, t5gemma.OUTPUT))
"""The modules that hold the output projection."""


def modules_of(c: Correspondence, model: TokenModel) -> list[str]:
    """Returns the names of the modules of transformers that hold a parameter of this package.

    In transformers, several modules of a T5 hold the embedding, including a tied output projection.
    All modules that hold the embedding initially share one tensor. If PEFT wraps one of the
    modules, each module has its own copy of the tensor. In a T5Gemma 2, the modules that embed
    tokens also share the input vector for the end of an image.
    """
    module = c.name.rpartition(".")[0]
    modules = [module]
    has_decoder = isinstance(model, EncoderDecoder)
    if t5gemma2.is_t5gemma2(model):
        modules = [t5gemma2.module_name(module)]
        if has_decoder and c.path in (("embedding",), ("separate_embedding",)):
            modules.append(t5gemma2.DECODER_EMBEDDING)
    if c.path != ("embedding",):
        return modules

    if t5gemma.has_output_norm(model):
        output = t5gemma.OUTPUT
    else:
        modules, output = list(EMBEDDINGS_OF_STACKS), OUTPUT
        if not has_decoder:
            modules = [name for name in modules if "decoder" not in name]
    if has_decoder and model.tied:
        modules.append(output.removesuffix(WEIGHT))
    return modules


class TiedModules(NamedTuple):
    """Modules whose adapters PEFT can tie.

    Attributes:
      source: the input embedding of the model in transformers.
      others: the modules that PEFT ties to the input embedding. If tokens are trained in the input
        embedding, all of these modules have the same rows for the tokens.
    """

    source: str
    others: tuple[str, ...]


def tied_modules(model: TokenModel) -> TiedModules | None:
    """Returns the modules whose adapters PEFT can tie.

    In a T5, these modules include the output projection, even if it has a tensor of its own. The
    result is `None` for a T5Gemma, whose input embedding belongs only to the encoder, and for an
    encoder of a T5Gemma 2.
    """
    if t5gemma2.is_t5gemma2(model) and isinstance(model, EncoderDecoder):
        source = t5gemma2.module_name(t5gemma2.EMBEDDING.removesuffix(WEIGHT))
        return TiedModules(source, (t5gemma2.DECODER_EMBEDDING, OUTPUTS[1]))
    if t5gemma.has_output_norm(model):
        return None
    return TiedModules(SHARED, (*EMBEDDINGS_OF_STACKS, OUTPUTS[0]))


def is_embedding(module: str) -> bool:
    """Returns whether a module of transformers looks up rows of its tensor."""
    return module.rpartition(".")[2] in ("shared", "embed_tokens", "relative_attention_bias")


def all_modules(model: TokenModel) -> list[str]:
    """Returns the names of all modules of transformers that hold a parameter of a model."""
    modules = [
        module
        for c in correspondences(model, kind_of(model).name_of)
        for module in modules_of(c, model)
    ]
    if not t5gemma.has_output_norm(model):
        modules.append(SHARED)
    return modules


def whole_names(module: str, c: Correspondence) -> tuple[str, str]:
    """Returns PEFT's names of a complete parameter of a module.

    The first name is used if ``modules_to_save`` contains the module. The second name is used for
    the parameter of the base, if the module has an update.
    """
    leaf = c.name.rpartition(".")[2]
    return f"{module}.{leaf}", f"{module}.base_layer.{leaf}"


def update_names(module: str) -> tuple[str, str]:
    """Returns PEFT's names of the factors A and B of a module's update.

    The factors of a matrix are A ``[rank, inputs]`` and B ``[outputs, rank]``. The factors of an
    embedding are A ``[rank, tokens]`` and B ``[d_model, rank]``.
    """
    if is_embedding(module):
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def magnitude_name(module: str) -> str:
    """Returns PEFT's name of the magnitude of a module's update."""
    return f"{module}.lora_magnitude_vector"


def rows_name(module: str) -> str:
    """Returns PEFT's name of the rows of trained tokens in a module."""
    return f"{module}.token_adapter.trainable_tokens_delta"
