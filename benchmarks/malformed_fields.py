"""The allowed values of an experiment's fields, according to `docs/recipes.md` and the docstrings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

Rule = Callable[[Any], bool]

MAX_INT = 2**31 - 1


def integer(low: int, high: int = MAX_INT, *, without: tuple[int, ...] = ()) -> Rule:
    """Integers in a range."""
    return lambda v: type(v) is int and low <= v <= high and v not in without


def number(low: float, high: float = math.inf, *, exclude: str = "") -> Rule:
    """Finite numbers in a range; `exclude` names the ends that are not part of it."""

    def check(v: Any) -> bool:
        if type(v) not in (int, float) or not math.isfinite(v):
            return False
        return low <= v <= high and not (
            ("low" in exclude and v == low) or ("high" in exclude and v == high)
        )

    return check


def one_of(*choices: str) -> Rule:
    """One of several strings."""
    return lambda v: type(v) is str and v in choices


def optional(*rules: Rule) -> Rule:
    """None, or a value that one of the rules allows."""
    return lambda v: v is None or any(check(v) for check in rules)


def list_of(check: Rule, least: int = 0) -> Rule:
    """Lists whose entries a rule allows."""
    return lambda v: isinstance(v, list) and len(v) >= least and all(map(check, v))


def boolean(value: Any) -> bool:
    """Booleans."""
    return type(value) is bool


def string(value: Any) -> bool:
    """Strings."""
    return type(value) is str


def pattern(value: Any) -> bool:
    """Regular expressions."""
    try:
        return string(value) and re.compile(value) is not None
    except re.error:
        return False


def instance(*names: str) -> Rule:
    """Objects of one of several classes with valid fields."""
    return lambda v: isinstance(v, dict) and v.get("type") in names and wrong_field(v) is None


COUNT, NUMBER = integer(1), integer(0)
AXIS = integer(-1, without=(0,))
NOT_NEGATIVE, POSITIVE = number(0), number(0, exclude="low")
INIT = instance("Normal", "FanIn", "GlorotUniform", "Zeros")
NORM = instance("RMSNorm", "LayerNorm")
MIXER = instance(
    *("Attention", "FeedForward", "TalkingHeads", "Linformer", "SentenceFeedForward"),
    *("LightweightConvolution", "DynamicConvolution", "FourierMixer", "ConvolutionMixer"),
)
ALIGNMENT = instance(
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
    **dict.fromkeys(["max_segments", "max_examples"], optional(COUNT)),
    **dict.fromkeys(
        ["keep_best", "every", "loss_batches", "fit_batches", "warmup_steps", "extra_ids"], NUMBER
    ),
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
    "extra": list_of(lambda v: isinstance(v, list) and len(v) == 2 and string(v[0]) and AXIS(v[1])),
    "head_dim": optional(COUNT),
    "Attention.head_dim": COUNT,
    "SentenceFeedForward.head_dim": NUMBER,
    "SentenceFeedForward.num_heads": optional(COUNT),
    "seed": integer(0, 2**32 - 1),
    "label_smoothing": number(0, 1),
    **dict.fromkeys(["dropout_rate", "b1", "b2"], number(0, 1, exclude="high")),
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
    **dict.fromkeys(["clip", "clip_norm"], optional(POSITIVE)),
    "embedding_scale": number(-math.inf),
    **dict.fromkeys(["logits_scale", "scale"], optional(number(-math.inf))),
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
            "frozen",
            "init_optimizer",
        ],
        boolean,
    ),
    **dict.fromkeys(["mixture", "split", "path"], string),
    "init_from": optional(string),
    "init_rules": list_of(instance("InitRule")),
    "init_share": number(0, 1),
    "rules": list_of(instance("OptimizerRule")),
    "pattern": pattern,
    "source": optional(string),
    "action": one_of("restore", "resize", "fresh"),
    "fill": one_of("edge", "distance", "fresh"),
    "OptimizerRule.learning_rate": NOT_NEGATIVE,
    "OptimizerRule.weight_decay": optional(NOT_NEGATIVE),
    "ema": optional(number(0, 1, exclude="high")),
    "patience": optional(COUNT),
    "min_improvement": NOT_NEGATIVE,
    "loss_normalizer": optional(POSITIVE, one_of("tokens_with_padding")),
    "method": one_of("rank", "greedy", "beam"),
    "logits_dtype": optional(one_of("float32", "bfloat16")),
    "dtype": one_of("float32", "bfloat16"),
    "weights": one_of("softmax", "sigmoid", "sum"),
    "implementation": one_of("auto", "static", "fused", "banded", "cudnn", "reference"),
    "remat": optional(one_of("full", "dots", "dots_with_no_batch_dims")),
    "activations": list_of(one_of("relu", "gelu", "silu", "linear"), 1),
    "place": one_of("encoder", "decoder", "cross"),
    "scope": one_of("mixer", "sublayer", "layer"),
    "layers": optional(list_of(NUMBER)),
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
    **dict.fromkeys(["norm", "input_norm"], optional(NORM)),
    "Block.norm": NORM,
    "bias": optional(instance("RelativeBias", "GaussianBias")),
    "positions": optional(instance("SinusoidalPositions", "LearnedPositions", "PositionEmbedding")),
    "self_mixer": MIXER,
    "by": lambda v: MIXER(v) or ALIGNMENT(v),
    "rank": COUNT,
    "offsets": list_of(number(-math.inf), 1),
    "sigma": POSITIVE,
    "cross_mixer": optional(MIXER),
    "feed_forward": optional(instance("FeedForward")),
    "alignment": ALIGNMENT,
    "parts": list_of(ALIGNMENT, 1),
    "block": instance("Block"),
    "runs": list_of(instance("Run"), 1),
    **dict.fromkeys(["encoder", "decoder"], instance("Stack")),
    "model": instance("EncoderDecoder", "LanguageModel"),
    "data": instance("DataConfig"),
    **dict.fromkeys(["training"], instance("Training")),
    "fine_tune": optional(instance("Training")),
    "evaluation": optional(instance("Evaluation")),
    "vocabulary": optional(instance("Bytes", "SentencePiece")),
    "mesh": instance("MeshShape"),
    "optimizer": instance("AdamW", "Adafactor"),
    "learning_rate": instance("Constant", "Cosine", "InverseSquareRoot", "Linear"),
    "replace": list_of(instance("Replacement"), 1),
}
"""The rules by the field's name, or by class and name."""

FLAX_FIELDS = {"name", "parent"}
"""Additional fields of Flax modules."""


def rule_of(cls: str, name: str) -> Rule | None:
    """The rule of a field; None if there is no such field."""
    return RULES.get(f"{cls}.{name}", RULES.get(name))


def wrong_field(obj: dict[str, Any]) -> str | None:
    """Describes the first invalid field of an object; None if all are valid."""
    for name, value in obj.items():
        if name == "type":
            continue
        check = rule_of(str(obj.get("type")), name)
        if check is None and value is not None:
            return f"the unknown field {name}"
        if check is not None and not check(value):
            inner = wrong_field(value) if isinstance(value, dict) else None
            return f"{name}.{inner}" if inner else f"{name} of {str(value)[:60]}"
    return None
