"""Tests checksums with several devices, damaged checkpoints, and which checkpoints are kept."""

import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.checkpoints.manager import (
    Checkpoints,
    Retention,
    finished_steps,
    restore_variables,
)
from synthesizer_jax.training.step import TrainState
from tests.training.tiny import damage


def array(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.asarray(jnp.asarray(rng.integers(0, 2, shape) + 0.5, kind))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64"])
def test_a_changed_bit_changes_the_checksum(kind: str) -> None:
    x = array(kind, (2, 2))
    found = {checksums.checksums({"x": x})["x"]}
    bits = 1 if kind == "bool" else 8
    for place in range(x.nbytes):
        for bit in range(bits):
            bytes_ = bytearray(x.tobytes())
            bytes_[place] ^= 1 << bit
            changed = np.frombuffer(bytes(bytes_), x.dtype).reshape(x.shape)
            found.add(checksums.checksums({"x": changed})["x"])
    assert len(found) == 1 + x.nbytes * bits


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_checksum_is_the_same_on_every_mesh(kind: str) -> None:
    x = array(kind, (8, 16))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    whole = checksums.checksums({"x": x})
    for spec in (P(), P("b", "a"), P(("a", "b")), P(None, "b")):
        assert checksums.checksums({"x": jax.device_put(x, NamedSharding(mesh, spec))}) == whole
    assert checksums.checksums({"x": x[::-1]}) != whole, "places count"


def test_checksums_of_parts_add_up() -> None:
    parts = [{"x": checksums.MODULUS - 1, "y": 3}, {"x": 2}]
    assert checksums.combine_checksums(parts) == {"x": 1, "y": 3}


class Position:
    """A data stream that only has a position and no data."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.taken = 0

    def save(self, directory: pathlib.Path) -> None:
        (directory / "position").write_text(str(self.taken))

    def restore(self, directory: pathlib.Path) -> None:
        if self.error is not None:
            raise self.error
        self.taken = int((directory / "position").read_text())


def state(step: int, name: str = "x") -> TrainState:
    x = jnp.arange(4000, dtype=jnp.float32).reshape(40, 100) * step
    return TrainState(jnp.asarray(step, jnp.int32), {name: x}, {}, {"m": x + 1})


def save(directory: pathlib.Path, *steps: int) -> None:
    checkpoints = Checkpoints(directory, keep_latest=9)
    stream = Position()
    for step in steps:
        stream.taken = step
        checkpoints.save(state(step), stream)
    checkpoints.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    """A directory with checkpoints of the steps 1 and 2."""
    directory = tmp_path_factory.mktemp("checkpoints")
    save(directory, 1, 2)
    return directory


@pytest.fixture
def saved(whole: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the directory of checkpoints that the test may damage."""
    return shutil.copytree(whole, tmp_path / "saved")


def newest(directory: pathlib.Path, name: str = "x") -> tuple[int, int]:
    """Restores the newest usable checkpoint. Returns its step and the data stream's position."""
    checkpoints = Checkpoints(directory)
    stream = Position()
    restored = checkpoints.restore_newest(jax.eval_shape(lambda: state(0, name)), stream)
    jax.tree.map(np.testing.assert_array_equal, restored, state(int(restored.step)))
    return int(restored.step), stream.taken


def flip(path: pathlib.Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_restores_the_step_before(saved: pathlib.Path, caplog) -> None:
    """If a bit of a checkpoint's arrays flips, the checkpoint before it is restored.

    If the flipped bit has no effect, the damaged checkpoint itself may be restored.
    """
    assert newest(saved) == (2, 2)
    files = [p for p in (saved / "2" / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    path = max(files, key=lambda p: p.stat().st_size)
    rng = np.random.default_rng(0)
    good = path.read_bytes()
    aside = 0
    for place in rng.integers(0, len(good), 8):
        flip(path, int(place), int(rng.integers(8)))
        aside += newest(saved)[0] == 1
        if (unreadable := saved / "2.unreadable").exists():
            unreadable.rename(saved / "2")
        path.write_bytes(good)
    assert aside > 4
    assert "arrays differ from what was saved" in caplog.text


@pytest.mark.parametrize("averaged", [False, True])
def test_each_array_is_converted_before_the_next_array_is_read(tmp_path, averaged: bool) -> None:
    """Only one array that is not converted yet is in memory, and the largest array comes first."""
    shapes = {"small": (3, 5), "large": (40, 10), "middle": (7, 9)}
    params = {name: jnp.full(shape, 7.0) for name, shape in shapes.items()}
    average = {name: {"x": params[name] + 1} for name in shapes} if averaged else {}
    checkpoints = Checkpoints(tmp_path)
    nested = {name: {"x": x} for name, x in params.items()}
    checkpoints.save(TrainState(jnp.int32(1), nested, {}, {}, average), Position())
    checkpoints.close()
    others = jax.live_arrays()
    order = []

    def convert(keys: tuple[str, ...], array: jax.Array) -> jax.Array:
        """Converts an array to integers, and checks which arrays in floats are in memory."""
        order.append(keys)
        read = [x for x in jax.live_arrays() if not any(x is other for other in others)]
        floats = [x for x in read if x.dtype == jnp.float32]
        assert {x.shape for x in floats} == {array.shape}
        return array.astype(jnp.int8)

    _, found = restore_variables(tmp_path, convert=convert)
    assert order == [("params", name, "x") for name in ("large", "middle", "small")]
    expected = {name: {"x": np.full(shape, 7 + averaged)} for name, shape in shapes.items()}
    jax.tree.map(np.testing.assert_array_equal, found["params"], expected)
    assert all(x.dtype == jnp.int8 for x in jax.tree.leaves(found))


def test_a_second_damaged_checkpoint_of_a_step_is_set_aside_too(saved: pathlib.Path) -> None:
    for _ in range(2):
        damage(saved / "2")
        assert newest(saved) == (1, 1)
        save(saved, 2)
    assert {path.name for path in saved.iterdir()} == {"1", "2", "2.unreadable", "2.unreadable-2"}
    assert newest(saved) == (2, 2)


def test_nothing_is_renamed_where_that_would_not_help(saved: pathlib.Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"params/x has the shape \(40, 100\) in the checkpoint"):
        newest(saved, name="y")
    for error in (ValueError("seed was 1 and is 2"), PermissionError("denied")):
        monkeypatch.setattr(Position, "error", error)
        with pytest.raises(type(error), match=str(error)):
            newest(saved)
    monkeypatch.setattr(Position, "error", None)
    assert finished_steps(saved) == [1, 2] and newest(saved) == (2, 2)
    for step in (1, 2):
        damage(saved / str(step))
    with pytest.raises(ValueError, match=r"checkpoint .*/2 cannot be read .*\. Put a good copy in"):
        newest(saved)
    assert finished_steps(saved) == [1, 2]


def test_the_latest_and_the_best_are_kept_when_the_score_falls(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_latest=2, keep_best=1)
    for step, score in enumerate((0.1, 0.9, 0.5, math.nan, None, 0.2, 0.95), start=1):
        checkpoints.save(TrainState(np.asarray(step, np.int32), {"x": np.ones(2)}, {}, {}), None)
        checkpoints.wait()
        assert checkpoints.steps[-1] == step, "the newest was deleted"
        if score is not None:
            checkpoints.record_score(step, score)
    assert checkpoints.steps == [2, 6, 7]
    checkpoints.prune()
    assert checkpoints.steps == [6, 7]
    checkpoints.close()
    for latest in range(4):
        for count in range(6):
            kept = Retention(latest, 0, {}).steps_to_keep(range(count))
            assert kept == set(range(max(count - latest, 0), count))
