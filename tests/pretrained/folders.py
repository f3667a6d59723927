"""Makes folders like those of transformers with random numbers, and computes a T5's outputs.

The names of tensors and the computation follow transformers' T5. The code uses NumPy with float64,
and is independent of the package.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

TINY: dict[str, Any] = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
TINY |= {"vocab_size": 384, "d_model": 20, "d_kv": 6, "d_ff": 28, "num_heads": 3}
TINY |= {"num_layers": 2, "num_decoder_layers": 2, "is_encoder_decoder": True}
TINY |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
TINY |= {"dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu"}
TINY |= {
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
UNTIED = {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
FAMILIES: dict[str, dict[str, Any]] = {
    "T5 1.0": {},
    "T5 1.1, FLAN-T5": UNTIED,
    "mT5": UNTIED | {"model_type": "mt5"},
    "umT5": UNTIED | {"model_type": "umt5"},
    "ByT5": UNTIED | {"model_type": "t5", "num_layers": 3, "num_decoder_layers": 1},
    "UL2": {"tie_word_embeddings": False, "feed_forward_proj": "gated-silu"},
    "efficient": {"d_kv": 10, "num_heads": 5, "num_layers": 1},
}


def make_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors that have the names of transformers' tensors."""
    rng = np.random.default_rng(seed)
    tensors = {}
    d = config["d_model"]
    inner = config["num_heads"] * config["d_kv"]
    ff = config["d_ff"]

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        scale = 0.3 if len(shape) == 1 else 1.0 / math.sqrt(shape[-1])
        tensors[f"{name}.weight"] = rng.normal(mean, scale, shape).astype(np.float32)

    def attention(name: str, bias: bool) -> None:
        for part in "qkv":
            add(f"{name}.{part}", inner, d)
        add(f"{name}.o", d, inner)
        if bias:
            buckets = config["relative_attention_num_buckets"]
            add(f"{name}.relative_attention_bias", buckets, config["num_heads"])

    def stack(name: str, layers: int) -> None:
        gated = config["feed_forward_proj"].startswith("gated")
        for i in range(layers):
            block = f"{name}.block.{i}"
            last = 1 if name == "encoder" else 2
            own_bias = i == 0 or config["model_type"] == "umt5"
            attention(f"{block}.layer.0.SelfAttention", own_bias)
            if name == "decoder":
                attention(f"{block}.layer.1.EncDecAttention", False)
            for part in ("wi_0", "wi_1") if gated else ("wi",):
                add(f"{block}.layer.{last}.DenseReluDense.{part}", ff, d)
            add(f"{block}.layer.{last}.DenseReluDense.wo", d, ff)
            for layer in range(last + 1):
                add(f"{block}.layer.{layer}.layer_norm", d, mean=1.0)
        add(f"{name}.final_layer_norm", d, mean=1.0)

    add("shared", config["vocab_size"], d)
    stack("encoder", config["num_layers"])
    stack("decoder", config["num_decoder_layers"])
    if not config["tie_word_embeddings"]:
        add("lm_head", config["vocab_size"], d)
    return tensors


def make_folder(
    folder: pathlib.Path,
    config: dict,
    tensors: dict,
    *,
    shards=1,
    dtype: Any = np.float32,
    variant=None,
):
    """Writes ``config.json``, safetensors and ByT5's tokenizer, and returns the folder.

    The files of a variant are named as by transformers' ``save_pretrained(folder,
    variant=variant)``.
    """
    dotted = "" if variant is None else f".{variant}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    floats = {name: x.astype(dtype) for name, x in tensors.items() if x.dtype.kind == "f"}
    tensors = tensors | floats
    if shards == 1:
        save_file(tensors, folder / f"model{dotted}.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model{dotted}-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"model.safetensors.index{dotted}.json").write_text(json.dumps(index))
    return folder


def rounded(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the tensors after a round trip through bfloat16."""
    return {n: x.astype(ml_dtypes.bfloat16).astype(np.float32) for n, x in tensors.items()}


def logits(config: dict, tensors: dict, inputs: np.ndarray, targets, *, real=None) -> np.ndarray:
    """Returns the logits of ``T5ForConditionalGeneration`` for inputs ``[k]`` and targets ``[q]``.

    Without targets, the function returns the states of the encoder. In the encoder, all tokens see
    the first `real` tokens, or all tokens if `real` is None.
    """
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    heads, width = config["num_heads"], config["d_kv"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        variance = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(variance + config["layer_norm_epsilon"]) * w[f"{name}.weight"]

    def split(x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), heads, width).transpose(1, 0, 2)

    def attend(x: np.ndarray, memory: np.ndarray, name: str, bias: np.ndarray) -> np.ndarray:
        def project(y, part):
            """Projects tokens, and divides the result into heads."""
            return split(y @ w[f"{name}.{part}.weight"].T)

        q, k, v = project(x, "q"), project(memory, "k"), project(memory, "v")
        scores = q @ k.transpose(0, 2, 1) + bias
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        weights = scores / scores.sum(-1, keepdims=True)
        return (weights @ v).transpose(1, 0, 2).reshape(len(x), -1) @ w[f"{name}.o.weight"].T

    def feed_forward(x: np.ndarray, name: str) -> np.ndarray:
        kind = config["feed_forward_proj"].removeprefix("gated-")
        act = {
            "relu": lambda h: np.maximum(h, 0),
            "gelu": lambda h: 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))),
            "silu": lambda h: h / (1 + np.exp(-h)),
        }[kind]
        if kind != config["feed_forward_proj"]:
            hidden = act(x @ w[f"{name}.wi_0.weight"].T) * (x @ w[f"{name}.wi_1.weight"].T)
        else:
            hidden = act(x @ w[f"{name}.wi.weight"].T)
        return hidden @ w[f"{name}.wo.weight"].T

    def stack(x: np.ndarray, name: str, memory: np.ndarray | None) -> np.ndarray:
        causal = memory is not None
        n = len(x)
        layers = config["num_decoder_layers" if causal else "num_layers"]
        mask = np.where(np.tri(n) > 0, 0.0, -np.inf) if causal else seen
        for i in range(layers):
            block = f"{name}.block.{i}"
            source = i if config["model_type"] == "umt5" else 0
            table = w[f"{name}.block.{source}.layer.0.SelfAttention.relative_attention_bias.weight"]
            bias = table[buckets(n, config, causal)].transpose(2, 0, 1) + mask
            h = norm(x, f"{block}.layer.0.layer_norm")
            x = x + attend(h, h, f"{block}.layer.0.SelfAttention", bias)
            last = 1
            if memory is not None:
                h = norm(x, f"{block}.layer.1.layer_norm")
                last = 2
                x = x + attend(h, memory, f"{block}.layer.1.EncDecAttention", np.zeros(()))
            h = norm(x, f"{block}.layer.{last}.layer_norm")
            x = x + feed_forward(h, f"{block}.layer.{last}.DenseReluDense")
        return norm(x, f"{name}.final_layer_norm")

    seen = np.where(np.arange(len(inputs)) < (real or len(inputs)), 0.0, -np.inf)[None]
    memory = stack(w["shared.weight"][inputs], "encoder", None)
    if targets is None:
        return memory
    hidden = stack(w["shared.weight"][targets], "decoder", memory)
    if config["tie_word_embeddings"]:
        return hidden * config["d_model"] ** -0.5 @ w["shared.weight"].T
    return hidden @ w["lm_head.weight"].T


INPUTS = np.array([[7, 300, 12, 5, 9, 44, 8, 21, 3, 1]])
TARGETS = np.array([[0, 15, 220, 3, 18, 2]])


def deviation(
    model: Any, variables: Any, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> float:
    """Returns how much a model's logits deviate, divided by the largest expected logit."""
    found = jax.jit(model.apply)(variables, INPUTS, TARGETS)[0]
    expected = logits(config, tensors, INPUTS[0], TARGETS[0])
    return np.abs(found - expected).max() / np.abs(expected).max()


def buckets(n: int, config: dict[str, Any], causal: bool) -> np.ndarray:
    """Returns T5's buckets for all pairs ``[q, k]`` (Raffel et al. 2020, section 2.1)."""
    found = np.zeros((n, n), int)
    for q in range(n):
        for k in range(n):
            count = config["relative_attention_num_buckets"]
            distance = k - q
            first = 0
            if causal:
                distance = max(-distance, 0)
            else:
                count //= 2
                first = count if distance > 0 else 0
                distance = abs(distance)
            exact = count // 2
            if distance < exact:
                found[q, k] = first + distance
            else:
                far = config["relative_attention_max_distance"] / exact
                log = math.log(distance / exact) / math.log(far) * (count - exact)
                found[q, k] = first + min(exact + int(log), count - 1)
    return found
