"""The modules of transformers that PEFT adapts, and PEFT's names of their tensors."""

from __future__ import annotations

from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.huggingface import t5gemma, t5gemma2
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.names import EMBEDDINGS, OUTPUT
from synthesizer_jax.pretrained.tensors import Correspondence, correspondences

PREFIX = "base_model.model."
"""The prefix of every tensor's name in a folder of PEFT."""

WEIGHT, BASE_LAYER = ".weight", ".base_layer.weight"
"""The suffixes of the names of tensors without an update and with an update by PEFT."""

SHARED, *EMBEDDINGS_OF_STACKS = (name.removesuffix(WEIGHT) for name in EMBEDDINGS)
"""The modules of a T5 that hold the embedding: the shared module, and a module in each stack."""

OUTPUTS = tuple(name.removesuffix(WEIGHT) for name in (OUTPUT, t5gemma.OUTPUT))
"""The modules that hold the output projection."""


def modules_of(c: Correspondence, model: TokenModel) -> list[str]:
    """Returns the names of the modules of transformers that hold a parameter of this package.

    In transformers, several modules of a T5 hold the embedding, including a tied output projection.
    All modules that hold the embedding initially share one tensor. If PEFT wraps one of the
    modules, each module has its own copy of the tensor.
    """
    module = c.name.removesuffix(WEIGHT)
    if t5gemma2.is_t5gemma2(model):
        module = t5gemma2.module_name(module)
    if c.path != ("embedding",):
        return [module]

    has_decoder = isinstance(model, EncoderDecoder)
    if t5gemma.has_output_norm(model):
        modules, output = [module], t5gemma.OUTPUT
        if has_decoder and t5gemma2.is_t5gemma2(model):
            modules.append(t5gemma2.DECODER_EMBEDDING)
    else:
        modules, output = list(EMBEDDINGS_OF_STACKS), OUTPUT
        if not has_decoder:
            modules = [name for name in modules if "decoder" not in name]
    if has_decoder and model.tied:
        modules.append(output.removesuffix(WEIGHT))
    return modules


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
