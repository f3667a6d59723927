"""Defines the recipe of `combinations.py`, a tiny model of any kind with any mixer.

synthesizer-jax train benchmarks/combinations_run.py:default:prefix_lm:rv:rv:gated+bias --set …
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from synthesizer_jax.alignments import (
    ALiBi,
    Alignment,
    Bilinear,
    DotProduct,
    Gaussian,
    GaussianBias,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
)
from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.mixers import (
    Attention,
    DynamicConvolution,
    LightweightConvolution,
    Linformer,
    Mixer,
    SentenceFeedForward,
    TalkingHeads,
    TokenFeedForward,
)
from synthesizer_jax.models import (
    Encoder,
    LanguageModel,
    Run,
    Size,
    Stack,
    TextToText,
    alignment,
    t5,
)
from synthesizer_jax.models.layers import LearnedPositions, SinusoidalPositions
from synthesizer_jax.models.universal import UniversalStack
from synthesizer_jax.models.zoo import VARIANTS
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.sharding import register_mesh_axis
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

register_mesh_axis("expert", "mlp")

SIZE = Size(d_model=16, layers=2, d_ff=32, heads=4, head_dim=4)
POSITIONS = 72
"""The number of positions in tables, which includes the padding that `repadded` adds."""

VOCAB_SIZE = 384
INPUTS, TARGETS = 32, 16
BATCH = 16
CLASSES = ("bad", "good")


def _heads(**options: object) -> Callable[[bool], Mixer]:
    """Returns a function that makes a causal or bidirectional `Attention` with some options."""
    return lambda causal: Attention(SIZE.heads, SIZE.head_dim, **options)  # type: ignore[arg-type]


def _talking(**options: object) -> Callable[[bool], Mixer]:
    """Returns a function that makes causal or bidirectional `TalkingHeads` with some options."""
    heads, head_dim = SIZE.heads, SIZE.head_dim
    return lambda causal: TalkingHeads(heads, head_dim, **options)  # type: ignore[arg-type]


_dot = functools.partial(DotProduct, parent=None)

MIXERS: dict[str, Callable[[bool], Alignment | Mixer]] = {
    **{
        name: lambda causal, name=name: alignment(
            name, head_dim=SIZE.head_dim, max_length=POSITIONS
        )
        for name in VARIANTS
    },
    "gaussian": lambda causal: Gaussian(offsets=(-1, 0) if causal else (-1, 1)),
    "gaussian_bias": lambda causal: Mixture(
        (DotProduct(), GaussianBias(trainable=True)), weights="sum"
    ),
    "alibi": lambda causal: Mixture((DotProduct(), ALiBi()), weights="sum"),
    "bilinear": lambda causal: Bilinear(),
    "rotary": lambda causal: DotProduct(rotary_base=10_000.0),
    "normalized": lambda causal: DotProduct(normalize_qk=True, use_bias=True),
    "per_head": lambda causal: PerHead((DotProduct(), Random(max_length=POSITIONS))),
    "sigmoid": lambda causal: Mixture(
        (DotProduct(), Random(max_length=POSITIONS)), weights="sigmoid"
    ),
    "window": _heads(alignment=_dot(), window=4),
    "window_r": _heads(alignment=Random(max_length=POSITIONS, parent=None), window=4),
    "grouped": _heads(alignment=_dot(), num_kv_heads=2),
    "soft_cap": _heads(alignment=_dot(), soft_cap=5.0),
    "sinks": _heads(alignment=_dot(), sinks=True),
    "shared_key_value": _heads(alignment=_dot(), shared_key_value=True),
    "no_values": _heads(alignment=_dot(), project_values=False),
    "biased": _heads(alignment=_dot(), use_bias=True, dropout_rate=0.0),
    "talking": _talking(alignment=_dot()),
    "talking_r": _talking(alignment=Random(max_length=POSITIONS, parent=None)),
    "linformer": lambda causal: Linformer(
        SIZE.heads, SIZE.head_dim, max_length=POSITIONS, projected_length=8
    ),
    "lightweight": lambda causal: LightweightConvolution(width=3),
    "dynamic": lambda causal: DynamicConvolution(width=3, groups=4),
    "sentence": lambda causal: SentenceFeedForward(
        POSITIONS, SIZE.d_ff, SIZE.heads, SIZE.head_dim, causal=causal
    ),
    "token": lambda causal: TokenFeedForward(SIZE.d_ff, SIZE.heads, SIZE.head_dim),
}
"""Functions that make mixers. The argument of a function says whether the stack is causal."""


def default(kind: str, encoder: str, decoder: str, options: str) -> Experiment:
    """Returns the experiment of a tiny model.

    Args:
      kind: ``encoder_decoder``, ``language_model``, ``prefix_lm``, ``text_lm`` (a language model
        without inputs), ``classifier`` or ``masked_lm``.
      encoder: the name of the encoder's mixer in `MIXERS`. For a model with only one stack, the
        name of that stack's mixer.
      decoder: the name of the decoder's mixer in `MIXERS`, for an encoder-decoder.
      options: words joined by ``+``. ``gated`` makes feed-forward layers gated. ``bias``,
        ``sinusoidal`` and ``learned`` choose how positions are represented. With ``universal`` and
        ``halting``, all layers share their parameters. ``capped`` bounds the output logits.
    """
    words = set(options.split("+"))
    causal = kind in ("language_model", "prefix_lm", "text_lm")
    positions = {"sinusoidal": SinusoidalPositions(), "learned": LearnedPositions(POSITIONS)}
    pair = t5(
        SIZE,
        gated="gated" in words,
        encoder=MIXERS[encoder](causal),
        decoder=MIXERS[decoder](True),
        relative_bias="bias" in words,
        positions=next((module for name, module in positions.items() if name in words), None),
        vocab_size=VOCAB_SIZE,
    )

    if words & {"universal", "halting"}:
        threshold = 0.5 if "halting" in words else None
        pair = pair.copy(
            encoder=_universal(pair.encoder, threshold), decoder=_universal(pair.decoder, threshold)
        )
    cap = 10.0 if "capped" in words else None
    data = DataConfig("sentiment", INPUTS, TARGETS, batch_size=BATCH)

    model: TextToText | Encoder = pair.copy(logits_soft_cap=cap)
    stack = pair.encoder  # all other models have only this stack
    shared = {"vocab_size": VOCAB_SIZE, "d_model": SIZE.d_model}
    if causal:
        if stack.bias is not None:
            stack = stack.copy(bias=RelativeBias(bidirectional=kind == "prefix_lm"))
        model = LanguageModel(
            **shared, decoder=stack, prefix=kind == "prefix_lm", tied=pair.tied, logits_soft_cap=cap
        )
    if kind == "text_lm":
        data = replace(data, mixture="texts", inputs_length=0)
    if kind == "classifier":
        model = Encoder(**shared, encoder=stack, outputs=len(CLASSES), pooler="gated" in words)
        data = replace(data, targets_length=1, classes=CLASSES)
    if kind == "masked_lm":
        model = Encoder(**shared, encoder=stack, masked_lm=True, tied=pair.tied)
        objective = OBJECTIVES["masked_lm"]
        data = replace(data, mixture="texts", targets_length=INPUTS, objective=objective)

    return Experiment(
        model=model,
        data=data,
        training=Training(steps=6, optimizer=AdamW(Constant(1e-2)), log_every=1, save_every=3),
        evaluation=Evaluation(max_examples=8, batch_size=8, loss_batches=2),
        vocabulary=Bytes(),
    )


def _universal(stack: Stack, threshold: float | None) -> UniversalStack:
    """Returns a copy of a stack in which all layers share one set of parameters."""
    runs = (Run(stack.runs[0].block, stack.num_layers),)
    return UniversalStack(
        runs, bias=stack.bias, positions=stack.positions, halting_threshold=threshold
    )
