"""Comparison of a model's logits with those of transformers, where it is installed."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.files import is_installed
from synthesizer_jax.inference.encoding import encode_tokens
from synthesizer_jax.messages import one_line_error
from synthesizer_jax.models import Encoder, EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables, apply_method
from synthesizer_jax.pretrained.huggingface.config import CLASSES, CONFIG
from synthesizer_jax.pretrained.huggingface.json_files import Fields

TOLERANCE = 1e-5
"""Largest accepted deviation, as a share of the largest logit."""

LIBRARIES = ("transformers", "torch")


def can_compare(wanted: bool | None) -> bool:
    """Whether to compare with transformers.

    Args:
      wanted: None is if it is installed.

    Raises:
      ValueError: it is wanted, but not installed.
    """
    missing = [name for name in LIBRARIES if not is_installed(name)]
    if wanted and missing:
        raise ValueError(f"--check needs {' and '.join(missing)}; install them, or leave it out")
    return not missing and wanted is not False


def check_logits(
    folder: pathlib.Path, model: TokenModel, variables: Variables, *, required: bool
) -> str:
    """Compares logits, or an encoder's states, of two random examples with those of transformers.

    Args:
      folder: a folder of transformers with the same model.
      model: our model.
      variables: its variables.
      required: whether a deviation of more than `TOLERANCE` is an error.

    Returns:
      A sentence with the largest deviation, or why transformers did not load the folder.

    Raises:
      ValueError: the deviation is too large, or nothing could be compared.
    """
    import transformers

    try:
        reference = _load_reference(folder, model)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        sentence = (
            f"not compared with transformers {transformers.__version__}: {one_line_error(error)}"
        )
        if required:
            raise ValueError(sentence) from None
        return sentence

    rng = np.random.default_rng(0)
    inputs = rng.integers(2, model.vocab_size, (2, 12))
    inputs[1, 7:] = 0
    targets = rng.integers(2, model.vocab_size, (2, 9))
    targets[:, 0] = 0
    ours = np.asarray(_outputs(model, variables, inputs, targets), np.float32)
    theirs = _reference_outputs(reference, inputs, targets)
    real = inputs != 0 if isinstance(model, Encoder) else np.ones(targets.shape, bool)
    deviation = np.abs(ours - theirs)[real].max() / np.abs(theirs[real]).max()
    kind = "states" if isinstance(model, Encoder) else "logits"
    sentence = (
        f"largest deviation from the {kind} of transformers {transformers.__version__}: "
        f"{deviation:.1e} of the largest"
    )
    if required and not deviation <= TOLERANCE:
        raise ValueError(f"{sentence}; --check accepts {TOLERANCE}")
    return sentence


def _outputs(
    model: TokenModel, variables: Variables, inputs: np.ndarray, targets: np.ndarray
) -> jax.Array:
    """Returns our logits, or an encoder's states."""
    tokens = jnp.asarray(inputs, jnp.int32)
    if isinstance(model, Encoder):
        return encode_tokens(variables, tokens, model=model)
    assert isinstance(model, EncoderDecoder)
    return apply_method(model.__call__, variables, tokens, jnp.asarray(targets, jnp.int32))


def _load_reference(folder: pathlib.Path, model: TokenModel) -> Any:
    """Loads a folder with transformers."""
    import transformers

    family = Fields(folder / CONFIG).choice("model_type", CLASSES, "t5")
    kind = "EncoderModel" if isinstance(model, Encoder) else "ForConditionalGeneration"
    cls: Any = getattr(transformers, f"{CLASSES[family]}{kind}")
    reference = cls.from_pretrained(str(folder), local_files_only=True).float().eval()
    if family == "umt5" and not model.tied:
        # Version 5 scales the outputs as if the embedding were the output projection.
        reference.config.tie_word_embeddings = False
    return reference


def _reference_outputs(reference: Any, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns transformers' logits, or an encoder's states."""
    import torch

    arguments = {
        "input_ids": torch.as_tensor(inputs),
        "attention_mask": torch.as_tensor(inputs != 0),
    }
    with torch.no_grad():
        if type(reference).__name__.endswith("EncoderModel"):
            found = reference(**arguments).last_hidden_state
        else:
            found = reference(decoder_input_ids=torch.as_tensor(targets), **arguments).logits
    array: np.ndarray = found.numpy()
    return array
