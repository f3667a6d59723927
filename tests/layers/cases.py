"""Every alignment and mixer in the forms that the contract runs through."""

from synthesizer_jax import (
    Attention,
    Bilinear,
    Dense,
    DotProduct,
    DynamicConvolution,
    FactorizedDense,
    FactorizedRandom,
    Gaussian,
    GaussianBias,
    LightweightConvolution,
    Linformer,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
    SentenceFeedForward,
    TalkingHeads,
    TokenFeedForward,
)
from synthesizer_jax.initializers import Normal
from tests.layers import oracles
from tests.layers.contract import HEADS, ROOM, WIDTH, Case

RANDOM = Random(max_length=ROOM, table_init=Normal(1.0))

ALIGNMENT_CASES = {
    "DotProduct": Case.of(DotProduct()),
    "DotProduct, free width": Case.of(DotProduct(head_dim=13)),
    "DotProduct, biases": Case(
        Attention(HEADS, WIDTH, alignment=DotProduct(use_bias=True), use_bias=True),
        oracles.attention,
    ),
    "Dense": Case.of(Dense(max_length=ROOM)),
    "Dense, shared heads": Case.of(Dense(max_length=ROOM, share_heads=True, hidden_dim=4)),
    "Random": Case.of(RANDOM),
    "Fixed Random": Case.of(Random(max_length=ROOM, trainable=False, table_init=Normal(1.0))),
    "FactorizedRandom": Case.of(FactorizedRandom(max_length=ROOM, rank=2)),
    "FactorizedDense": Case.of(FactorizedDense(max_length=ROOM)),
    "RelativeBias": Case.of(RelativeBias(num_buckets=8, max_distance=16)),
    "Bilinear": Case(
        Attention(HEADS, WIDTH, alignment=Bilinear(), project_values=False), oracles.attention
    ),
    "Gaussian": Case.of(Gaussian()),
    "Gaussian, normalized": Case.of(Gaussian((-1, 0, 2.5, 1), sigma=0.7, normalize=True)),
    "Gaussian, threshold": Case.of(Gaussian((-1, 0), threshold=0.05)),
    "Gaussian, index": Case.of(Gaussian((-1, 0), sigma=0.0)),
    "Gaussian, ratio": Case.of(Gaussian((-1, 1), ratio=1.3), packs=False),
    "GaussianBias": Case.of(GaussianBias((-1, 1), sigma=2.0)),
    "GaussianBias, trainable": Case.of(GaussianBias((-1, 1.5), sigma=2.0, trainable=True)),
    "PerHead": Case.of(PerHead((Gaussian(), DotProduct()))),
    "PerHead of mixtures": Case.of(
        PerHead((Mixture((DotProduct(), RANDOM)), Mixture((GaussianBias(), DotProduct()))))
    ),
    "Mixture": Case.of(Mixture((DotProduct(), RANDOM, Dense(max_length=ROOM)))),
    "Mixture, sigmoid": Case.of(Mixture((DotProduct(), RANDOM), weights="sigmoid")),
    "Mixture, sum, shared query": Case.of(
        Mixture((DotProduct(), Dense(max_length=ROOM)), weights="sum", share_query=True)
    ),
    "Mixture of everything": Case.of(
        Mixture(
            (
                FactorizedDense(max_length=ROOM),
                FactorizedRandom(max_length=ROOM),
                RelativeBias(),
                GaussianBias(),
                Mixture((DotProduct(), Random(max_length=ROOM, trainable=False))),
            )
        )
    ),
}


def _talking(alignment, **options) -> Case:
    return Case(TalkingHeads(HEADS, WIDTH, alignment=alignment, **options), oracles.talking_heads)


MIXER_CASES = {
    "TalkingHeads": _talking(DotProduct()),
    "TalkingHeads, three numbers of heads": _talking(DotProduct(), softmax_heads=6, value_heads=2),
    "TalkingHeads over Random": _talking(RANDOM),
    "TalkingHeads, logits only": _talking(DotProduct(), project_weights=False),
    "TalkingHeads, weights only": _talking(Dense(max_length=ROOM), project_logits=False),
    "TalkingHeads, dynamic": _talking(
        DotProduct(), softmax_heads=2, dynamic=("x2l", "m2l", "x2w", "m2w")
    ),
    "LightweightConvolution": Case(LightweightConvolution(width=5), oracles.convolution),
    "LightweightConvolution, tied": Case(
        LightweightConvolution(width=4, groups=2, glu=False, pointwise=True), oracles.convolution
    ),
    "DynamicConvolution": Case(DynamicConvolution(width=3, groups=2), oracles.convolution),
    "Linformer": Case(
        Linformer(HEADS, WIDTH, max_length=ROOM, projected_length=5),
        oracles.linformer,
    ),
    "Linformer, two projections": Case(
        Linformer(HEADS, WIDTH, max_length=ROOM, projected_length=5, shared=False),
        oracles.linformer,
    ),
    "ALR": Case(
        SentenceFeedForward(ROOM, 7, HEADS, WIDTH),
        oracles.sentence_feed_forward,
    ),
    "ALSR": Case(
        SentenceFeedForward(ROOM, 7, HEADS, WIDTH, separate_heads=True),
        oracles.sentence_feed_forward,
    ),
    "ALRR and ELR": Case(SentenceFeedForward(ROOM, 7), oracles.sentence_feed_forward),
    "ALR of a decoder": Case(
        SentenceFeedForward(ROOM, 7, HEADS, WIDTH, causal=True),
        oracles.sentence_feed_forward,
    ),
    "TokenFeedForward": Case(TokenFeedForward(7, HEADS, WIDTH), oracles.token_feed_forward),
}

CASES = ALIGNMENT_CASES | MIXER_CASES
