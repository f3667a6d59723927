"""Checks the runs of `combinations.py` by comparing numbers and by reading logs and errors."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from synthesizer_jax.cli import main as program
from synthesizer_jax.training.step import TrainState, loss_sums
from synthesizer_jax.training.trainer import Trainer

TOLERANCES = {"bfloat16": 0.05, "first step": 2e-4, "other steps": 5e-3}
"""The largest allowed relative differences between losses that are mathematically equal."""


class WrongError(Exception):
    """The error that is raised if a combination did not end as it should."""


def to_host(tree: Any) -> Any:
    """Copies the arrays of a tree to NumPy arrays.

    Later training steps may reuse the memory of the original arrays, but not that of the copies.
    """
    return jax.tree.map(lambda x: np.array(jax.device_get(x)), tree)


def compare_trees(found: Any, expected: Any, tolerance: float, what: str) -> None:
    """Raises a `WrongError` if trees of arrays differ by more than a relative tolerance."""
    ours, theirs = (dict(jax.tree.leaves_with_path(tree)) for tree in (found, expected))
    if ours.keys() != theirs.keys():
        names = sorted(jax.tree_util.keystr(path) for path in ours.keys() ^ theirs.keys())
        raise WrongError(f"{what}: only one of the two has {', '.join(names[:4])}")
    for path, x in ours.items():
        x = np.asarray(x, np.float64)
        y = np.asarray(theirs[path], np.float64)
        if x.shape != y.shape or not np.all(np.abs(x - y) <= tolerance * (1e-2 + np.abs(y))):
            raise WrongError(f"{what}: {jax.tree_util.keystr(path)} differs")


def compare_average(states: Sequence[Any], found: Any, decay: float | None) -> None:
    """Checks that the average of the parameters follows the formula of `step.apply_gradients`.

    Args:
      states: the parameters before training and after each step.
      found: the average that the run has computed.
      decay: the setting `training.ema`.
    """
    assert decay is not None
    average = jax.tree.map(lambda x: x.astype(np.float64), states[0])
    for number, params in enumerate(states[1:]):
        weight = 1 - min(decay, (1 + number) / (10 + number))
        average = jax.tree.map(lambda a, p, w=weight: a + w * (p - a), average, params)
    compare_trees(found, average, 1e-5, f"the average of step {len(states) - 1}")


def compare_rows(trainer: Trainer, state: TrainState, batch: Any) -> None:
    """Checks that the loss of a batch does not change if its examples are in different rows."""
    experiment = trainer.experiment
    model = experiment.model
    device = jax.local_devices()[0]
    variables = trainer.trainable.merge(to_host(state.variables), to_host(trainer.base))
    batch = to_host(batch)
    is_packed = "encoder_segment_ids" in batch
    if is_packed:
        other = unpacked(batch)
        segments = experiment.data.segments_per_row
        change = "the examples are not packed"
    else:
        other = repadded(batch, model.ids.padding)
        segments = None
        change = "there is more padding and the rows have another order"

    def losses(batch: Any, max_segments: int | None) -> list[float]:
        """Returns the sums of the losses, the z-losses and the loss weights in a batch."""
        with jax.default_device(device):
            sums = jax.jit(
                lambda variables, batch: loss_sums(
                    model,
                    variables,
                    batch,
                    z_loss=experiment.training.z_loss,
                    label_smoothing=experiment.training.label_smoothing,
                    max_segments=max_segments,
                )
            )(variables, batch)
        return [float(x) for x in (sums.loss, sums.z_loss, sums.weight)]

    found, expected = losses(batch, segments), losses(other, None)
    # The ponder cost is not compared. It is a mean over rows, so it depends on how the examples are
    # arranged in rows.
    tolerance = 0.03 if "bfloat16" in str(model.dtype) else 2e-4
    if not np.allclose(found, expected, rtol=tolerance, atol=1e-3):
        raise WrongError(
            f"loss, z-loss and tokens of a batch are {found}, but they are {expected} if {change}"
        )


def unpacked(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Unpacks a batch, so that every example has a row of its own."""
    rows = collections.defaultdict[str, list[np.ndarray]](list)
    sides = {
        "encoder_input_tokens": "encoder",
        "decoder_input_tokens": "decoder",
        "decoder_target_tokens": "decoder",
        "decoder_loss_weights": "decoder",
    }
    for row in range(len(batch["decoder_target_tokens"])):
        for segment in range(1, int(batch["decoder_segment_ids"][row].max()) + 1):
            for name, side in sides.items():
                values = batch[name][row]
                part = values[batch[f"{side}_segment_ids"][row] == segment]
                rows[name].append(np.pad(part, (0, len(values) - len(part))))
    return {name: np.stack(parts) for name, parts in rows.items()}


def repadded(batch: dict[str, np.ndarray], padding: int) -> dict[str, np.ndarray]:
    """Returns a batch with its rows in reverse order and more padding at the end of each row."""
    other = {}
    has_classes = batch["decoder_target_tokens"].shape[1] == 1
    for name, values in batch.items():
        is_empty = values.shape[1] == 0
        is_class = has_classes and name.startswith("decoder")
        if values.ndim == 2 and not is_empty and not is_class:
            fill = 0 if name.endswith("weights") else padding
            values = np.pad(values, ((0, 0), (0, 3)), constant_values=fill)
        other[name] = values[::-1]
    return other


def compare_records(
    ours: Sequence[dict[str, Any]],
    theirs: Sequence[dict[str, Any]],
    twin: str,
    *,
    is_bfloat16: bool,
) -> float:
    """Compares the records of training steps in the logs of two runs.

    Args:
      ours: the records of the run that was killed.
      theirs: the records of the second run.
      twin: the name of the second run. If the name is ``same``, all numbers must be exactly equal.
      is_bfloat16: whether the model computes in bfloat16.

    Returns:
      The largest relative difference between the runs' losses of a step.

    Raises:
      WrongError: if the steps or the batches of the runs differ, or if a number differs too much.
    """
    steps = [[record["step"] for record in records] for records in (ours, theirs)]
    if steps[0] != steps[1]:
        raise WrongError(f"the run has the steps {steps[0]}, and its twin {twin!r} has {steps[1]}")
    if [r["data_checksum"] for r in ours] != [r["data_checksum"] for r in theirs]:
        raise WrongError(f"the twin {twin!r} has another batch")
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if twin == "same":
            tolerance = 0.0
        elif is_bfloat16:
            tolerance = TOLERANCES["bfloat16"]
        elif a["step"] == 1:
            tolerance = TOLERANCES["first step"]
        else:
            tolerance = TOLERANCES["other steps"]
        for name in ("loss", "z_loss", "gradient_norm", "learning_rate"):
            x, y = a.get(name) or 0.0, b.get(name) or 0.0
            difference = abs(x - y) / max(abs(x), abs(y), 1e-3)
            if name == "loss":
                worst = max(worst, difference)
            allowed = 4 * tolerance if name == "gradient_norm" else tolerance
            if not difference <= allowed:  # true also for NaN
                raise WrongError(f"{name} of step {a['step']} is {x}, and {y} in the twin {twin!r}")
    return worst


def compare_results(found: Any, expected: Any, what: str, path: str = "") -> None:
    """Raises a `WrongError` if two evaluations' results differ by more than rounding errors."""
    if isinstance(expected, dict) and isinstance(found, dict) and found.keys() == expected.keys():
        for name, value in expected.items():
            compare_results(found[name], value, what, f"{path}.{name}")
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        for number, value in enumerate(expected):
            compare_results(found[number], value, what, f"{path}.{number}")
    elif isinstance(expected, float) and isinstance(found, float):
        if not np.isclose(found, expected, rtol=1e-5, equal_nan=True):
            raise WrongError(f"{what}: {path} is {found}, and was {expected}")
    elif found != expected:
        raise WrongError(f"{what}: {path} is {found}, and was {expected}")


def last_line(log: pathlib.Path) -> str:
    """Returns the last nonempty line of a log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:1500] if lines else ""


def is_sentence(line: str) -> bool:
    """Returns whether a line is an error message that the program printed on purpose."""
    return line.startswith("error: ") and program.TRACEBACK not in line


def check_refusal(code: int, log: pathlib.Path) -> None:
    """Raises a `WrongError` unless a command refused its settings with a one-line error message."""
    text, last = log.read_text(errors="replace"), last_line(log)
    if code != 2 or "Traceback" in text or not is_sentence(last):
        raise WrongError(f"training ended with {code}: {last}")


def files_of(directory: pathlib.Path) -> set[pathlib.Path]:
    """Returns all files in a directory, at any depth, except lock files."""
    return {p for p in directory.rglob("*") if p.is_file() and p.suffix != ".lock"}
