"""Encoders small enough for tests, and streams without TensorFlow that teach them something."""

import json
import pathlib

import numpy as np

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.models import Encoder, Size, alignment, t5
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.registry import replace
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

VOCAB, LENGTH, ROWS = 16, 8, 8
CLASSES = ("low", "middle", "high")


def encoder(*, dropout_rate: float = 0.0, variant: str = "rv", **head) -> Encoder:
    """One layer of width 8, with a classifier over `CLASSES` unless another head is given."""
    size = Size(8, 1, 16, 2, 4)
    kind = alignment(variant, head_dim=size.head_dim, max_length=LENGTH)
    stack = t5(size, encoder=kind, dropout_rate=dropout_rate).encoder
    head = head or {"outputs": len(CLASSES)}
    return Encoder(vocab_size=VOCAB, d_model=size.d_model, encoder=stack, **head)


def experiment(
    model: Encoder | None = None, *, data=None, evaluation=None, **changes
) -> Experiment:
    """Classifies rows of `ClassStream`, or predicts the tokens of `MaskedStream`."""
    model = encoder() if model is None else model
    classes = CLASSES if model.outputs else ()
    config = DataConfig(
        "texts", LENGTH, 1 if classes else LENGTH, batch_size=ROWS, shards=1, classes=classes
    )
    training = {
        "steps": 12,
        "optimizer": AdamW(learning_rate=Constant(0.02, warmup_steps=4)),
        "log_every": 1,
        "save_every": 4,
        **{k: changes.pop(k) for k in tuple(changes) if k in Training.__dataclass_fields__},
    }
    return Experiment(
        model=model,
        data=replace(config, **(data or {})),
        training=Training(**training),
        evaluation=Evaluation(**(evaluation or {})),
        vocabulary=Bytes(),
        **changes,
    )


class ClassStream:
    """Random tokens, whose first one tells the class; batch n depends on n alone."""

    def __init__(self):
        self.taken = 0

    def __next__(self):
        rng = np.random.default_rng(self.taken)
        self.taken += 1
        tokens = rng.integers(5, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        classes = rng.integers(0, len(CLASSES), (ROWS, 1)).astype(np.int32)
        tokens[:, :1] = 2 + classes
        tokens[::3, 5:] = 0
        return {
            "encoder_input_tokens": tokens,
            "decoder_input_tokens": np.zeros_like(classes),
            "decoder_target_tokens": classes,
            "decoder_loss_weights": np.ones(classes.shape, np.float32),
        }

    def save(self, directory: pathlib.Path):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "position.json").write_text(json.dumps(self.taken))

    def restore(self, directory: pathlib.Path):
        self.taken = json.loads((directory / "position.json").read_text())


class MaskedStream(ClassStream):
    """Rows of one repeated token, in which some places are masked by token 2."""

    def __next__(self):
        rng = np.random.default_rng(self.taken)
        self.taken += 1
        targets = np.repeat(rng.integers(3, VOCAB, (ROWS, 1)), LENGTH, axis=1).astype(np.int32)
        targets[::3, 5:] = 0
        masked = (rng.random(targets.shape) < 0.3) & (targets != 0)
        return {
            "encoder_input_tokens": np.where(masked, 2, targets),
            "decoder_input_tokens": np.zeros_like(targets),
            "decoder_target_tokens": targets,
            "decoder_loss_weights": masked.astype(np.float32),
        }


STREAMS = {"classes": ClassStream, "masked": MaskedStream}
HEADS = {"classes": {}, "masked": {"masked_lm": True}}
