"""Loads models with their variables and vocabularies, generates texts and encodes texts."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from synthesizer_jax.attention import Mask
from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.registry import check_types, format_value, replace
from synthesizer_jax.base.typing import AUTO, Dtype
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation.prediction import Generated, Predictor
from synthesizer_jax.inference import Decoding
from synthesizer_jax.inference.scoring import encoder_width
from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel, dtype_of, num_real_tokens
from synthesizer_jax.pretrained.from_run import open_run
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.runs.saved import is_run, open_vocabulary


class Loaded(NamedTuple):
    """A model with its variables and its vocabulary.

    Attributes:
      model: the unbound model, with looped layers.
      variables: the model's variables.
      vocabulary: the vocabulary, which converts between texts and token ids.
    """

    model: TokenModel
    variables: Variables
    vocabulary: Vocabulary


def load(
    path: str | pathlib.Path,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    variant: str | None = None,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    encoder_only: bool = False,
) -> Loaded:
    """Loads a model with its variables and its vocabulary.

    The function does not import TensorFlow.

    Args:
      path: the model. The path may be a run directory, ``RUN/checkpoints/STEP``, or a folder of
        Hugging Face transformers with a T5 or with the encoder of a T5. If the model is a
        T5Gemma 2, its vision tower is not read. The folder must contain a tokenizer. In a pipeline
        of diffusers, the tokenizer is in a folder beside the model instead.
        If ``huggingface_hub`` is installed, `path` can also be the name ``OWNER/NAME`` of a model
        on the Hugging Face hub. The name may end with a folder inside the repository, as in
        ``black-forest-labs/FLUX.1-dev/text_encoder_2``.
      revision: a branch, tag or commit of a model on the hub. `None` means the main branch.
      subfolder: the folder of the model inside `path`, such as ``"text_encoder_2"``.
      variant: the variant of the weights to read, if a folder contains several variants. For
        example, ``"fp16"`` reads ``model.fp16.safetensors``. `None` reads ``model.safetensors``.
      mesh: a mesh from `sharding.make_mesh` or `jax.make_mesh`. The variables are sharded over the
        mesh, one parameter at a time. Parameters are sharded over the axes ``fsdp`` and ``tensor``,
        and examples over the axes ``data`` and ``fsdp``. The mesh does not need all of these axes.
        Over axes with other names, variables and examples are replicated. `None` uses one device.
      dtype: the dtype of the parameters and of the computation. The dtype must be bfloat16 or
        float32, and can be given as a string or as ``jnp.bfloat16``. ``"auto"`` means float32 on
        CPUs and bfloat16 on other devices. If `dtype` is `None`, parameters are float32, and the
        computation has the dtype of the model.
      encoder_only: whether to read only the encoder's tensors from a folder of transformers. If
        `encoder_only` is true, the loaded model is an `Encoder`.

    Raises:
      FileNotFoundError: if there is no model at `path`, or if the model has no vocabulary.
      TypeError: if `mesh` is not a mesh of devices, or if `path` is not a path.
      ValueError: if the files cannot be read, if the dtype is not supported, or if a parameter's
        size is not divisible by the size of a mesh axis.
    """
    if not isinstance(mesh, Mesh | None):
        raise TypeError(
            f"mesh is {mesh!r}, but it must be a jax.sharding.Mesh. Make one with "
            "sharding.make_mesh, for example make_mesh(MeshShape(fsdp=8)), or with jax.make_mesh."
        )
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise TypeError(
            f"path is {path!r}, but it must be the path of a model, or the name of a model on the "
            "Hugging Face hub, such as google/flan-t5-small."
        )
    dtype_name = None if dtype is None else _check_dtype(dtype)
    source = storage_path(str(path)).expanduser()

    run = source / (subfolder or "")
    if is_run(run) and not encoder_only and revision is None and variant is None:
        (model, saved_vocabulary), variables = open_run(run, mesh)
        if dtype_name is not None:
            model = replace(model, dtype=dtype_name)
            variables = jax.tree.map(lambda x: x.astype(dtype_name), variables)
        return Loaded(model, variables, open_vocabulary(saved_vocabulary, run, model=model))

    # Import the modules that read other checkpoints only here, because runs do not need them.
    from synthesizer_jax.pretrained.opening import open_pretrained, read_params

    with open_pretrained(
        source, revision=revision, subfolder=subfolder, variant=variant, encoder_only=encoder_only
    ) as pretrained:
        if pretrained.vocabulary is None:
            raise FileNotFoundError(
                f"{source} has no vocabulary that is known here. Put the model's spiece.model "
                "there, or convert the model with 'synthesizer-jax convert --vocabulary'."
            )
        vocabulary = pretrained.vocabulary.build()
        model = pretrained.model
        vocabulary.check_ids(model.ids, source)
        params = read_params(pretrained, mesh, dtype_name)
    model = replace(model, dtype=dtype_name or model.dtype)
    return Loaded(model, {"params": params}, vocabulary)


def _check_dtype(dtype: DTypeLike) -> Dtype:
    """Returns the name of a dtype that models support, or raises a `ValueError`."""
    name: object = dtype
    # If the argument is not a NumPy dtype, the call of `check_types` below raises an error that
    # contains the allowed names.
    with contextlib.suppress(TypeError):
        name = jnp.dtype(dtype).name
    check_types(TokenModel, {"dtype": name})
    if name == AUTO:
        return dtype_of()
    return str(name)


def generate(
    loaded: Loaded,
    texts: Sequence[str],
    *,
    max_length: int = 64,
    inputs_length: int = 512,
    decoding: Decoding | None = None,
) -> list[str]:
    """Generates one text for each input.

    Args:
      loaded: the result of `load`.
      texts: the inputs.
      max_length: the maximum number of tokens of an output, for greedy decoding.
      inputs_length: the maximum number of tokens of an input. Longer inputs are truncated. Use 0 if
        the model is a `LanguageModel` that was trained on texts without inputs. The model then
        continues the given texts.
      decoding: the settings of decoding, which are used instead of `max_length`. For example,
        ``Decoding(max_length=64, temperature=0.7, top_p=0.9)`` turns on sampling.

    Returns:
      The generated texts, in the order of the inputs.
    """
    decoding = decoding or Decoding(max_length=max_length)
    _check_arguments(loaded, texts, decoding)
    predictor = _predictor(loaded, texts, inputs_length, decoding)
    return predictor.predict([predictor.encode(text) for text in texts]).texts


def generate_with_scores(
    loaded: Loaded, texts: Sequence[str], *, decoding: Decoding, inputs_length: int = 512
) -> list[list[Generated]]:
    """Generates one or more texts for each input, and computes the log-probabilities of the texts.

    Args:
      loaded: the result of `load`.
      texts: the inputs.
      decoding: the settings, such as ``Decoding(max_length=64, beams=4, samples=4)``.
      inputs_length: see `generate`.

    Returns:
      A list of `Decoding.samples` texts for each input. The score of a text is its log-probability
      under the model, in nats. The texts of beam search are ordered by their log-probability
      divided by the length penalty, with the best beam first.
    """
    _check_arguments(loaded, texts, decoding)
    predictor = _predictor(loaded, texts, inputs_length, decoding)
    return predictor.generate_texts([predictor.encode(text) for text in texts])


def encode(
    loaded: Loaded,
    texts: Sequence[str],
    *,
    inputs_length: int = 512,
    pool: bool | None = None,
    pad_to: int | None = None,
    attend_to_padding: bool = False,
) -> np.ndarray | list[np.ndarray]:
    """Encodes texts with an encoder, or with the encoder of an encoder-decoder.

    Args:
      loaded: the result of `load`.
      texts: the inputs.
      inputs_length: the maximum number of tokens of an input. Longer inputs are truncated.
      pool: whether to return the mean of the states of each text's tokens, including EOS. `None`
        means that the mean is returned unless `pad_to` is given.
      pad_to: the number of tokens, at least one, to which inputs are truncated or padded. If
        `pad_to` is given, `inputs_length` is not used. The states at padding positions are the same
        as in transformers.
      attend_to_padding: whether tokens attend to padding positions up to `pad_to`. In transformers,
        tokens attend to padding if no ``attention_mask`` is given.

    Returns:
      A float32 array ``[n, d_model]`` with pooling. Without pooling, the result is an array
      ``[n, pad_to, d_model]`` if `pad_to` is given, and a list of arrays ``[length, d_model]`` if
      it is not.

    Raises:
      TypeError: if the model has no encoder.
      ValueError: if `attend_to_padding` is true but `pad_to` is not given, or if the maximum length
        of inputs leaves no room for tokens.
    """
    decoding = Decoding(max_length=1)
    _check_arguments(loaded, texts, decoding)
    width = encoder_width(loaded.model)
    if attend_to_padding and pad_to is None:
        raise ValueError(
            "attend_to_padding is True, but pad_to is not given, so the number of padding tokens "
            "is unknown. Add pad_to, for example pad_to=512."
        )
    if pad_to is None:
        length = inputs_length
        _check_length("inputs_length", length, loaded.vocabulary)
    else:
        length = pad_to
        _check_length("pad_to", length, loaded.vocabulary)
    predictor = _predictor(loaded, texts, length, decoding)
    ids = [predictor.encode(text) for text in texts]

    # Compute an array ``[length, d_model]`` for each text.
    if pad_to is None:
        states = predictor.states(ids)
    else:
        padding = loaded.model.ids.padding
        rows = [np.pad(row, (0, pad_to - len(row)), constant_values=padding) for row in ids]
        see: Callable[[jax.Array], Mask] = functools.partial(_see_real, padding=padding)
        if attend_to_padding:
            see = _see_all
        states = predictor.states(rows, see)

    if pool is None:
        pool = pad_to is None
    if not pool and pad_to is None:
        return states

    shape: tuple[int, ...] = (len(ids), length, width)
    if pool:
        # Average over the real tokens of each text, so that each text has a vector ``[d_model]``.
        states = [x[: len(row)].mean(axis=0) for x, row in zip(states, ids, strict=True)]
        shape = (len(ids), width)
    # The reshape is needed for an empty list of texts, for which the array would have the shape
    # ``[0]``.
    return np.array(states, np.float32).reshape(shape)


def _see_all(tokens: jax.Array) -> Mask:
    """Returns an attention mask that lets every token attend to every position, even to padding."""
    del tokens
    return Mask()


def _see_real(tokens: jax.Array, *, padding: int) -> Mask:
    """Returns an attention mask that lets all positions attend only to real tokens.

    In transformers, padding positions attend to the real tokens too. The argument `tokens` has the
    shape ``[batch, k]``.
    """
    return Mask(
        key_lengths=num_real_tokens(tokens, padding), query_valid=jnp.ones_like(tokens, bool)
    )


def _check_arguments(loaded: object, texts: object, decoding: object) -> None:
    """Raises a `TypeError` if an argument of `generate` or `encode` has the wrong type."""
    if not isinstance(loaded, Loaded):
        raise TypeError(
            f"The first argument is {format_value(loaded)}, but it must be a loaded model. Pass "
            "the result of synthesizer_jax.load."
        )
    if isinstance(texts, str):
        raise TypeError("texts is a single string instead of a sequence of strings. Pass [text].")
    # A generator is refused, because its texts can be read only once and their number is unknown.
    if not isinstance(texts, Collection):
        raise TypeError(
            f"texts is {format_value(texts)}, but it must be a sequence of strings. Pass a list."
        )
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"texts[{i}] is {format_value(text)}, but every text must be a string. Convert it "
                "with str, or decode its bytes."
            )
    if not isinstance(decoding, Decoding):
        raise TypeError(
            f"decoding is {format_value(decoding)}, but it must be a Decoding, for example "
            "Decoding(max_length=64)."
        )


def _check_length(name: str, length: int, vocabulary: Vocabulary) -> None:
    """Raises an error if a length leaves no room for the special tokens around an input.

    Raises:
      TypeError: if the length is not an integer.
      ValueError: if the length is too small.
    """
    if not isinstance(length, int | np.integer):
        raise TypeError(f"{name} is {format_value(length)}, but it must be an integer.")
    first, last = vocabulary.around_inputs
    least = max(len(first) + len(last), 1)
    if length < least:
        raise ValueError(
            f"{name} is {length}, but it must be at least {least}, because the special tokens "
            "before and after a text count too."
        )


def _predictor(
    loaded: Loaded, texts: Sequence[str], inputs_length: int, decoding: Decoding
) -> Predictor:
    """Returns a predictor for the texts, which uses the mesh of the sharded variables.

    The caller has checked the arguments with `_check_arguments`.
    """
    model, variables, vocabulary = loaded
    if inputs_length:
        _check_length("inputs_length", inputs_length, vocabulary)
    elif isinstance(model, EncoderDecoder):
        raise ValueError(
            "inputs_length is 0, but the model is an EncoderDecoder, which needs inputs. Use a "
            "positive number. 0 is for a LanguageModel that continues texts."
        )
    sharding = jax.tree.leaves(variables)[0].sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return Predictor(
        model,
        variables,
        vocabulary,
        inputs_length=inputs_length,
        decoding=decoding,
        batch_size=min(16, max(len(texts), 1)),
        mesh=mesh if isinstance(mesh, Mesh) else None,
    )
