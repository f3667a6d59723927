"""Makes the files of a T5Gemma 2, and implements its public definition in NumPy."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.pretrained.gemma import VOCAB_SIZE, write_tokenizer

END_OF_IMAGE = 17

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "query_pre_attn_scalar": 10,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_use_head": False,
}
CONFIG: dict[str, Any] = {
    "model_type": "t5gemma2",
    "encoder": {
        "model_type": "t5gemma2_encoder",
        "text_config": TEXT | {"model_type": "t5gemma2_text"},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "eoi_token_index": END_OF_IMAGE,
    },
    "decoder": TEXT
    | {
        "model_type": "t5gemma2_decoder",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 3,
    },
    "is_encoder_decoder": True,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": 1,
}
"""A configuration whose stacks differ in everything that the format allows."""

IMAGES = {
    "model.encoder.vision_tower.embeddings.patch_embedding.weight": np.ones((8, 3, 4, 4), "f"),
    "model.encoder.multi_modal_projector.mm_soft_emb_norm.weight": np.ones(8, "f"),
}
"""Some of the tensors that only images need."""


def encoder_config() -> dict[str, Any]:
    """Returns the configuration of a folder that contains only the encoder."""
    return CONFIG["encoder"] | {"architectures": ["T5Gemma2Encoder"]}


def make_tensors() -> dict[str, np.ndarray]:
    """Returns random tensors with the names of ``T5Gemma2ForConditionalGeneration``.

    The tensors that only images need are in `IMAGES`.
    """
    rng = np.random.default_rng(0)
    tensors = {}

    def add(name: str, *shape: int) -> None:
        scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        tensors[name] = rng.normal(0.0, scale, shape).astype(np.float32)

    embedding = "model.encoder.embed_tokens"
    add(f"{embedding}.weight", VOCAB_SIZE, TEXT["hidden_size"])
    add(f"{embedding}.eoi_embedding", TEXT["hidden_size"])
    for stack, c in (
        ("model.encoder", CONFIG["encoder"]["text_config"]),
        ("model.decoder", CONFIG["decoder"]),
    ):
        d = c["hidden_size"]
        q, kv = (c["head_dim"] * c[f"num_{n}_heads"] for n in ("attention", "key_value"))
        add(f"{stack}.norm.weight", d)
        for i in range(c["num_hidden_layers"]):
            layer = f"{stack}.layers.{i}"
            for part, shape in (("q", (q, d)), ("k", (kv, d)), ("v", (kv, d)), ("o", (d, q))):
                add(f"{layer}.self_attn.{part}_proj.weight", *shape)
            for part in "qk":
                add(f"{layer}.self_attn.{part}_norm.weight", c["head_dim"])
            for part in ("gate", "up"):
                add(f"{layer}.mlp.{part}_proj.weight", c["intermediate_size"], d)
            add(f"{layer}.mlp.down_proj.weight", d, c["intermediate_size"])
            for part in ("self_attn", "feedforward"):
                add(f"{layer}.pre_{part}_layernorm.weight", d)
                add(f"{layer}.post_{part}_layernorm.weight", d)
    return tensors


def make_folder(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], config: dict[str, Any] = CONFIG
) -> pathlib.Path:
    """Writes ``config.json``, safetensors and a tokenizer, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def states(
    tensors: dict, tokens: np.ndarray, memory: np.ndarray | None = None, config: dict = CONFIG
) -> np.ndarray:
    """Returns the outputs of the encoder, or of the decoder if there is a memory.

    The tokens are ``[q]``, the memory is ``[k, d]``, and the result is ``[q, d]``.
    """
    w = {name: x.astype(np.float64) for name, x in tensors.items()}
    stack = "model.encoder" if memory is None else "model.decoder"
    c = config["encoder"]["text_config"] if memory is None else config["decoder"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (1 + w[f"{name}.weight"])

    def rotate(x: np.ndarray, base: float, factor: float) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[1])[:, None] / factor * base ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    def attend(x: np.ndarray, name: str, kind: str) -> np.ndarray:
        def heads(y: np.ndarray, part: str) -> np.ndarray:
            y = (y @ w[f"{name}.{part}_proj.weight"].T).reshape(len(y), -1, c["head_dim"])
            y = y.transpose(1, 0, 2)
            y = y if part == "v" else norm(y, f"{name}.{part}_norm")
            return np.repeat(y, c["num_attention_heads"] // len(y), axis=0)

        rope = c["rope_parameters"][kind]
        turn = rope["rope_theta"], rope.get("factor", 1.0)
        q, k, v = heads(x, "q"), heads(x, "k"), heads(x, "v")
        # The queries are rotated, but the keys of the memory are not.
        q = rotate(q, *turn)
        scores = q @ rotate(k, *turn).transpose(0, 2, 1)
        # A query at position i sees the key at position i - distance.
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        window = c["sliding_window"] if kind == "sliding_attention" else 2 * len(x) + 1
        if memory is None:
            seen = (distance < (window + 1) // 2) & (-distance < window // 2 + 1)
        else:
            seen = (distance >= 0) & (distance < window)
            scores = np.concatenate([scores, q @ heads(memory, "k").transpose(0, 2, 1)], -1)
            v = np.concatenate([v, heads(memory, "v")], 1)
            seen = np.concatenate([seen, np.ones((len(x), len(memory)), bool)], -1)
        scores = np.where(seen, np.exp(scores * c["query_pre_attn_scalar"] ** -0.5), 0.0)
        y = scores / scores.sum(-1, keepdims=True) @ v
        return y.transpose(1, 0, 2).reshape(len(x), -1) @ w[f"{name}.o_proj.weight"].T

    def feed_forward(x: np.ndarray, name: str) -> np.ndarray:
        h = x @ w[f"{name}.gate_proj.weight"].T
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        return (h * (x @ w[f"{name}.up_proj.weight"].T)) @ w[f"{name}.down_proj.weight"].T

    embedding = "model.encoder.embed_tokens"
    x = w[f"{embedding}.weight"][tokens] * np.sqrt(c["hidden_size"])
    x[tokens == END_OF_IMAGE] = w[f"{embedding}.eoi_embedding"]
    for i, kind in enumerate(c["layer_types"]):
        layer = f"{stack}.layers.{i}"
        y = attend(norm(x, f"{layer}.pre_self_attn_layernorm"), f"{layer}.self_attn", kind)
        x = x + norm(y, f"{layer}.post_self_attn_layernorm")
        y = feed_forward(norm(x, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
        x = x + norm(y, f"{layer}.post_feedforward_layernorm")
    return norm(x, f"{stack}.norm")


def logits(tensors: dict, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the logits of ``T5Gemma2ForConditionalGeneration`` for two sequences.

    The inputs are ``[k]``, and the targets are ``[q]``.
    """
    hidden = states(tensors, targets, states(tensors, inputs))
    return hidden @ tensors["model.encoder.embed_tokens.weight"].T
