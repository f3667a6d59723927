"""Fine-tune a T5 or a Synthesizer on one task or mixture, from a checkpoint or from scratch.

The following command requires T5's vocabulary file and the data of GLUE. To import GLUE, use
`synthesizer-jax data import glue --from DIR`.

    synthesizer-jax train finetune --workdir runs/cola --data-dir DATA \\
        --set vocabulary.path=spiece.model --set data.mixture=glue_cola_v002 \\
        --set init_from=runs/pretrained

Hardware: a model of the small size fits on an accelerator with 16 GB.

The settings are those of T5's fine-tuning: Adafactor with a constant learning rate of 0.001, a
dropout rate of 0.1, and batches of 128 packed rows of 512 + 84 tokens. Some mixers treat a whole
row as one sequence, so their rows cannot be packed. For these mixers, add `--set data.pack=false`.
If a task has label words, the model is evaluated by ranking them. T5's published scores come from
greedy decoding instead. To decode greedily, add `--set evaluation.method=greedy`.
"""

from __future__ import annotations

from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import Size, alignment, t5, zoo
from synthesizer_jax.models.zoo import T5_1_1
from synthesizer_jax.optimizers import Adafactor, Constant
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training


def default() -> Experiment:
    """Fine-tunes T5 1.1 small."""
    return _finetune(T5_1_1["small"], "v")


def synthesizer_rv_small() -> Experiment:
    """Fine-tunes a Random + Vanilla Synthesizer with the size of T5 1.1 small."""
    return _finetune(T5_1_1["small"], "rv")


def base() -> Experiment:
    """Fine-tunes T5 1.1 base."""
    return _finetune(T5_1_1["base"], "v")


def prefix_lm_base() -> Experiment:
    """Fine-tunes a decoder-only model of base size, which reads its inputs bidirectionally."""
    experiment = base()
    model = zoo.language_model("v", T5_1_1["base"], prefix=True)
    decoder = model.decoder.copy(scan=True, dropout_rate=0.1)
    # In a prefix language model, rows cannot be packed, because each row contains the inputs and
    # targets of one example. Use buckets of lengths instead to reduce padding.
    buckets = ((64, 16), (128, 16), (256, 32))
    data = replace(experiment.data, pack=False, buckets=buckets)
    return replace(experiment, model=model.copy(decoder=decoder, dtype="auto"), data=data)


def _finetune(size: Size, variant: str) -> Experiment:
    """Returns an experiment that fine-tunes a T5 1.1 with a variant, such as ``rv``."""
    self_attention = alignment(variant, head_dim=size.head_dim)
    return Experiment(
        model=t5(size, encoder=self_attention, dropout_rate=0.1, dtype="auto", scan=True),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig("glue_v002_proportional", 512, 84, batch_size=128, pack=True),
        training=Training(
            steps=20_000,
            optimizer=Adafactor(learning_rate=Constant(1e-3)),
            save_every=1000,
        ),
        evaluation=Evaluation(every=1000),
    )
