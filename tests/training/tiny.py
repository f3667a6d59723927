"""A run small enough for tests: an experiment, a stream without TensorFlow, and a main program."""

import json
import os
import pathlib
import signal
import sys

import numpy as np

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

VOCAB = 16


def experiment(**changes) -> Experiment:
    """Copies eight tokens; batch 8."""
    kind = alignment("rv", head_dim=4, max_length=8)
    training = {
        "steps": 12,
        "optimizer": AdamW(learning_rate=Constant(0.01, warmup_steps=4)),
        "log_every": 1,
        "save_every": 4,
        **{k: changes.pop(k) for k in tuple(changes) if k in Training.__dataclass_fields__},
    }
    return Experiment(
        model=t5(Size(8, 2, 16, 2, 4), encoder=kind, vocab_size=VOCAB, dropout_rate=0.1),
        data=DataConfig("copy", inputs_length=8, targets_length=8, batch_size=8, shards=1),
        training=Training(**training),
        evaluation=Evaluation(every=changes.pop("every", 0)),
        vocabulary=Bytes(),
        **changes,
    )


class CopyStream:
    """Random tokens to copy; batch n depends on n alone."""

    def __init__(self, bad_batch=None):
        self.taken, self.bad_batch = 0, bad_batch

    def __next__(self):
        rng = np.random.default_rng(self.taken)
        tokens = rng.integers(2, VOCAB, (8, 8)).astype(np.int32)
        tokens[::3, 5:] = 0
        weights = (tokens != 0).astype(np.float32)
        if self.taken == self.bad_batch:
            weights[0, 0] = np.nan
        self.taken += 1
        shifted = np.pad(tokens[:, :-1], ((0, 0), (1, 0)))
        return {
            "encoder_input_tokens": tokens,
            "decoder_input_tokens": shifted,
            "decoder_target_tokens": tokens,
            "decoder_loss_weights": weights,
        }

    def save(self, directory: pathlib.Path):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "position.json").write_text(json.dumps(self.taken))

    def restore(self, directory: pathlib.Path):
        self.taken = json.loads((directory / "position.json").read_text())


def main(directory: str, kill_at: str, how: str) -> None:
    """Trains; kills itself with SIGKILL before batch `kill_at`, or with another signal somewhere.

    Args:
      directory: of the run.
      kill_at: number of the batch, or of the step that is evaluated.
      how: ``never``, or the signal (``kill``, ``term``, ``int``), followed by ``-in-evaluation`` or
        ``-in-compilation`` if it comes there; ``int-int`` are two of them.
    """
    from synthesizer_jax.runtime.preemption import Preempted, StopSignal
    from synthesizer_jax.training.loop import train
    from synthesizer_jax.training.trainer import Trainer

    class Killing(CopyStream):
        def __next__(self):
            if self.taken == int(kill_at) and "-in-" not in how:
                for name in how.split("-"):
                    os.kill(os.getpid(), signal.Signals[f"SIG{name.upper()}"])
            return super().__next__()

    def evaluate(state):
        if how.endswith("-in-evaluation") and int(state.step) >= int(kill_at):
            os.kill(os.getpid(), signal.Signals[f"SIG{how.split('-')[0].upper()}"])
            np.linalg.svd(np.ones((3000, 3000)))  # long, and no bytecode in between
        return {"score": -float(state.step)}

    if how == "term-in-compilation":
        compile_step = Trainer.compile

        def compiled(self):
            os.kill(os.getpid(), signal.SIGTERM)
            np.linalg.svd(np.ones((3000, 3000)))
            compile_step(self)

        Trainer.compile = compiled
    try:
        with StopSignal() as stop:
            train(
                Trainer(experiment(every=2)),
                Killing(),
                pathlib.Path(directory),
                stop=stop,
                evaluate=evaluate,
                visible=False,
            )
    except Preempted as preempted:
        sys.exit(preempted.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
