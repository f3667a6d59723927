"""Train translation models, as in Tay et al. 2021 and You et al. 2020.

The recipes can train the systems in the WMT 2014 table of Tay et al., and the systems HC-SA, HC-ALL
and SH-X of You et al. These commands import Multi30k, train a vocabulary on it, and train a model:

    synthesizer-jax data import multi30k/en_de --data-dir DATA \\
        --from train=train.en+train.de --from validation=val.en+val.de \\
        --from test=test_2016_flickr.en+test_2016_flickr.de
    synthesizer-jax data vocabulary multi30k_en_de --output spm.model --size 4000 --data-dir DATA
    synthesizer-jax train papers.translation:multi30k:rv --workdir runs/rv --data-dir DATA \\
        --set vocabulary.path=spm.model

`base` is Tensor2Tensor's base model. The recipes `large` and `small` are the two settings of You et
al., in which norms follow the residual connections. The batches of `base`, `large` and `small` are
packed. A batch of `base` has 128 rows of 256 tokens. With eight devices, each device has 4,096
tokens, as published.

The available tasks are ``wmt14_ende_v003``, ``wmt14_enfr_v003``, ``wmt16_enro_v003``,
``iwslt2016_en_de``, ``iwslt2017_en_ja`` and others. The command `synthesizer-jax data list` lists
them.

Hardware and time: `multi30k` takes half an hour on one CPU core. `base` is for eight accelerators.
"""

from __future__ import annotations

import ast
from typing import Literal, TypeAlias

from synthesizer_jax.recipes.papers import transformer

from synthesizer_jax.alignments import Gaussian
from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import EncoderDecoder, Size, Stack
from synthesizer_jax.models.published import RATIO_IWSLT, RATIO_WMT, hard_coded
from synthesizer_jax.optimizers import AdamW, Linear, Noam, Schedule
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

HardCoded: TypeAlias = Literal["base", "hc_sa", "hc_all", "sh_x"]
Stacks: TypeAlias = Literal["encoder", "decoder", "encoder,decoder"]

BASE = Size(d_model=512, layers=6, d_ff=2048, heads=8, head_dim=64)
SIZE = Size(d_model=128, layers=2, d_ff=512, heads=4, head_dim=32)
LENGTH = 32
"""The maximum number of tokens of a sentence. Longer sentences are truncated."""
PREFIX = 7
"""The number of tokens of "translate English to German:" with the vocabulary of the commands above.

The number is 5 with T5's vocabulary.
"""
STEPS = 4000
RATIOS = {
    "wmt14_ende_v003": RATIO_WMT,
    "iwslt2016_en_de": RATIO_IWSLT,
    "iwslt2016_de_en": 1 / RATIO_IWSLT,
    "iwslt2017_en_ja": 5_114_050 / 3_576_290,
    "iwslt2017_ja_en": 3_576_290 / 5_114_050,
}
OTHER_RATIO = 4_215_814 / 4_186_988
"""The numbers of source words per target word in the code of You et al.

`RATIOS` contains the ratios of some tasks, and `OTHER_RATIO` is the ratio of all other tasks.
"""


def default() -> Experiment:
    """Trains R+V on Multi30k."""
    return multi30k("rv")


def multi30k(system: str, task: str = "multi30k_en_de") -> Experiment:
    """Trains a model with 2 + 2 layers and d_model 128 on a task, by default English to German."""
    model = transformer(system, SIZE, LENGTH, vocab_size=4096, dropout=0.1, prefix=PREFIX)
    return Experiment(
        model=model,
        vocabulary=SentencePiece("spm.model", extra_ids=0),
        data=DataConfig(
            task,
            LENGTH,
            LENGTH,
            batch_size=64,
            shards=1,
            buckets=((20, 20), (20, 24), (24, 24), (24, 28)),
        ),
        training=Training(
            steps=STEPS,
            optimizer=AdamW(Linear(4e-3, STEPS, warmup_steps=STEPS // 10), b2=0.98, eps=1e-9),
            label_smoothing=0.1,
            log_every=50,
            save_every=STEPS,
        ),
        evaluation=Evaluation(every=STEPS // 10, method="greedy", batch_size=128),
    )


def base(task: str, system: str) -> Experiment:
    """Trains Tensor2Tensor's base model for 250,000 steps.

    The model has 6 + 6 layers and d_model 512. Learned tables of attention logits have 256
    positions.
    """
    model = transformer(system, BASE, 256, vocab_size=32_768, dropout=0.1, prefix=5)
    schedule = Noam(BASE.d_model, warmup_steps=8000, factor=2.0)
    return _published(
        task, model, schedule, rows=128, steps=250_000, b2=0.997, smoothing=0.1, extra_length=100
    )


def large(task: str, system: HardCoded) -> Experiment:
    """Trains a model in the large setting that You et al. 2020 use for WMT 2014."""
    ratio = RATIOS.get(task, OTHER_RATIO)
    model = hard_coded(system, ratio=ratio, prefix=5, dropout_rate=0.1)
    return _published(task, model, Noam(model.d_model), rows=96, steps=100_000, smoothing=0.1)


def small(task: str, system: HardCoded) -> Experiment:
    """Trains a model with 5 + 5 layers and d_model 288, as in the small setting of You et al. 2020.

    You et al. use this setting for IWSLT and WMT 2016.
    """
    model = hard_coded(
        system,
        d_model=288,
        layers=5,
        heads=4,
        d_ff=507,
        ratio=RATIOS.get(task, OTHER_RATIO),
        prefix=5,
        dropout_rate=0.1,
    )
    schedule = Linear(3e-4, total_steps=100_000, final=1e-5)
    return _published(task, model, schedule, rows=12, steps=100_000, smoothing=0.0)


def _published(
    task: str,
    model: EncoderDecoder,
    schedule: Schedule,
    *,
    rows: int,
    steps: int,
    smoothing: float,
    b2: float = 0.98,
    extra_length: int = 50,
) -> Experiment:
    """Returns an experiment with published settings.

    Args:
      task: the task.
      model: the model.
      schedule: the learning rate.
      rows: the number of packed rows in a batch.
      steps: the number of training steps.
      smoothing: the label smoothing.
      b2: the decay rate of Adam's second moment, by default as in You et al. 2020.
      extra_length: the number of tokens by which an output may be longer than its input, by default
        as in You et al. 2020.
    """
    experiment = multi30k("v")
    return replace(
        experiment,
        model=model.copy(dtype="auto"),
        data=replace(
            experiment.data,
            mixture=task,
            inputs_length=256,
            targets_length=256,
            batch_size=rows,
            pack=True,
            buckets=(),
        ),
        training=replace(
            experiment.training,
            steps=steps,
            save_every=steps // 50,
            keep_latest=5,  # the papers average the parameters of the newest checkpoints
            optimizer=AdamW(schedule, b2=b2, eps=1e-9, clip_norm=None),
            label_smoothing=smoothing,
            z_loss=0.0,
        ),
        evaluation=Evaluation(
            every=steps // 20, method="beam", relative_length=1.0, extra_length=extra_length
        ),
    )


def head_positions(encoder: str, decoder: str) -> Experiment:
    """Trains HC-SA with heads that look at chosen positions (You et al. 2020, section 3).

    Args:
      encoder: the positions at which the encoder's heads look, relative to the query, such as
        ``-1,1``.
      decoder: the positions at which the decoder's heads look, relative to the query, such as
        ``-1,0``.
    """
    experiment = multi30k("hc_sa")
    model = experiment.model
    stacks = {"encoder": encoder, "decoder": decoder}
    changed = {
        name: _with_offsets(getattr(model, name), ast.literal_eval(f"({places},)"))
        for name, places in stacks.items()
    }
    return replace(experiment, model=model.copy(**changed))


def without_feed_forward(system: str, stacks: Stacks = "encoder,decoder") -> Experiment:
    """Trains a model without feed-forward layers in some stacks (You et al. 2020, section 5)."""
    experiment = multi30k(system)
    model: EncoderDecoder = experiment.model
    for name in stacks.split(","):
        stack = getattr(model, name)
        runs = tuple(
            replace(run, block=replace(run.block, feed_forward=None)) for run in stack.runs
        )
        model = model.copy(**{name: stack.copy(runs=runs)})
    return replace(experiment, model=model)


def _with_offsets(stack: Stack, offsets: tuple[float, ...]) -> Stack:
    """Returns a copy of a stack whose hard-coded heads look at the given offsets from the query."""
    (run,) = stack.runs
    mixer = run.block.self_mixer
    assert isinstance(mixer, Attention)
    mixer = mixer.copy(alignment=Gaussian(offsets))
    return stack.copy(runs=(replace(run, block=replace(run.block, self_mixer=mixer)),))
