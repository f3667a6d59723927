"""Checksums of arrays over devices, and what a checkpoint does with them."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.checkpoints.contents import CONTENTS
from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.training.state import TrainState

KINDS = ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]


def array(kind: str, shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.asarray(jnp.asarray(rng.integers(0, 2, shape) + 0.5, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_bit_changes_the_checksum(kind: str) -> None:
    x = array(kind, (2, 3))
    whole = checksums.checksums({"x": x})
    found = set()
    for place in range(x.nbytes):
        for bit in range(1 if kind == "bool" else 8):
            bytes_ = bytearray(x.tobytes())
            bytes_[place] ^= 1 << bit
            changed = np.frombuffer(bytes(bytes_), x.dtype).reshape(x.shape)
            found.add(checksums.checksums({"x": changed})["x"])
    assert whole["x"] not in found
    assert len(found) == x.nbytes * (1 if kind == "bool" else 8)


@pytest.mark.parametrize("spec", [P(), P("a"), P("b", "a"), P(("a", "b")), P(None, "b")])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_the_checksum_is_the_same_on_every_mesh(kind: str, spec: P) -> None:
    x = array(kind, (8, 16))
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    assert checksums.checksums({"x": placed}) == checksums.checksums({"x": x})


@given(st.permutations(range(6)))
@settings(deadline=None, max_examples=10, derandomize=True)
def test_places_count(order: list[int]) -> None:
    x = np.arange(6, dtype=np.float32)
    same = checksums.checksums(x[np.array(order)]) == checksums.checksums(x)
    assert same == (order == sorted(order))


def test_parts_add_up() -> None:
    parts = [{"x": checksums.MODULUS - 1, "y": 3}, {"x": 2}]
    assert checksums.combine_checksums(parts) == {"x": 1, "y": 3}
    assert checksums.differing_arrays({"x": 1, "y": 3}, {"x": 1, "y": 4, "z": 5}) == ["y"]


class Position:
    """A data stream that is nothing but its position."""

    def __init__(self) -> None:
        self.taken = 0

    def save(self, directory: pathlib.Path) -> None:
        (directory / "position").write_text(str(self.taken))

    def restore(self, directory: pathlib.Path) -> None:
        self.taken = int((directory / "position").read_text())


def state(step: int) -> TrainState:
    x = jnp.arange(4000, dtype=jnp.float32).reshape(40, 100) * step
    return TrainState(jnp.asarray(step, jnp.int32), {"x": x}, {}, {"m": x + 1})


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with checkpoints of the steps 1 and 2."""
    checkpoints, stream = Checkpoints(tmp_path, asynchronous=False), Position()
    for step in (1, 2):
        stream.taken = step
        checkpoints.save(state(step), stream)
    checkpoints.close()
    return tmp_path


def newest(directory: pathlib.Path) -> tuple[int, int]:
    """Step and position of what is restored."""
    checkpoints, stream = Checkpoints(directory), Position()
    restored = checkpoints.restore_newest(jax.eval_shape(lambda: state(0)), stream)
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, restored, state(int(restored.step)))
    return int(restored.step), stream.taken


def test_whole_checkpoints_are_restored(saved: pathlib.Path) -> None:
    assert newest(saved) == (2, 2)


def flip(path: pathlib.Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(bytes(data))


def test_a_flipped_bit_of_the_arrays_never_passes(saved: pathlib.Path, caplog) -> None:
    """Wherever it is: the step before is restored, or the bit was of no consequence."""
    files = [p for p in (saved / "2" / "state").rglob("*") if p.is_file() and p.parent.name == "d"]
    (path,) = sorted(files, key=lambda p: p.stat().st_size)[-1:]
    rng, whole, aside = np.random.default_rng(0), path.read_bytes(), 0
    for place in rng.integers(0, len(whole), 12):
        flip(path, int(place), int(rng.integers(8)))
        aside += newest(saved)[0] == 1
        if (unreadable := saved / "2.unreadable").exists():
            unreadable.rename(saved / "2")
        path.write_bytes(whole)
    assert aside > 6
    assert "arrays are not what was saved" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda step: (step / "data" / "position").write_text("7"),
            "position is not what was saved",
        ),
        (lambda step: (step / "data" / "position").unlink(), "No such file"),
        (lambda step: flip(step / CONTENTS / "0.json", 0), "0.json cannot be read"),
        (
            lambda step: (step / CONTENTS / "0.json").write_text('{"step": 2}'),
            "0.json cannot be read",
        ),
        (lambda step: (step / CONTENTS / "0.json").unlink(), "is empty"),
        (lambda step: rewrite(step / CONTENTS / "0.json", step=3), "2 holds step 3"),
    ],
)
def test_other_damage_is_noticed(saved: pathlib.Path, caplog, damage, message: str) -> None:
    damage(saved / "2")
    assert newest(saved) == (1, 1)
    assert message in caplog.text
    assert (saved / "2.unreadable").is_dir()


def rewrite(path: pathlib.Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_step_under_another_number_is_set_aside(saved: pathlib.Path, caplog) -> None:
    (saved / "2").rename(saved / "99")
    assert newest(saved) == (1, 1)
    assert "99 holds step 2" in caplog.text


def test_checkpoints_of_earlier_versions_are_read(saved: pathlib.Path) -> None:
    shutil.rmtree(saved / "2" / CONTENTS)
    assert newest(saved) == (2, 2)
