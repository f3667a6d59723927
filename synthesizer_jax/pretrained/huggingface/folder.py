"""Opens a T5 in a folder of transformers: ``config.json``, weights and a tokenizer.

T5 1.0 and 1.1, LM-adapted T5, FLAN-T5, mT5, umT5, ByT5, UL2 and FLAN-UL2 share one architecture and
differ only in its fields. The encoder of each of these models can also be read on its own. Code
that a folder contains is never executed.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import numpy as np

from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface import t5gemma, t5gemma2
from synthesizer_jax.pretrained.huggingface.config import (
    CONFIG,
    T5GEMMA,
    T5GEMMA2,
    T5GEMMA2_ENCODER,
    read_config,
    read_model_type,
)
from synthesizer_jax.pretrained.huggingface.names import (
    EMBEDDINGS,
    OUTPUT,
    UNUSED,
    is_in_encoder,
    torch_name,
)
from synthesizer_jax.pretrained.huggingface.weights import open_weights
from synthesizer_jax.pretrained.tensors import FLOATS, Tensors, correspondences, match_tensors


def open_folder(
    folder: pathlib.Path,
    *,
    compare: bool = True,
    encoder_only: bool = False,
    variant: str | None = None,
) -> Pretrained:
    """Opens the model and the parameters in a folder. A parameter is read only when it is needed.

    Args:
      folder: the folder of the model.
      compare: whether to read and compare tensors that may be the same parameter of the model, such
        as the embedding and the output projection. If the output projection is equal to the
        embedding, it is treated as a copy of the embedding. If `compare` is false, only the headers
        of files are read, and an output projection in the folder is assumed to differ from the
        embedding.
      encoder_only: whether to open only the encoder, even if the folder holds a whole model.
      variant: see `with_variant`.

    Raises:
      FileNotFoundError: if the folder lacks files.
      ValueError: if the architecture is not supported, if copies of one parameter differ, or if
        tensors do not fit the model. The message lists all tensors that do not fit.
    """
    open_files = functools.partial(open_weights, folder, variant=variant)
    # Read the configuration before the weights, because an error message about the configuration
    # explains best why a folder is not supported.
    family = read_model_type(folder)
    if family == T5GEMMA:
        return _open_t5gemma(folder, open_files, compare=compare, encoder_only=encoder_only)
    if family in (T5GEMMA2, T5GEMMA2_ENCODER):
        return _open_t5gemma2(folder, open_files, compare=compare, encoder_only=encoder_only)
    read_config(folder, output=None, encoder_only=encoder_only)
    tensors = open_files(is_in_encoder) if encoder_only else open_files()

    # The folder may contain the embedding under several names. Take the first of these tensors, and
    # check that the others are equal to it.
    shared = next((name for name in EMBEDDINGS if name in tensors), EMBEDDINGS[0])
    for name in EMBEDDINGS:
        if compare and name in tensors and not _are_equal(tensors, name, shared):
            raise ValueError(
                f"{name} is not equal to {shared}, but a T5 has only one embedding. Copy or "
                f"download {folder} again."
            )

    has_output = OUTPUT in tensors and not (compare and _are_equal(tensors, OUTPUT, shared))
    # Read the configuration again, because its meaning depends on whether the folder contains an
    # output projection, which is known only now.
    architecture = read_config(folder, output=has_output, encoder_only=encoder_only)
    if architecture.tied and has_output and compare and architecture.num_decoder_layers:
        raise _unequal_projection(folder, OUTPUT, shared)

    model = architecture.build()
    parameters = [
        c._replace(name=shared) if c.path == ("embedding",) else c
        for c in correspondences(model, torch_name)
    ]
    ignored = {*EMBEDDINGS, UNUSED}
    if model.tied:
        ignored.add(OUTPUT)
    params = match_tensors(tensors, parameters, source=folder, ignored=ignored)
    return Pretrained(model, params, None)


def model_of(folder: pathlib.Path) -> TokenModel:
    """Returns the model that a folder's ``config.json`` describes.

    The folder need not contain weights or a tokenizer.

    Raises:
      FileNotFoundError: if the folder has no configuration.
      ValueError: if the architecture is not supported.
    """
    family = read_model_type(folder)
    if family == T5GEMMA:
        return t5gemma.T5Gemma.read(folder).build()
    if family in (T5GEMMA2, T5GEMMA2_ENCODER):
        return t5gemma2.T5Gemma2.read(folder).build()
    return read_config(folder, output=None).build()


def _open_t5gemma(
    folder: pathlib.Path, open_files: Callable[..., Tensors], *, compare: bool, encoder_only: bool
) -> Pretrained:
    """Opens a T5Gemma; see `open_folder`.

    The argument `open_files` is a function that opens the tensors; see `open_weights`.
    """
    config = t5gemma.T5Gemma.read(folder, encoder_only=encoder_only)
    model = config.build()
    if config.decoder is None:
        # The names of tensors have a prefix in a folder with a whole model, and no prefix in a
        # folder with only an encoder.
        prefix = t5gemma.PREFIX
        alone = open_files(lambda name: name.removeprefix(prefix).startswith("encoder."))
        tensors: Tensors = {name.removeprefix(prefix): x for name, x in alone.items()}
        parameters = correspondences(model, t5gemma.torch_name_in_encoder)
    else:
        tensors = open_files()
        parameters = correspondences(model, t5gemma.torch_name)

    ignored = {t5gemma.OUTPUT} if model.tied else ()
    if compare and model.tied and t5gemma.OUTPUT in tensors:
        (embedding,) = (c.name for c in parameters if c.path == ("embedding",))
        if not _are_equal(tensors, t5gemma.OUTPUT, embedding):
            raise _unequal_projection(folder, t5gemma.OUTPUT, embedding)
    params = match_tensors(tensors, parameters, source=folder, ignored=ignored)
    return Pretrained(model, params, None)


def _open_t5gemma2(
    folder: pathlib.Path, open_files: Callable[..., Tensors], *, compare: bool, encoder_only: bool
) -> Pretrained:
    """Opens a T5Gemma 2 for texts; see `open_folder`.

    The tensors of the vision tower are not read.
    """
    config = t5gemma2.T5Gemma2.read(folder, encoder_only=encoder_only)
    model = config.build()
    has_decoder = config.decoder is not None

    def is_wanted(name: str) -> bool:
        """Returns whether a tensor may be a parameter of the model."""
        if t5gemma2.is_of_images(name):
            return False
        return has_decoder or not t5gemma2.is_of_decoder(name)

    opened = open_files(is_wanted)
    tensors: Tensors = {t5gemma2.saved_name(name): x for name, x in opened.items()}
    if not tensors:
        raise ValueError(
            f"{folder} contains only the weights of a vision tower, which reads images, but this "
            "package reads the text model of a T5Gemma 2. Give the folder of the whole model."
        )
    if not has_decoder:
        # The names of tensors have a prefix in a folder with a whole model, and no prefix in a
        # folder with only an encoder.
        tensors = {name.removeprefix(t5gemma2.PREFIX): x for name, x in tensors.items()}
        parameters = correspondences(model, t5gemma2.torch_name_in_encoder)
        return Pretrained(model, match_tensors(tensors, parameters, source=folder), None)

    for copy, original in t5gemma2.COPIES.items():
        if compare and copy in tensors and not _are_equal(tensors, copy, original):
            raise ValueError(
                f"{copy} is not equal to {original}, but a T5Gemma 2 has only one embedding. Copy "
                f"or download {folder} again."
            )
    parameters = correspondences(model, t5gemma2.torch_name)
    params = match_tensors(tensors, parameters, source=folder, ignored=t5gemma2.COPIES)
    return Pretrained(model, params, None)


def _unequal_projection(folder: pathlib.Path, output: str, embedding: str) -> ValueError:
    """Returns the error that is raised if a tied output projection differs from the embedding."""
    return ValueError(
        f"{folder / CONFIG} says that the model has no output projection of its own, but {output} "
        f"is not equal to {embedding}. Correct tie_word_embeddings."
    )


def _are_equal(tensors: Tensors, name: str, other: str) -> bool:
    """Returns whether two tensors have the same values."""
    if name == other:
        return True
    if other not in tensors or tensors[name].dtype not in FLOATS:
        return False
    x = tensors[name]
    y = tensors[other]
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return False
    return np.array_equal(x.read(()), y.read(()))
