"""Makes T5Gemma's files, and implements its blocks in NumPy after their public definition."""

from __future__ import annotations

import io
import json
import pathlib
from typing import Any

import numpy as np
import sentencepiece
from safetensors.numpy import save_file

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"

VOCAB_SIZE = 600
MADLAD = {
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "vocab_size": VOCAB_SIZE,
}
"""The ids of MADLAD-400, which is a T5 1.1."""
CODET5 = {
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "vocab_size": VOCAB_SIZE,
}
"""The ids of CodeT5, which is a T5 1.0."""

_SMALL: dict[str, Any] = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "vocab_size": VOCAB_SIZE,
}
_SMALL |= {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 6}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 10}
_SMALL |= {"sliding_window": 3, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
_SMALL |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_SMALL |= {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "rope_theta": 100.0}
_SCALED = _SMALL | {
    "rope_parameters": _SMALL["rope_parameters"] | {"rope_type": "linear", "factor": 4.0}
}
_LARGE = {name: value for name, value in _SMALL.items() if name != "rope_parameters"}
_LARGE["rope_scaling"] = {"rope_type": "linear", "factor": 3.0}  # as in version 4 of transformers
_LARGE |= {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "balanced": {"encoder": _SMALL, "decoder": _SMALL, "vocab_size": VOCAB_SIZE},
    "unbalanced": {"encoder": _LARGE, "decoder": _SCALED, "vocab_size": VOCAB_SIZE},
}
CONFIGS["unbalanced"]["tie_word_embeddings"] = False


def write_tokenizer(folder: pathlib.Path, *, gemma: bool = True) -> None:
    """Writes a small tokenizer with the special ids of Gemma or of MADLAD.

    MADLAD's special ids are 0 for unknown tokens, 1 for padding and 2 for EOS.
    """
    options: dict[str, Any] = {"normalization_rule_name": "identity", "byte_fallback": True}
    fields = {"tokenizer_class": "T5Tokenizer", "pad_token": "<s>", "extra_ids": 0}
    file = "spiece.model"
    if gemma:
        options |= {"model_type": "bpe", "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
        options |= {
            "eos_piece": "<eos>",
            "bos_piece": "<bos>",
            "user_defined_symbols": ["<mask>", "\n"],
        }
        options |= {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
        fields = {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}
        file = "tokenizer.model"
    model = io.BytesIO()
    texts = (DOCS / "training.md").read_text(encoding="utf-8").splitlines()
    options |= {"vocab_size": VOCAB_SIZE, "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, **options
    )
    (folder / file).write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))


def make_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns random tensors with the names of ``T5GemmaForConditionalGeneration``."""
    rng = np.random.default_rng(0)
    tensors = {}

    def add(name: str, *shape: int) -> None:
        scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        tensors[f"{name}.weight"] = rng.normal(0.0, scale, shape).astype(np.float32)

    for stack in ("encoder", "decoder"):
        c = config[stack]
        d, q, kv = (c[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        q, kv = q * c["head_dim"], kv * c["head_dim"]
        add(f"model.{stack}.embed_tokens", c["vocab_size"], d)
        add(f"model.{stack}.norm", d)
        for i in range(c["num_hidden_layers"]):
            layer = f"model.{stack}.layers.{i}"
            for mixer in ("self_attn", "cross_attn")[: 1 + (stack == "decoder")]:
                memory = d if mixer == "self_attn" else config["encoder"]["hidden_size"]
                for part, shape in (
                    ("q", (q, d)),
                    ("k", (kv, memory)),
                    ("v", (kv, memory)),
                    ("o", (d, q)),
                ):
                    add(f"{layer}.{mixer}.{part}_proj", *shape)
                add(f"{layer}.pre_{mixer}_layernorm", d)
                add(f"{layer}.post_{mixer}_layernorm", d)
            for part in ("gate", "up"):
                add(f"{layer}.mlp.{part}_proj", c["intermediate_size"], d)
            add(f"{layer}.mlp.down_proj", d, c["intermediate_size"])
            add(f"{layer}.pre_feedforward_layernorm", d)
            add(f"{layer}.post_feedforward_layernorm", d)
    if not config.get("tie_word_embeddings", True):
        add("lm_head.out_proj", c["vocab_size"], d)
    return tensors


def make_folder(folder: pathlib.Path, config: dict, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    """Writes ``config.json``, safetensors and a tokenizer, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5gemma", **config}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def logits(config: dict, tensors: dict, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the logits of ``T5GemmaForConditionalGeneration`` for two sequences.

    The inputs are ``[k]``, and the targets are ``[q]``.
    """
    w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w[name])

    def rotate(x: np.ndarray, base: float, factor: float) -> np.ndarray:
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[1])[:, None] / factor * base ** (-np.arange(half) / half)
        a = x[..., :half]
        b = x[..., half:]
        cos = np.cos(angle)
        sin = np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(
        c: dict, x: np.ndarray, memory: np.ndarray, name: str, seen: np.ndarray
    ) -> np.ndarray:
        def heads(y: np.ndarray, part: str) -> np.ndarray:
            y = (
                (y @ w[f"{name}.{part}_proj"].T)
                .reshape(len(y), -1, c["head_dim"])
                .transpose(1, 0, 2)
            )
            return np.repeat(y, c["num_attention_heads"] // len(y), axis=0)

        q, k, v = heads(x, "q"), heads(memory, "k"), heads(memory, "v")
        if name.endswith("self_attn"):
            base = c["rope_theta"]
            rope = c.get("rope_scaling") or c["rope_parameters"]
            q, k = (rotate(x, base, rope.get("factor", 1.0)) for x in (q, k))
        scores = q @ k.transpose(0, 2, 1) * c["query_pre_attn_scalar"] ** -0.5
        cap = 2.0
        scores = np.where(seen, np.exp(cap * np.tanh(scores / cap)), 0.0)
        y = scores / scores.sum(-1, keepdims=True) @ v
        return y.transpose(1, 0, 2).reshape(len(x), -1) @ w[f"{name}.o_proj"].T

    def feed_forward(x: np.ndarray, name: str) -> np.ndarray:
        h = x @ w[f"{name}.gate_proj"].T
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        return (h * (x @ w[f"{name}.up_proj"].T)) @ w[f"{name}.down_proj"].T

    def stack(tokens: np.ndarray, name: str, memory: np.ndarray | None) -> np.ndarray:
        c = config[name]
        x = w[f"model.{name}.embed_tokens"][tokens] * np.sqrt(c["hidden_size"])
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        for i in range(c["num_hidden_layers"]):
            layer = f"model.{name}.layers.{i}"
            window = c["sliding_window"] if i % 2 == 0 else len(x)
            seen = (
                abs(distance) <= window if memory is None else (distance >= 0) & (distance < window)
            )

            def add(x: np.ndarray, part: str, function: Any, layer: str = layer) -> np.ndarray:
                y = function(norm(x, f"{layer}.pre_{part}_layernorm"))
                return x + norm(y, f"{layer}.post_{part}_layernorm")

            mixer = f"{layer}.self_attn"
            x = add(x, "self_attn", lambda h, c=c, m=mixer, s=seen: attend(c, h, h, m, s))
            if memory is not None:
                mixer = f"{layer}.cross_attn"
                seen = np.ones((1, len(memory)), bool)
                x = add(x, "cross_attn", lambda h, c=c, m=mixer, s=seen: attend(c, h, memory, m, s))
            x = add(x, "feedforward", lambda h, m=f"{layer}.mlp": feed_forward(h, m))
        return norm(x, f"model.{name}.norm")

    hidden = stack(targets, "decoder", stack(inputs, "encoder", None))
    output = w.get("lm_head.out_proj", w["model.decoder.embed_tokens"])
    return 3.0 * np.tanh(hidden @ output.T / 3.0)
