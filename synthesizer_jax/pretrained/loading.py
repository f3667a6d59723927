"""Models, variables and vocabularies from directories, ready to use."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from synthesizer_jax.attention import Mask
from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.registry import check_types, replace
from synthesizer_jax.base.typing import AUTO, Dtype
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation.prediction import Generated, Predictor
from synthesizer_jax.inference import Decoding
from synthesizer_jax.inference.scoring import encoder_width
from synthesizer_jax.models.token_model import TokenModel, dtype_of, num_real_tokens
from synthesizer_jax.pretrained.from_run import open_run
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.runs.saved import is_run, open_vocabulary


class Loaded(NamedTuple):
    """A model that is ready to use.

    Attributes:
      model: the unbound model, with looped layers.
      variables: its variables.
      vocabulary: maps text to ids and back.
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
    """Loads a model with its variables and vocabulary; loads no TensorFlow.

    Args:
      path: the directory of a run, ``RUN/checkpoints/STEP``, or a folder of Hugging Face transformers
        with a T5, or the encoder of one, and its tokenizer, which pipelines of diffusers have beside it; or
        ``OWNER/NAME`` of such a folder on the Hugging Face hub, if ``huggingface_hub`` is installed. A
        folder of a repository may follow, ``black-forest-labs/FLUX.1-dev/text_encoder_2``.
      revision: of a model of the hub: a branch, tag or commit; None: its main branch.
      subfolder: the folder of the model inside of `path`, such as ``"text_encoder_2"``.
      variant: which of several files of weights to read, such as ``"fp16"`` for
        ``model.fp16.safetensors``; None: ``model.safetensors``.
      mesh: a mesh from `sharding.make_mesh` or `jax.make_mesh`, over which the variables are sharded
        parameter by parameter; None: one device. The axes ``fsdp`` and ``tensor`` shard parameters, and
        ``data`` and ``fsdp`` divide examples. Nothing is sharded over an axis that the mesh lacks, and axes
        with other names hold copies.
      dtype: of the parameters and of the computation, bfloat16 or float32, by name or as in
        ``jnp.bfloat16``, or ``"auto"``, which is bfloat16, on CPUs float32; None: float32 parameters, and
        the model's own.
      encoder_only: whether only the encoder's tensors are read, of a folder of transformers; the model is
        an `Encoder`.

    Raises:
      FileNotFoundError: there is no model, or it has no vocabulary.
      TypeError: `mesh` is not a mesh of devices.
      ValueError: its files cannot be read, or the dtype is another, or the size of a mesh axis does not
        divide the parameters.
    """
    if not isinstance(mesh, Mesh | None):
        raise TypeError(
            f"mesh is {mesh!r}, but it must be a jax.sharding.Mesh; give one of sharding.make_mesh, such "
            "as make_mesh(MeshShape(fsdp=8)), or one of jax.make_mesh"
        )
    dtype_name = None if dtype is None else _check_dtype(dtype)
    source = storage_path(str(path)).expanduser()
    run = source / (subfolder or "")
    if is_run(run) and not encoder_only and revision is None and variant is None:
        (model, saved), variables = open_run(run, mesh)
        if dtype_name is not None:
            model = replace(model, dtype=dtype_name)
            variables = jax.tree.map(lambda x: x.astype(dtype_name), variables)
        return Loaded(model, variables, open_vocabulary(saved, run, model=model))
    # A run needs none of what reads other libraries' checkpoints.
    from synthesizer_jax.pretrained.opening import open_pretrained, read_params

    with open_pretrained(
        source, revision=revision, subfolder=subfolder, variant=variant, encoder_only=encoder_only
    ) as pretrained:
        if pretrained.vocabulary is None:
            raise FileNotFoundError(
                f"{source} has no vocabulary that is known here; put the model's spiece.model there, or "
                "name one with 'synthesizer-jax convert --vocabulary'"
            )
        vocabulary, model = pretrained.vocabulary.build(), pretrained.model
        vocabulary.check_ids(model.ids)
        params = read_params(pretrained, mesh, dtype_name)
    return Loaded(replace(model, dtype=dtype_name or model.dtype), {"params": params}, vocabulary)


def _check_dtype(dtype: DTypeLike) -> Dtype:
    """Returns the name of a dtype of a model; raises a `ValueError` for others."""
    name: object = dtype
    with contextlib.suppress(TypeError):  # no dtype of NumPy's; the check says what is allowed
        name = jnp.dtype(dtype).name
    check_types(TokenModel, {"dtype": name})
    return dtype_of() if name == AUTO else str(name)


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
      loaded: from `load`.
      texts: the inputs.
      max_length: maximum number of tokens of greedy decoding.
      inputs_length: inputs are truncated to this many tokens. 0 for a `LanguageModel` that was trained on
        texts alone: it continues the texts.
      decoding: other settings, in the place of `max_length`, such as
        ``Decoding(max_length=64, temperature=0.7, top_p=0.9)``.
    """
    decoding = decoding or Decoding(max_length=max_length)
    predictor = _predictor(loaded, texts, inputs_length, decoding)
    return predictor.predict([predictor.encode(text) for text in texts]).texts


def generate_with_scores(
    loaded: Loaded, texts: Sequence[str], *, decoding: Decoding, inputs_length: int = 512
) -> list[list[Generated]]:
    """Generates one or several texts for each input, with their log-probabilities.

    Args:
      loaded: from `load`.
      texts: the inputs.
      decoding: settings, such as ``Decoding(max_length=64, beams=4, samples=4)``.
      inputs_length: see `generate`.

    Returns:
      For each input `Decoding.samples` texts, the best of the beams first. The scores are
      log-probabilities under the model in nats; beams are in the order of their log-probabilities
      divided by the length penalty.
    """
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
    """Encodes texts with the encoder of an encoder-decoder, or an encoder.

    Args:
      loaded: from `load`.
      texts: the inputs.
      inputs_length: inputs are truncated to this many tokens.
      pool: whether to return the mean over the tokens of each text, EOS included; None: unless `pad_to`
        is given.
      pad_to: inputs are truncated and padded to this many tokens, in the place of `inputs_length`, and the
        states of padding are those of transformers, too; at least one.
      attend_to_padding: whether tokens see the padding up to `pad_to`, as in transformers without an
        ``attention_mask``.

    Returns:
      ``[n, d_model]`` float32 if pooled; ``[n, pad_to, d_model]``; without `pad_to` a list of
      ``[length, d_model]``.

    Raises:
      TypeError: the model has no encoder.
      ValueError: padding is to be attended to, but there is none; or there is no room for tokens.
    """
    width = encoder_width(loaded.model)
    if attend_to_padding and pad_to is None:
        raise ValueError(
            "attend_to_padding=True without pad_to, which says how much padding there is; give it too, "
            "such as pad_to=512"
        )
    name = "inputs_length" if pad_to is None else "pad_to"
    length = inputs_length if pad_to is None else pad_to
    _check_length(name, length, loaded.vocabulary)
    predictor = _predictor(loaded, texts, length, Decoding(max_length=1))
    ids = [predictor.encode(text) for text in texts]
    if pad_to is None:
        states = predictor.states(ids)
    else:
        padding = loaded.model.ids.padding
        rows = [np.pad(row, (0, pad_to - len(row)), constant_values=padding) for row in ids]
        see = (lambda _: Mask()) if attend_to_padding else functools.partial(_see_real, padding=padding)
        states = predictor.states(rows, see)
    if pool is None:
        pool = pad_to is None
    if not pool and pad_to is None:
        return states

    shape: tuple[int, ...] = (len(ids), length, width)
    if pool:
        states = [x[: len(row)].mean(axis=0) for x, row in zip(states, ids, strict=True)]
        shape = (len(ids), width)
    return np.array(states, np.float32).reshape(shape)  # no texts make no rows


def _see_real(tokens: jax.Array, *, padding: int) -> Mask:
    """Returns the mask in which padding, too, sees the real tokens ``[batch, k]``, as in transformers."""
    return Mask(key_lengths=num_real_tokens(tokens, padding), query_valid=jnp.ones_like(tokens, bool))


def _check_length(name: str, length: int, vocabulary: Vocabulary) -> None:
    """Raises a `ValueError` for a number of tokens that has no room for those around an input."""
    first, last = vocabulary.around_inputs
    least = max(len(first) + len(last), 1)
    if length < least:
        raise ValueError(
            f"{name} is {length}, but it must be at least {least}, because the tokens before and after a "
            "text count too"
        )


def _predictor(loaded: Loaded, texts: Sequence[str], inputs_length: int, decoding: Decoding) -> Predictor:
    """Returns a predictor for the texts, over the mesh of the variables."""
    if isinstance(texts, str):
        raise TypeError("texts is one string, which is a sequence of letters; pass [text]")
    model, variables, vocabulary = loaded
    if inputs_length:
        _check_length("inputs_length", inputs_length, vocabulary)
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
