"""Defines runs that are small enough for tests, with streams that do not need TensorFlow."""

import json
import os
import pathlib
import signal
import sys

import jax
import numpy as np

from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.costs import utilization
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.hosts.preemption import Preempted, StopSignal
from synthesizer_jax.models import Encoder, Size, alignment, t5
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.run_directory import save_run
from synthesizer_jax.training.trainer import Trainer

VOCAB, LENGTH, ROWS = 16, 8, 8
CLASSES = ("low", "middle", "high")


def experiment(model=None, *, layers=1, data=None, evaluation=None, **changes) -> Experiment:
    """Returns an experiment with a model that learns to copy eight tokens.

    If the model is an encoder, it learns to classify the rows of `ClassStream`, or to predict the
    masked tokens of `MaskedStream`.
    """
    training = {
        "steps": 12,
        "optimizer": AdamW(learning_rate=Constant(0.01, warmup_steps=4)),
        "log_every": 1,
        "save_every": 4,
        **{k: changes.pop(k) for k in tuple(changes) if k in Training.__dataclass_fields__},
    }
    if model is None:
        kind = alignment("rv", head_dim=4, max_length=LENGTH)
        model = t5(Size(8, layers, 16, 2, 4), encoder=kind, vocab_size=VOCAB, dropout_rate=0.1)
    classes = CLASSES if getattr(model, "outputs", None) else ()
    config = {"inputs_length": LENGTH, "targets_length": 1 if classes else LENGTH, **(data or {})}
    return Experiment(
        model=model,
        data=DataConfig("copy", batch_size=ROWS, shards=1, classes=classes, **config),
        training=Training(**training),
        evaluation=Evaluation(every=changes.pop("every", 0), **(evaluation or {})),
        vocabulary=Bytes(),
        **changes,
    )


def encoder(*, dropout_rate: float = 0.0, **head) -> Encoder:
    """Returns an encoder with one layer of width 8.

    Its head is a classifier over `CLASSES`, unless a different head is given.
    """
    kind = alignment("rv", head_dim=4, max_length=LENGTH)
    stack = t5(Size(8, 1, 16, 2, 4), encoder=kind, dropout_rate=dropout_rate).encoder
    head = head or {"outputs": len(CLASSES)}
    return Encoder(vocab_size=VOCAB, d_model=8, encoder=stack, **head)


class CopyStream:
    """A stream of random tokens to copy. Batch n depends only on n."""

    def __init__(self, bad_batch=None):
        self.taken = 0
        self.bad_batch = bad_batch

    def __next__(self):
        rng = np.random.default_rng(self.taken)
        batch = self.batch(rng)
        if self.taken == self.bad_batch:
            batch["decoder_loss_weights"][0, 0] = np.nan
        self.taken += 1
        return batch

    def batch(self, rng):
        tokens = rng.integers(2, VOCAB, (ROWS, LENGTH)).astype(np.int32)
        tokens[::3, 5:] = 0
        return {
            "encoder_input_tokens": tokens,
            "decoder_input_tokens": np.pad(tokens[:, :-1], ((0, 0), (1, 0))),
            "decoder_target_tokens": tokens,
            "decoder_loss_weights": (tokens != 0).astype(np.float32),
        }

    def save(self, directory: pathlib.Path):
        (directory / "position.json").write_text(json.dumps(self.taken))

    def restore(self, directory: pathlib.Path):
        self.taken = json.loads((directory / "position.json").read_text())


class ClassStream(CopyStream):
    """A stream of random tokens, of which the first one determines the class."""

    def batch(self, rng):
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


class MaskedStream(CopyStream):
    """A stream of rows that repeat one token. Token 2 masks some of the positions."""

    def batch(self, rng):
        targets = np.repeat(rng.integers(3, VOCAB, (ROWS, 1)), LENGTH, axis=1).astype(np.int32)
        targets[::3, 5:] = 0
        masked = (rng.random(targets.shape) < 0.3) & (targets != 0)
        return {
            "encoder_input_tokens": np.where(masked, 2, targets),
            "decoder_input_tokens": np.zeros_like(targets),
            "decoder_target_tokens": targets,
            "decoder_loss_weights": masked.astype(np.float32),
        }


def damage(checkpoint: pathlib.Path) -> None:
    """Flips a bit in every file of a checkpoint that contains arrays."""
    for path in (checkpoint / "state").rglob("d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


STREAMS = {"classes": ClassStream, "masked": MaskedStream}
HEADS = {"classes": {}, "masked": {"masked_lm": True}}


def run(directory, recipe, stream=None, **options):
    """Trains an experiment in a directory on one device, and returns the final state."""
    with StopSignal() as stop:
        trainer = Trainer(recipe, jax.devices()[:1])
        trainer.read_base(lambda _: None)
        options = {"visible": False, **options}
        return train(trainer, stream or CopyStream(), directory, stop=stop, **options)


def save(directory, recipe, state=None):
    """Makes the directory of a run with one checkpoint.

    The checkpoint contains the given state, or else initial parameters.
    """
    save_run(recipe, directory)
    checkpoints = Checkpoints(directory / "checkpoints")
    checkpoints.save(Trainer(recipe).init() if state is None else state, None)
    checkpoints.close()


def close(found, expected, **tolerance):
    """Checks that two trees of arrays are equal within a tolerance."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), found, expected)


def logged(directory, name="loss", kind="train"):
    """Returns a metric's logged values by step, and checks that no step was logged twice."""
    records = [r for r in read_metrics(directory / METRICS_FILE) if r["kind"] == kind]
    found = {r["step"]: r.get(name) for r in records}
    assert len(found) == len(records), "a step was logged twice"
    return found


def stepped(recipe, stream, steps=1, devices=1):
    """Trains for some steps. Returns the final state, and the metrics of every step."""
    trainer = Trainer(recipe, jax.devices()[:devices])
    found = []
    state = trainer.init()
    for _ in range(steps):
        state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        found.append({name: float(value) for name, value in metrics.items()})
    return state, found


def play(directory: str, kill_at: int, how: str) -> None:
    """Trains a run in this process, which sends signals to itself.

    A signal is sent before batch `kill_at`, or during the first evaluation or compilation from that
    step on. The argument `how` is ``never`` or the name of the signal (``kill``, ``term`` or
    ``int``). The name is followed by ``-in-evaluation`` or ``-in-compilation`` if the signal is to
    be sent there. With ``int-int``, two signals are sent.
    """

    def signal_here(names):
        for name in names:
            os.kill(os.getpid(), signal.Signals[f"SIG{name.upper()}"])

    class Killing(CopyStream):
        def __next__(self):
            if self.taken == kill_at and "-in-" not in how:
                signal_here(how.split("-"))
            return super().__next__()

    def evaluate(state):
        if how.endswith("-in-evaluation") and int(state.step) >= kill_at:
            signal_here([how.split("-")[0]])
        return {"score": -float(state.step)}

    if how == "term-in-compilation":
        Trainer.compile = lambda self, lowered: signal_here(["term"])
    try:
        run(pathlib.Path(directory), experiment(every=2), Killing(), evaluate=evaluate)
    except Preempted as preempted:
        sys.exit(preempted.exit_code)


def main(plays: str) -> None:
    """Executes calls of `play` one by one in forked processes, and prints their exit codes."""
    codes = []
    utilization.SIDE["cpu"] = 64
    for arguments in json.loads(plays):
        if (pid := os.fork()) == 0:
            try:
                play(*arguments)
                os._exit(0)
            except SystemExit as end:
                os._exit(end.code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1])
