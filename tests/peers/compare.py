"""Comparison of a model's logits with those of transformers."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from synthesizer_jax.inference import encode_tokens
from synthesizer_jax.models import Encoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.opening import open_pretrained, read_params
from synthesizer_jax.primitives.parameters import Variables, apply_method

TOLERANCE = 1e-5
"""Largest accepted deviation, as a share of the largest logit."""

CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}


def check_folder(folder: pathlib.Path) -> None:
    """Compares what this package reads from a folder with what transformers does."""
    with open_pretrained(folder) as pretrained:
        check_logits(folder, pretrained.model, {"params": read_params(pretrained)})


def check_logits(folder: pathlib.Path, model: TokenModel, variables: Variables) -> None:
    """Compares logits, or an encoder's states, of two random examples with those of transformers."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(2, model.vocab_size, (2, 12))
    inputs[1, 7:] = 0
    targets = rng.integers(2, model.vocab_size, (2, 9))
    targets[:, 0] = 0
    tokens = jnp.asarray(inputs, jnp.int32)
    if isinstance(model, Encoder):
        ours = encode_tokens(variables, tokens, model=model)
    else:
        ours = apply_method(model.__call__, variables, tokens, jnp.asarray(targets, jnp.int32))
    theirs = _reference_outputs(_load_reference(folder, model), inputs, targets)
    real = inputs != 0 if isinstance(model, Encoder) else np.ones(targets.shape, bool)
    deviation = np.abs(np.asarray(ours, np.float32) - theirs)[real].max()
    assert deviation <= TOLERANCE * np.abs(theirs[real]).max()


def _load_reference(folder: pathlib.Path, model: TokenModel) -> Any:
    family = json.loads((folder / "config.json").read_text()).get("model_type", "t5")
    kind = "EncoderModel" if isinstance(model, Encoder) else "ForConditionalGeneration"
    cls: Any = getattr(transformers, f"{CLASSES[family]}{kind}")
    reference = cls.from_pretrained(str(folder), local_files_only=True).float().eval()
    if family == "umt5" and not model.tied:
        # Version 5 scales the outputs as if the embedding were the output projection.
        reference.config.tie_word_embeddings = False
    return reference


def _reference_outputs(reference: Any, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    arguments = {
        "input_ids": torch.as_tensor(inputs),
        "attention_mask": torch.as_tensor(inputs != 0),
    }
    with torch.no_grad():
        if type(reference).__name__.endswith("EncoderModel"):
            return reference(**arguments).last_hidden_state.numpy()
        return reference(decoder_input_ids=torch.as_tensor(targets), **arguments).logits.numpy()
