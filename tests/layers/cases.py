"""Lists all alignments and mixers, with the options with which the contract is tested."""

import synthesizer_jax as sj
from synthesizer_jax.primitives.initializers import Normal
from tests.layers import oracles
from tests.layers.contract import HEADS, ROOM, WIDTH, Case

DOT = sj.DotProduct()
DENSE = sj.Dense(max_length=ROOM)
RANDOM = sj.Random(max_length=ROOM, table_init=Normal(1.0))
EVERYTHING = (
    *(sj.FactorizedDense(max_length=ROOM), sj.FactorizedRandom(max_length=ROOM), sj.RelativeBias()),
    *(sj.GaussianBias(), sj.Mixture((DOT, sj.Random(max_length=ROOM, trainable=False)))),
)

ALIGNMENT_CASES = {
    "DotProduct": Case.of(DOT),
    "DotProduct, biases": Case.of(sj.DotProduct(use_bias=True), use_bias=True),
    "DotProduct, rotary": Case.of(sj.DotProduct(4, normalize_qk=True, rotary_base=100.0), window=4),
    "DotProduct, norm with an offset": Case.of(
        sj.DotProduct(normalize_qk=sj.models.RMSNorm(0.1, offset=1.0)), window=(2, 4)
    ),
    "DotProduct, part rotary": Case.of(
        sj.DotProduct(9, rotary_base=10.0, rotary_share=0.7, rotary_scaling=sj.LinearScaling(2.5))
    ),
    "DotProduct, YaRN": Case.of(
        sj.DotProduct(
            8, rotary_base=10.0, rotary_scaling=sj.YaRN(4.0, original_length=64, fast=8.0)
        )
    ),
    "DotProduct, grouped": Case.of(
        sj.Mixture((sj.DotProduct(5), RANDOM)),
        num_kv_heads=2,
        use_bias=True,
        soft_cap=1.5,
        sinks=True,
    ),
    "DotProduct, keys are values": Case.of(DOT, shared_key_value=True),
    "Dense": Case.of(DENSE),
    "Dense, shared heads": Case.of(sj.Dense(max_length=ROOM, share_heads=True, hidden_dim=4)),
    "Random": Case.of(RANDOM),
    "Fixed Random": Case.of(sj.Random(max_length=ROOM, trainable=False, table_init=Normal(1.0))),
    "FactorizedRandom": Case.of(sj.FactorizedRandom(max_length=ROOM, rank=2)),
    "FactorizedDense": Case.of(sj.FactorizedDense(max_length=ROOM)),
    "RelativeBias": Case.of(sj.RelativeBias(num_buckets=8, max_distance=16)),
    "ALiBi": Case.of(sj.ALiBi()),
    "Bilinear": Case.of(sj.Bilinear(), project_values=False),
    "Gaussian": Case.of(sj.Gaussian()),
    "Gaussian, normalized": Case.of(sj.Gaussian((-1, 0, 2.5, 1), sigma=0.7, normalize=True)),
    "Gaussian, threshold": Case.of(sj.Gaussian((-1, 0), threshold=0.05)),
    "Gaussian, index": Case.of(sj.Gaussian((-1, 0), sigma=0.0)),
    "Gaussian, ratio": Case.of(sj.Gaussian((-1, 1), ratio=1.3), packs=False),
    "GaussianBias": Case.of(sj.GaussianBias((-1, 1), sigma=2.0)),
    "GaussianBias, trainable": Case.of(sj.GaussianBias((-1, 1.5), sigma=2.0, trainable=True)),
    "PerHead": Case.of(sj.PerHead((sj.Gaussian(), DOT))),
    "PerHead of mixtures": Case.of(
        sj.PerHead((sj.Mixture((DOT, RANDOM)), sj.Mixture((sj.GaussianBias(), DOT))))
    ),
    "Mixture, sigmoid": Case.of(sj.Mixture((DOT, RANDOM), weights="sigmoid")),
    "Mixture, sum, shared query": Case.of(
        sj.Mixture((DOT, DENSE), weights="sum", share_query=True)
    ),
    "Mixture of everything": Case.of(sj.Mixture(EVERYTHING)),
}


def _merged(alignment, **options) -> Case:
    return Case(
        sj.MergedAttention(HEADS, WIDTH, alignment=alignment, **options), oracles.merged_attention
    )


def _talking(alignment, **options) -> Case:
    return Case(
        sj.TalkingHeads(HEADS, WIDTH, alignment=alignment, **options), oracles.talking_heads
    )


MIXER_CASES = {
    "TalkingHeads": _talking(DOT),
    "TalkingHeads, three numbers of heads": _talking(DOT, softmax_heads=6, value_heads=2, window=5),
    "TalkingHeads over Random": _talking(RANDOM),
    "TalkingHeads, logits only": _talking(DOT, project_weights=False),
    "TalkingHeads, weights only": _talking(sj.Dense(max_length=ROOM), project_logits=False),
    "TalkingHeads, dynamic": _talking(DOT, softmax_heads=2, dynamic=("x2l", "m2l", "x2w", "m2w")),
    "LightweightConvolution": Case(sj.LightweightConvolution(width=5), oracles.convolution),
    "LightweightConvolution, tied": Case(
        sj.LightweightConvolution(width=4, groups=2, glu=False, pointwise=True), oracles.convolution
    ),
    "DynamicConvolution": Case(sj.DynamicConvolution(width=3, groups=2), oracles.convolution),
    "Linformer": Case(
        sj.Linformer(HEADS, WIDTH, max_length=ROOM, projected_length=5), oracles.linformer
    ),
    "Linformer, two projections": Case(
        sj.Linformer(HEADS, WIDTH, max_length=ROOM, projected_length=5, shared=False),
        oracles.linformer,
    ),
    "MergedAttention": _merged(DOT, use_bias=True),
    "MergedAttention, as in T5Gemma 2": _merged(
        sj.DotProduct(4, normalize_qk=True, rotary_base=100.0),
        num_kv_heads=2,
        window=4,
        soft_cap=1.5,
        sinks=True,
    ),
    "MergedAttention over Random": _merged(RANDOM, cross_alignment=DOT),
    "MergedAttention over a mixture": _merged(
        sj.PerHead((sj.Mixture((DOT, RANDOM)), DENSE)), cross_alignment=sj.DotProduct(5)
    ),
    "ALR": Case(sj.SentenceFeedForward(ROOM, 7, HEADS, WIDTH), oracles.sentence_feed_forward),
    "ALSR": Case(
        sj.SentenceFeedForward(ROOM, 7, HEADS, WIDTH, separate_heads=True),
        oracles.sentence_feed_forward,
    ),
    "ALRR and ELR": Case(sj.SentenceFeedForward(ROOM, 7), oracles.sentence_feed_forward),
    "ALR of a decoder": Case(
        sj.SentenceFeedForward(ROOM, 7, HEADS, WIDTH, causal=True), oracles.sentence_feed_forward
    ),
    "TokenFeedForward": Case(sj.TokenFeedForward(7, HEADS, WIDTH), oracles.token_feed_forward),
}

CASES = ALIGNMENT_CASES | MIXER_CASES
