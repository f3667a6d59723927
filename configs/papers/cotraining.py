"""Train on a mixture of GLUE and SuperGLUE, as in the GLUE and SuperGLUE tables of Tay et al. 2021.

The first command needs no data. The second command trains a model on GLUE and SuperGLUE:

    synthesizer-jax train papers.cotraining:synthetic:rv --workdir runs/rv
    synthesizer-jax train papers.cotraining:glue_super_glue:rv:small --workdir runs/rv \\
        --data-dir DATA --set vocabulary.path=spiece.model

The recipe `synthetic` generates its own data. The data consists of eight tasks in T5's formats,
whose sentences follow an artificial grammar.

The other recipes require T5's vocabulary file, and data that these commands import:

    synthesizer-jax data import glue --from GLUE_FILES --data-dir DATA
    synthesizer-jax data import super_glue --from SUPER_GLUE_FILES --data-dir DATA

The mixture of GLUE and SuperGLUE samples each task in proportion to its size, as T5 does, except
that the rates of the two RTE tasks are halved. Rows are packed: a row of 512 + 84 tokens holds
about five examples. To start `glue_super_glue` from a pre-trained model, add `--set init_from=RUN`.
`en_mix` is the paper's mixture, which contains C4 and SQuAD, too.

Hardware and time: `synthetic` takes two minutes on two CPU cores, and `laptop` takes some minutes.
The small models fit on an accelerator with 16 GB. The base models fit on an accelerator with 40 GB.
On smaller accelerators, use several of them with the mesh axis fsdp.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

from synthesizer_jax.recipes import pretrain
from synthesizer_jax.recipes.papers import (
    Dot,
    dot_product_of,
    laptop_model,
    self_attentions,
    small_training,
)

from synthesizer_jax.alignments import Alignment, FactorizedRandom, Mixture, Random
from synthesizer_jax.base.registry import replace
from synthesizer_jax.base.typing import Choices
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.mixers import Attention, Mixer
from synthesizer_jax.models import EncoderDecoder, Size, t5, zoo
from synthesizer_jax.optimizers import Adafactor, AdamW, Constant, Cosine
from synthesizer_jax.primitives.initializers import Normal
from synthesizer_jax.tasks import synthetic as synthetic_tasks
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

Part = TypeVar("Part", bound=Mixer | Alignment)
SizeName: TypeAlias = Annotated[str, Choices(tuple(zoo.T5_1_1))]

STEPS = 6000
INPUTS, TARGETS = 32, 4
"""The numbers of input and target tokens in a row, which fit all examples of the mixture."""
SIZE = Size(d_model=64, layers=2, d_ff=128, heads=4, head_dim=16)


def default() -> Experiment:
    """Trains R+V on the synthetic mixture."""
    return synthetic("rv")


def synthetic(system: str, dot: Dot = "t5") -> Experiment:
    """Trains a model with 2 + 1 layers and d_model 64 on the synthetic mixture.

    All systems use T5's dot product as cross-attention.
    """
    mixers = self_attentions(system, SIZE, INPUTS, dot=dot_product_of(dot, SIZE))
    encoder_mixer, decoder_mixer = map(_with_wide_tables, mixers)
    model = t5(
        SIZE,
        encoder=encoder_mixer,
        decoder=decoder_mixer,
        vocab_size=synthetic_tasks.VOCAB_SIZE,
        dtype="auto",
    )
    (decoder_run,) = model.decoder.runs
    stacks = (model.encoder, model.decoder.copy(runs=(replace(decoder_run, repeats=1),)))
    encoder, decoder = (
        stack.copy(bias=stack.bias and stack.bias.copy(table_init=Normal(2.0))) for stack in stacks
    )
    model = model.copy(embedding_init=Normal(0.3), encoder=encoder, decoder=decoder)
    return Experiment(
        model=model,
        # With more than 48 examples in a batch, the temporary buffers of a step would exceed 32
        # MiB. The C library can reuse the memory only of buffers up to this size, so larger batches
        # would be slower.
        data=DataConfig(synthetic_tasks.MIXTURE, INPUTS, TARGETS, batch_size=48, shards=1),
        training=Training(
            steps=STEPS,
            optimizer=AdamW(
                learning_rate=Cosine(1e-3, total_steps=STEPS, warmup_steps=STEPS // 20, final=2e-5),
                b2=0.99,
            ),
            log_every=25,
            save_every=STEPS,
        ),
        evaluation=Evaluation(method="greedy", batch_size=150),
    )


def laptop(system: str) -> Experiment:
    """Trains a model with 2 + 2 layers and d_model 256 on GLUE and SuperGLUE.

    Training can start from the checkpoint of a run of `pretraining.small`.
    """
    return Experiment(
        model=laptop_model(system, 128, dropout=0.1),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig(
            "glue_super_glue_proportional", 128, 16, batch_size=32, shards=1, pack=True
        ),
        training=small_training(300),
        evaluation=Evaluation(max_examples=200, method="rank", batch_size=32),
    )


def glue_super_glue(system: str, size: SizeName = "base") -> Experiment:
    """Trains a T5 1.1 of any size (small, base, …) on GLUE and SuperGLUE.

    The argument `system` chooses the self-attention of the model. The cross-attention is always
    T5's dot product.
    """
    return Experiment(
        model=_t5_1_1(system, size, dropout=0.1),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig("glue_super_glue_proportional", 512, 84, batch_size=128, pack=True),
        training=Training(
            steps=65_536,
            optimizer=Adafactor(learning_rate=Constant(1e-3)),
            save_every=1000,
        ),
        evaluation=Evaluation(every=5000, method="greedy"),
    )


def en_mix(system: str, size: SizeName = "base") -> Experiment:
    """Trains on C4 and all tasks of GLUE, SuperGLUE and SQuAD together, as T5 is pre-trained."""
    experiment = pretrain.t5_1_1_base()
    data = replace(experiment.data, mixture="en_mix", pack=True)
    evaluation = Evaluation(every=20_000, max_examples=1024)
    model = _t5_1_1(system, size, dropout=0.0)
    return replace(experiment, model=model, data=data, evaluation=evaluation)


def _t5_1_1(system: str, size_name: SizeName, *, dropout: float) -> EncoderDecoder:
    """Returns a T5 1.1 with the self-attention of a system."""
    size = zoo.T5_1_1[size_name]
    encoder, decoder = self_attentions(
        system, size, 512, dot=zoo.dot_product(size.head_dim), dropout=dropout
    )
    return t5(size, encoder=encoder, decoder=decoder, dropout_rate=dropout, dtype="auto", scan=True)


def _with_wide_tables(part: Part) -> Part:
    """Returns a mixer or alignment whose random logits start with a standard deviation of 2.

    In the synthetic recipe's models, the relative biases start with the same standard deviation. A
    large initial variance lets a small model distinguish positions and words from the start.
    """
    if isinstance(part, Attention):
        return part.copy(alignment=_with_wide_tables(part.alignment))
    if isinstance(part, Mixture):
        return part.copy(parts=tuple(map(_with_wide_tables, part.parts)))
    if isinstance(part, Random):
        return part.copy(table_init=Normal(2.0))
    if isinstance(part, FactorizedRandom):
        # A logit is a sum of `rank` products of two factors. The standard deviation of the factors
        # is chosen so that the logit has a standard deviation of 2.
        return part.copy(factor_init=Normal((2.0 / part.rank**0.5) ** 0.5))
    return part
