"""What the fields of an experiment may hold, as `docs/recipes.md` and the docstrings say it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Rule = Callable[[Any], bool]

MOST = 2**31 - 1


def whole(low: int, high: int = MOST, *, without: tuple[int, ...] = ()) -> Rule:
    """Integers of a range."""
    return lambda v: type(v) is int and low <= v <= high and v not in without


def real(low: float, high: float = math.inf, *, opened: str = "") -> Rule:
    """Finite numbers of a range, of which `opened` names ends that do not belong to it."""

    def rule(v: Any) -> bool:
        if type(v) not in (int, float) or not math.isfinite(v):
            return False
        return low <= v <= high and not (
            ("low" in opened and v == low) or ("high" in opened and v == high)
        )

    return rule


def word(*words: str) -> Rule:
    """One of some words."""
    return lambda v: type(v) is str and v in words


def maybe(*rules: Rule) -> Rule:
    """Nothing, or what one of the rules allows."""
    return lambda v: v is None or any(rule(v) for rule in rules)


def several(rule: Rule, least: int = 0) -> Rule:
    """A list."""
    return lambda v: isinstance(v, list) and len(v) >= least and all(map(rule, v))


def flag(value: Any) -> bool:
    """True or false."""
    return type(value) is bool


def text(value: Any) -> bool:
    """Any text."""
    return type(value) is str


def thing(*names: str) -> Rule:
    """An object of one of some classes, all of whose fields are right."""
    return lambda v: isinstance(v, dict) and v.get("type") in names and wrong_field(v) is None


COUNT, NUMBER = whole(1), whole(0)
AXIS = whole(-1, without=(0,))
NOT_NEGATIVE, POSITIVE = real(0), real(0, opened="low")
INIT = thing("Normal", "FanIn", "GlorotUniform", "Zeros")
NORM = thing("RMSNorm", "LayerNorm")
MIXER = thing(
    *("Attention", "FeedForward", "TalkingHeads", "Linformer", "SentenceFeedForward"),
    *("LightweightConvolution", "DynamicConvolution", "FourierMixer", "ConvolutionMixer"),
)
ALIGNMENT = thing(
    *("DotProduct", "Random", "FactorizedRandom", "Dense", "FactorizedDense", "Mixture"),
    *("Bilinear", "GaussianBias", "RelativeBias", "PerHead"),
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(
        [
            "steps",
            "micro_batches",
            "log_every",
            "save_every",
            "keep_latest",
            "total_steps",
            "batch_size",
            "inputs_length",
            "targets_length",
            "shards",
            "vocab_size",
            "d_model",
            "num_heads",
            "hidden_dim",
            "repeats",
            "max_length",
            "num_buckets",
            "max_distance",
            "min_size",
        ],
        COUNT,
    ),
    **dict.fromkeys(["max_segments", "max_examples"], maybe(COUNT)),
    **dict.fromkeys(["keep_best", "every", "loss_batches", "warmup_steps", "extra_ids"], NUMBER),
    **dict.fromkeys(
        [
            "fsdp",
            "tensor",
            "sequence",
            "dcn_data",
            "dcn_fsdp",
            "dcn_tensor",
            "dcn_sequence",
            "MeshShape.data",
        ],
        AXIS,
    ),
    "head_dim": maybe(COUNT),
    "Attention.head_dim": COUNT,
    "SentenceFeedForward.head_dim": NUMBER,
    "SentenceFeedForward.num_heads": maybe(COUNT),
    "seed": whole(0, 2**32 - 1),
    "label_smoothing": real(0, 1),
    **dict.fromkeys(["dropout_rate", "b1", "b2"], real(0, 1, opened="high")),
    **dict.fromkeys(
        [
            "z_loss",
            "watchdog_seconds",
            "weight_decay",
            "value",
            "peak",
            "final",
            "stddev",
            "FanIn.scale",
        ],
        NOT_NEGATIVE,
    ),
    **dict.fromkeys(["eps", "epsilon", "decay_rate"], POSITIVE),
    **dict.fromkeys(["clip", "clip_norm"], maybe(POSITIVE)),
    "embedding_scale": real(-math.inf),
    **dict.fromkeys(["logits_scale", "scale"], maybe(real(-math.inf))),
    **dict.fromkeys(
        [
            "pack",
            "shuffle",
            "tied",
            "trainable",
            "use_bias",
            "share_query",
            "shared_key_value",
            "project_values",
            "post_norm",
            "self_residual",
            "bidirectional",
            "scan",
            "drop_output",
            "parameter_scale",
            "separate_heads",
            "causal",
            "endpoint",
            "together",
        ],
        flag,
    ),
    **dict.fromkeys(["mixture", "split", "path"], text),
    "init_from": maybe(text),
    "loss_normalizer": maybe(POSITIVE, word("tokens_with_padding")),
    "method": word("rank", "greedy", "beam"),
    "logits_dtype": maybe(word("float32", "bfloat16")),
    "dtype": word("float32", "bfloat16"),
    "weights": word("softmax", "sigmoid", "sum"),
    "implementation": word("auto", "static", "fused", "banded", "cudnn", "reference"),
    "remat": maybe(word("full", "dots", "dots_with_no_batch_dims")),
    "activations": several(word("relu", "gelu", "silu", "linear"), 1),
    "place": word("encoder", "decoder", "cross"),
    "scope": word("mixer", "sublayer", "layer"),
    "layers": maybe(several(NUMBER)),
    **dict.fromkeys(
        [
            "embedding_init",
            "logits_init",
            "table_init",
            "query_init",
            "key_init",
            "value_init",
            "out_init",
            "kernel_init",
        ],
        INIT,
    ),
    **dict.fromkeys(["norm", "input_norm"], maybe(NORM)),
    "Block.norm": NORM,
    "bias": maybe(thing("RelativeBias", "GaussianBias")),
    "positions": maybe(thing("SinusoidalPositions", "LearnedPositions", "PositionEmbedding")),
    **dict.fromkeys(["self_mixer", "by"], MIXER),
    "cross_mixer": maybe(MIXER),
    "feed_forward": maybe(thing("FeedForward")),
    "alignment": ALIGNMENT,
    "parts": several(ALIGNMENT, 1),
    "block": thing("Block"),
    "runs": several(thing("Run"), 1),
    **dict.fromkeys(["encoder", "decoder"], thing("Stack")),
    "model": thing("EncoderDecoder", "LanguageModel"),
    "data": thing("DataConfig"),
    **dict.fromkeys(["training"], thing("Training")),
    "fine_tune": maybe(thing("Training")),
    "evaluation": maybe(thing("Evaluation")),
    "vocabulary": maybe(thing("Bytes", "SentencePiece")),
    "mesh": thing("MeshShape"),
    "optimizer": thing("AdamW", "Adafactor"),
    "learning_rate": thing("Constant", "Cosine", "InverseSquareRoot", "Linear"),
    "replace": several(thing("Replacement"), 1),
}
"""By name, or class and name."""

OLD = {"name", "parent"}
"""Fields that Flax' modules have besides."""


def rule_of(cls: str, name: str) -> Rule | None:
    """What a field may hold; None: there is no such field."""
    return RULES.get(f"{cls}.{name}", RULES.get(name))


def wrong_field(obj: dict[str, Any]) -> str | None:
    """The first field of an object that no rule allows."""
    for name, value in obj.items():
        if name == "type":
            continue
        rule = rule_of(str(obj.get("type")), name)
        if rule is None and value is not None:
            return f"the unknown field {name}"
        if rule is not None and not rule(value):
            inner = wrong_field(value) if isinstance(value, dict) else None
            return f"{name}.{inner}" if inner else f"{name} of {str(value)[:60]}"
    return None
