"""Batches against the stored rows, and their order against itself after a restart."""

import collections
import dataclasses
import itertools
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.pipeline import Stream
from tests.data import small

CONFIG = DataConfig("small", inputs_length=32, targets_length=8, batch_size=12, shards=4)


@pytest.fixture(scope="module", autouse=True)
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    small.register(folder)
    return folder


def config(**changes: object) -> DataConfig:
    return dataclasses.replace(CONFIG, **changes)


def spell(tokens: np.ndarray) -> str:
    """The text of one example's ids."""
    return bytes(int(token) - 3 for token in tokens if token > 1).decode()


def texts(batch: dict[str, np.ndarray]) -> list[str]:
    return [spell(row) for row in batch["encoder_input_tokens"]]


def drawn(stream: Stream, batches: int) -> list[str]:
    return [row for batch in itertools.islice(stream, batches) for row in texts(batch)]


def test_a_batch_holds_what_t5_trains_on() -> None:
    batch = next(small.open_small(CONFIG))
    assert {name: value.shape for name, value in batch.items()} == {
        "encoder_input_tokens": (12, 32),
        "decoder_input_tokens": (12, 8),
        "decoder_target_tokens": (12, 8),
        "decoder_loss_weights": (12, 8),
    }
    assert {str(v.dtype) for k, v in batch.items() if k != "decoder_loss_weights"} == {"int32"}
    assert batch["decoder_loss_weights"].dtype == np.float32
    for row, string in enumerate(texts(batch)):
        name, number = string.split()[:2]
        assert string == small.text(name, int(number))
        source, target = small.ids(string), small.ids(number)
        expected = {
            "encoder_input_tokens": source,
            "decoder_input_tokens": [0, *target[:-1]],
            "decoder_target_tokens": target,
            "decoder_loss_weights": [1] * len(target),
        }
        for key, values in expected.items():
            padded = values + [0] * (batch[key].shape[1] - len(values))
            np.testing.assert_array_equal(batch[key][row], padded)


def test_long_examples_are_cut_before_eos() -> None:
    batch = next(small.open_small(config(inputs_length=6, targets_length=2)))
    assert (batch["encoder_input_tokens"][:, -1] <= 1).all()
    assert (batch["decoder_target_tokens"][:, 1] <= 1).all()
    assert batch["decoder_loss_weights"].sum() == 24


def test_packed_rows_hold_the_unpacked_examples() -> None:
    packed = config(inputs_length=32, targets_length=16, pack=True, max_segments=3)
    plain = small.open_small(dataclasses.replace(packed, pack=False), shards=[1])
    sizes: list[int] = []
    seen: list[str] = []
    for batch in itertools.islice(small.open_small(packed, shards=[1]), 10):
        for row in range(3):
            parts = {name: value[row] for name, value in batch.items()}
            segments = parts["encoder_segment_ids"].max()
            sizes.append(int(segments))
            for segment in range(1, segments + 1):
                source = parts["encoder_segment_ids"] == segment
                target = parts["decoder_segment_ids"] == segment
                string = spell(parts["encoder_input_tokens"][source])
                answer = small.ids(string.split()[1])
                assert parts["decoder_target_tokens"][target].tolist() == answer
                assert parts["decoder_input_tokens"][target].tolist() == [0, *answer[:-1]]
                assert parts["decoder_loss_weights"][target].tolist() == [1] * len(answer)
                assert parts["decoder_positions"][target].tolist() == list(range(len(answer)))
                assert parts["encoder_positions"][source].tolist() == list(range(source.sum()))
                seen.append(string)
            padding = parts["encoder_segment_ids"] == 0
            assert not parts["encoder_input_tokens"][padding].any()
            assert not parts["encoder_positions"][padding].any()
    assert max(sizes) == 3 == packed.segments_per_row
    assert min(sizes) < 3
    examples = collections.Counter(drawn(plain, 60))
    assert not collections.Counter(seen) - examples
    assert dataclasses.replace(packed, max_segments=None).segments_per_row == 2


def test_the_seed_decides_the_order() -> None:
    first = small.digests(small.open_small(CONFIG), 5)
    assert small.digests(small.open_small(CONFIG), 5) == first
    assert small.digests(small.open_small(config(seed=1)), 5) != first


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_of_a_shard_gives_each_of_its_examples_once(shuffle: bool) -> None:
    stream = small.open_small(
        config(mixture="small_many", batch_size=40, shuffle=shuffle), shards=[2]
    )
    per_epoch = 2500 // 4
    rows = [int(string.split()[1]) for string in drawn(stream, 3 * per_epoch // 10)]
    first, second = rows[:per_epoch], rows[per_epoch : 2 * per_epoch]
    stored = stored_numbers()
    mine = stored[2::4]
    assert sorted(first) == sorted(second) == sorted(mine)
    if shuffle:
        assert first != second
        assert mine != first
        assert set(first[:256]) == set(mine[:256])  # nothing beyond the first chunk was needed
        assert set(second[:256]) != set(mine[:256])
    else:
        assert first == second == mine


def stored_numbers() -> list[int]:
    """Row numbers of `small_many` in stored order, read without SeqIO."""
    import seqio
    import tensorflow_datasets as tfds

    source = seqio.TaskRegistry.get("small_many").source
    rows = tfds.as_numpy(source.get_dataset("train", shuffle=False))
    return [int(row["text"].split()[1]) for row in rows]


def test_tasks_are_drawn_by_their_rates() -> None:
    names = collections.Counter(
        string.split()[0] for string in drawn(small.open_small(CONFIG), 500)
    )
    total = sum(names.values())
    assert total == 6000
    assert "never" not in names
    for name, rate in (("many", 3), ("few", 1), ("made", 2)):
        p = rate / 6
        assert abs(names[name] / total - p) < 3 * np.sqrt(p * (1 - p) / total)


def test_shards_do_not_draw_the_same_tasks() -> None:
    names = np.array([s.split()[0] for s in drawn(small.open_small(CONFIG), 50)]).reshape(50, 4, 3)
    assert (names[:, 0] != names[:, 1]).any()


@pytest.mark.parametrize("mixture", ["small", "small_live"])
def test_hosts_that_share_the_shards_make_the_same_batch(
    mixture: str, tmp_path: pathlib.Path
) -> None:
    whole = small.open_small(config(mixture=mixture))
    hosts = [small.open_small(config(mixture=mixture), shards=part) for part in ([0], [1, 2], [3])]
    for _ in range(3):
        parts = [next(host) for host in hosts]
        for name, value in next(whole).items():
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), value)
    for i, host in enumerate(hosts):
        host.save(tmp_path / str(i))
    later = small.digests(whole, 3)
    # Other hosts: the files of all shards come together.
    for i in (1, 2):
        shutil.copytree(tmp_path / str(i), tmp_path / "0", dirs_exist_ok=True)
    again = small.open_small(config(mixture=mixture))
    again.restore(tmp_path / "0")
    assert small.digests(again, 3) == later


@pytest.mark.slow
def test_a_new_process_continues_bit_by_bit(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    arguments, expected = [str(data_dir)], []
    for mixture, pack, steps in (("small", True, 130), ("small_live", False, 40)):
        settings = config(mixture=mixture, shards=2, pack=pack, inputs_length=64)
        position = tmp_path / mixture
        stream = small.open_small(settings)
        small.digests(stream, steps)
        stream.save(position)
        expected += small.digests(stream, 12)
        assert sum(path.stat().st_size for path in position.iterdir()) < 1_000_000
        arguments += [str(position), json.dumps(dataclasses.asdict(settings))]
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.small", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == expected


def test_every_step_of_two_epochs_can_be_restored(tmp_path: pathlib.Path) -> None:
    settings = config(mixture="small_few", shards=2, batch_size=2, pack=True, inputs_length=64)
    stream, expected = small.open_small(settings), []
    for step in range(20):
        stream.save(tmp_path / str(step))
        expected += small.digests(stream, 1)
    again = small.open_small(settings)
    for step in range(19, -1, -1):
        again.restore(tmp_path / str(step))
        assert small.digests(again, min(2, 20 - step)) == expected[step : step + 2]


def test_a_position_belongs_to_its_stream(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    small.open_small(CONFIG).save(tmp_path)
    for changes, key in (({"seed": 3}, "seed was 0 and is 3"), ({"shards": 2}, "shards was 4")):
        with pytest.raises(ValueError, match=key):
            small.open_small(config(**changes)).restore(tmp_path)
    small.register(data_dir, word=0)
    with pytest.raises(ValueError, match=r"checksum of small_few was \d+ and is"):
        small.open_small(CONFIG).restore(tmp_path)
    small.register(data_dir)
    small.open_small(CONFIG).restore(tmp_path)
    (tmp_path / "shard-00003-of-00004.json").unlink()
    with pytest.raises(ValueError, match=r"lacks .*shard-00003-of-00004\.json"):
        small.open_small(CONFIG).restore(tmp_path)


def test_other_rates_are_another_stream(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import seqio

    small.open_small(CONFIG).save(tmp_path)
    seqio.MixtureRegistry.remove("small")
    seqio.MixtureRegistry.add("small", list((small.FIXED | {"small_few": 1.5}).items()))
    with pytest.raises(ValueError, match=r"rate of small_few was 1\.0 and is 1\.5"):
        small.open_small(CONFIG).restore(tmp_path)
    small.register(data_dir)


def test_settings_that_cannot_work_are_said_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"batch_size=13 .*shards=4; .* are 12 and 16"):
        config(batch_size=13)
    with pytest.raises(ValueError, match=r"batch_size=3 .* the smallest multiple is 4"):
        config(batch_size=3)
    with pytest.raises(ValueError, match=r"data\.shards is 0; allowed: 1 to 1024"):
        config(shards=0)
    with pytest.raises(ValueError, match=r"data\.max_segments is 0; allowed: 1 to"):
        config(max_segments=0)
    with pytest.raises(ValueError, match=r"data\.seed is -1"):
        config(seed=-1)
    with pytest.raises(
        FileNotFoundError, match=r"no task of 'small' has data for the split 'test'"
    ):
        small.open_small(config(split="test"))
    with pytest.raises(ValueError, match=r"small_few.* has 40 examples, fewer than shards=64"):
        small.open_small(config(shards=64, batch_size=64))
    with pytest.raises(ValueError, match=r"no example for shard 63 of 64"):
        next(small.open_small(config(mixture="small_noisy", shards=64, batch_size=64), shards=[63]))


def test_settings_alone_load_no_tensorflow() -> None:
    code = "import sys, synthesizer_jax.tasks.streams; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
