"""Training streams over prepared tasks: what batches hold, in which order, and going on at any step."""

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

from synthesizer_jax.cli.settings import override
from synthesizer_jax.data import prepared as prepared_files
from synthesizer_jax.data.objectives import OBJECTIVES, FullLM
from synthesizer_jax.data.pipeline import OtherStreamError
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.task_streams import ExampleStream
from synthesizer_jax.registry import from_json, to_json
from synthesizer_jax.training import experiment  # noqa: F401 - it registers DataConfig
from tests.data import small

PACKED = {"pack": True, "max_segments": 3}
SPANS = OBJECTIVES["span_3_15_u_u"]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The prepared tasks; they are not to be changed."""
    folder = tmp_path_factory.mktemp("data")
    small.write(folder)
    return folder


def test_a_batch_holds_what_t5_trains_on(data_dir: pathlib.Path) -> None:
    batch = next(small.stream(data_dir))
    assert {name: value.shape for name, value in batch.items()} == {
        "encoder_input_tokens": (16, 32),
        "decoder_input_tokens": (16, 12),
        "decoder_target_tokens": (16, 12),
        "decoder_loss_weights": (16, 12),
    }
    assert {str(v.dtype) for k, v in batch.items() if k != "decoder_loss_weights"} == {"int32"}
    assert batch["decoder_loss_weights"].dtype == np.float32
    for row, (string, _) in enumerate(small.examples_of(batch)):
        name, number = string.split()[:2]
        source, target = small.example(name, int(number))
        expected = {
            "encoder_input_tokens": source,
            "decoder_input_tokens": [0, *target[:-1]],
            "decoder_target_tokens": target,
            "decoder_loss_weights": [1] * len(target),
        }
        for key, values in expected.items():
            padded = values + [0] * (batch[key].shape[1] - len(values))
            np.testing.assert_array_equal(batch[key][row], padded)


def test_long_examples_are_cut_before_what_the_task_appends(data_dir: pathlib.Path) -> None:
    changes = {"mixture": "small_sentinel", "inputs_length": 6, "targets_length": 3}
    batch = next(small.stream(data_dir, **changes))
    last = small.VOCABULARY.vocab_size - 1
    assert (batch["encoder_input_tokens"][:, -2:] == [last, 1]).all()
    for tokens in batch["decoder_target_tokens"].tolist():
        assert tokens[: tokens.index(1)][-1] == last


def test_packed_rows_hold_whole_examples(data_dir: pathlib.Path) -> None:
    seen = set()
    for batch in itertools.islice(small.stream(data_dir, inputs_length=64, **PACKED), 6):
        for row in range(16):
            parts = {name: value[row] for name, value in batch.items()}
            for number in range(1, parts["encoder_segment_ids"].max() + 1):
                source = parts["encoder_segment_ids"] == number
                target = parts["decoder_segment_ids"] == number
                name, index = small.spell(parts["encoder_input_tokens"][source]).split()[:2]
                wanted = small.example(name, int(index))
                assert parts["encoder_input_tokens"][source].tolist() == wanted[0]
                assert parts["decoder_target_tokens"][target].tolist() == wanted[1]
                assert parts["decoder_input_tokens"][target].tolist() == [0, *wanted[1][:-1]]
                assert parts["decoder_loss_weights"][target].tolist() == [1] * len(wanted[1])
                assert parts["decoder_positions"][target].tolist() == [*range(target.sum())]
                assert parts["encoder_positions"][source].tolist() == [*range(source.sum())]
            padding = parts["encoder_segment_ids"] == 0
            assert not parts["encoder_input_tokens"][padding].any()
            assert not parts["encoder_positions"][padding].any()
            seen.add(int(parts["encoder_segment_ids"].max()))
    assert max(seen) == 3 > min(seen)


def test_packing_neither_loses_nor_repeats_examples(data_dir: pathlib.Path) -> None:
    changes = {"mixture": "small_many", "batch_size": 8, "inputs_length": 64, "here": [3]}
    packed = small.stream(data_dir, pack=True, max_segments=8, **changes)
    seen: list[str] = []
    while len(seen) < 600:
        seen += small.inputs(packed, 1)
    waiting = [small.spell(example.inputs) for example in packed.position()[3].pending]
    drawn = small.inputs(small.stream(data_dir, **changes), len(seen) + len(waiting))
    assert collections.Counter(seen + waiting) == collections.Counter(drawn)


def test_packing_ends_an_epoch_of_a_small_task_before_the_next(data_dir: pathlib.Path) -> None:
    """40 examples in 8 shards: the 128 pending ones of a shard are of 26 epochs."""
    changes = {"mixture": "small_few", "batch_size": 8, "inputs_length": 40}
    packed = small.stream(data_dir, pack=True, max_segments=8, here=[5], **changes)
    seen = small.inputs(packed, 60)
    assert all(len(set(seen[start : start + 5])) == 5 for start in range(0, 60, 5))


def test_the_seed_decides_the_order(data_dir: pathlib.Path) -> None:
    first = small.digests(small.stream(data_dir), 5)
    assert small.digests(small.stream(data_dir), 5) == first
    assert small.digests(small.stream(data_dir, seed=1), 5) != first


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_of_a_shard_gives_each_of_its_examples_once(
    data_dir: pathlib.Path, shuffle: bool
) -> None:
    changes = {"mixture": "small_many", "batch_size": 40, "shards": 4, "shuffle": shuffle}
    drawn = small.inputs(small.stream(data_dir, here=[2], **changes), 125)
    rows = [int(string.split()[1]) for string in drawn]
    own, first, second = [*range(2, 2500, 4)], rows[:625], rows[625:]
    assert sorted(first) == sorted(second) == own
    if shuffle:
        assert own != first != second
        assert max(first[:256]) < 1024 < max(second[:256])  # only the first epoch reads by chunks
    else:
        assert own == first == second


def test_tasks_are_drawn_by_their_rates(data_dir: pathlib.Path) -> None:
    draws = 20_000
    stream = small.stream(data_dir, batch_size=200, inputs_length=9)
    names = [text.split()[0] for text in small.inputs(stream, draws // 200)]
    counts = collections.Counter(names)
    assert counts.keys() == {"many", "few", "sentinel"[:7]}
    for name, rate in (("many", 3), ("few", 1), ("sentine", 2)):
        p = rate / 6
        assert abs(counts[name] / draws - p) < 3 * np.sqrt(p * (1 - p) / draws)
    by_shard = np.array(names).reshape(-1, 8, 25)
    assert (by_shard[:, 0] != by_shard[:, 1]).any()


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_hosts_read_disjoint_shards_that_cover_everything(
    data_dir: pathlib.Path, hosts: int
) -> None:
    changes = {"mixture": "small_many", "batch_size": 8}
    whole = small.stream(data_dir, **changes)
    parts = [
        small.stream(data_dir, here=shards.tolist(), **changes)
        for shards in np.array_split(np.arange(8), hosts)
    ]
    read: list[set[str]] = [set() for _ in parts]
    for _ in range(2500 // 8):
        batches = [next(part) for part in parts]
        for name, value in next(whole).items():
            np.testing.assert_array_equal(np.concatenate([b[name] for b in batches]), value)
        for own, batch in zip(read, batches, strict=True):
            own.update(small.inputs(iter([batch]), 1))
    assert sum(map(len, read)) == len(set().union(*read)) == 2500 // 8 * 8
    rest = {small.text("many", i) for i in range(2500)} - set().union(*read)
    assert len(rest) == 2500 % 8  # the longer shards' last examples


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (small.CONFIG, {}),
        (small.CONFIG, {"inputs_length": 64, **PACKED}),
        (small.TEXT_CONFIG, {"pack": True}),
        *(
            (small.TEXT_CONFIG, {"mixture": "small_both", "objective": OBJECTIVES[name], **more})
            for name, more in (("ul2", {}), ("span_3_15_u_u", {"pack": True}), ("prefix_lm", {}))
        ),
    ],
    ids=["pairs", "packed pairs", "packed texts", "ul2", "packed spans", "prefix_lm"],
)
def test_every_step_can_be_restored(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, config, changes: dict
) -> None:
    if "objective" in changes:
        changes = {"inputs_length": 48, "targets_length": 48, **changes}
    stream, expected = small.stream(data_dir, config, **changes), []
    for step in range(25):
        stream.save(tmp_path / str(step))
        expected += small.digests(stream, 1)
    again = small.stream(data_dir, config, **changes)
    for step in range(24, -1, -1):
        again.restore(tmp_path / str(step))
        assert small.digests(again, 2)[: 25 - step] == expected[step : step + 2]


def test_other_hosts_in_a_new_process_continue_without_tensorflow(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    changes = {"inputs_length": 64, **PACKED}
    hosts = [
        small.stream(data_dir, here=part, **changes) for part in ([0], [1, 2, 3, 4], [5, 6, 7])
    ]
    whole = small.stream(data_dir, **changes)
    for _ in range(40):
        next(whole)
        for host in hosts:
            next(host)
    for i, host in enumerate(hosts):
        host.save(tmp_path / str(i))
        shutil.copytree(tmp_path / str(i), tmp_path / "all", dirs_exist_ok=True)
    arguments = [str(data_dir), json.dumps(changes), str(tmp_path / "all")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.small", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == small.digests(whole, 12)


def test_a_position_belongs_to_its_stream(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    small.stream(data_dir, pack=True).save(tmp_path / "saved")
    own = pathlib.Path(shutil.copytree(data_dir, tmp_path / "data"))
    tasks = PreparedTasks(own, small.VOCABULARY)
    info = tasks.directory("small_few", "train") / "info.json"
    record = json.loads(info.read_text())

    def refused(message: str, **changes: object) -> None:
        with pytest.raises(OtherStreamError, match=message):
            small.stream(own, **{"pack": True, **changes}).restore(tmp_path / "saved")

    refused("seed was 0 and is 3", seed=3)
    refused("shards was 8", shards=4)
    refused("pack was True", pack=False)
    info.write_text(json.dumps(record | {"checksum": 5}))
    refused(r"checksum of small_few was \d+ and is 5")
    info.write_text(json.dumps(record))
    tasks.save_rates("small", small.MIXTURES["small"] | {"small_few": 1.5})
    refused(r"rate of small_few was 1\.0 and is 1\.5")
    (tmp_path / "saved" / "shard-00003-of-00008.json").unlink()
    with pytest.raises(ValueError, match=r"lacks .*shard-00003-of-00008\.json"):
        small.stream(data_dir, pack=True).restore(tmp_path / "saved")


def test_settings_that_cannot_work_are_said_in_one_sentence(data_dir: pathlib.Path) -> None:
    for changes, message in (
        ({"batch_size": 13, "shards": 4}, r"batch_size=13 .* data.shards=4; .* are 12 and 16"),
        ({"batch_size": 3, "shards": 4}, r"batch_size=3 .* the smallest multiple is 4"),
        ({"inputs_length": -1}, r"inputs_length is -1; allowed: 0 to"),
        (
            {"inputs_length": 0, "buckets": ((1, 4),)},
            r"holds \(1, 4\); allowed: 0 to inputs_length=0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(small.CONFIG, **changes)
    with pytest.raises(
        FileNotFoundError, match=r"no task of 'small' is prepared for .* 'test'.*run"
    ):
        small.stream(data_dir, split="test")
    with pytest.raises(ValueError, match=r"small_few.* has 40 examples, fewer than shards=64"):
        small.stream(data_dir, shards=64, batch_size=64)
    with pytest.raises(ValueError, match=r"small_few has inputs.*set data\.inputs_length"):
        small.stream(data_dir, mixture="small_few", inputs_length=0)
    with pytest.raises(ValueError, match=r"data\.objective makes examples of texts"):
        small.stream(data_dir, objective=SPANS)
    with pytest.raises(ValueError, match=r"inputs_length is 0; .* needs 2 or more"):
        small.stream(data_dir, small.TEXT_CONFIG, objective=SPANS)


@pytest.mark.parametrize("changes", [{}, {"pack": True}, {"buckets": ((0, 16),)}])
def test_batches_of_texts_have_targets_only(data_dir: pathlib.Path, changes: dict) -> None:
    batch = next(small.stream(data_dir, small.TEXT_CONFIG, **changes))
    assert batch["encoder_input_tokens"].shape == (16, 0)
    targets = batch["decoder_target_tokens"]
    np.testing.assert_array_equal(targets != 0, batch["decoder_loss_weights"] == 1)
    for row in targets.tolist():
        for string in small.spell(np.array([33 if i == 1 else i for i in row])).split(chr(30))[:-1]:
            name, number = string.split()[:2]
            assert string == small.text(name, int(number))
    if "pack" in changes:
        assert batch["decoder_segment_ids"].max() > 1


def test_texts_and_pairs_share_a_batch(data_dir: pathlib.Path) -> None:
    stream = small.stream(data_dir, mixture="small_both", inputs_length=32, targets_length=32)
    lengths = np.concatenate([(next(stream)["encoder_input_tokens"] != 0).sum(1) for _ in range(4)])
    assert (lengths == 0).any() and (lengths > 0).any()


def test_spans_restore_the_text(data_dir: pathlib.Path) -> None:
    """Whole documents one after another, in segments, without the EOS of the task between them."""
    changes = {"inputs_length": 32, "shards": 1, "mixture": "small_notes", "objective": SPANS}
    batch = next(small.stream(data_dir, small.TEXT_CONFIG, **changes))
    found = b""
    sides = batch["encoder_input_tokens"], batch["decoder_target_tokens"]
    for source, target in zip(*sides, strict=True):
        assert (source == 1).sum() == (target == 1).sum() == 1
        spans: dict[int, list[int]] = {}
        for token in target[: target.tolist().index(1)].tolist():
            if token >= 259:
                span = spans.setdefault(token, [])
            else:
                span.append(token)
        for token in source[: source.tolist().index(1)].tolist():
            found += bytes(i - 3 for i in spans.get(token, [token]))
    texts = [small.text("notes", i) for i in range(40)]
    epoch = found.decode()[: len("".join(texts))]
    assert len(epoch) == len("".join(texts))
    rest = [text for text in texts if text not in epoch]
    assert not rest


def test_masked_targets_have_no_weight(data_dir: pathlib.Path) -> None:
    changes = {"inputs_length": 32, "objective": OBJECTIVES["masked_lm"]}
    batch = next(small.stream(data_dir, small.TEXT_CONFIG, **changes))
    weights, targets = batch["decoder_loss_weights"], batch["decoder_target_tokens"]
    np.testing.assert_array_equal(weights, targets != 0)
    assert 0 < weights.sum() < (batch["encoder_input_tokens"] != 0).sum() / 4


def test_a_task_s_own_objective_comes_first(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    changes = {"mixture": "small_both", "inputs_length": 32}
    stream = small.stream(data_dir, small.TEXT_CONFIG, objective=SPANS, **changes)
    found = stream.fingerprint()
    assert found["objective of small_own"] == repr(FullLM(documents=3))
    assert found["objective of small_letters"] == repr(SPANS)
    assert "objective of small_few" not in found and "objective" not in found
    stream.save(tmp_path)
    for other in (None, OBJECTIVES["iid_15_u_u"]):
        with pytest.raises(OtherStreamError, match="objective of small_letters was"):
            again = small.stream(data_dir, small.TEXT_CONFIG, objective=other, **changes)
            again.restore(tmp_path)


def test_objectives_are_named_on_the_command_line() -> None:
    changed = override(small.TEXT_CONFIG, "objective=ul2")
    assert changed.objective == OBJECTIVES["ul2"]
    assert override(changed, "objective=none") == small.TEXT_CONFIG
    with pytest.raises(ValueError, match=r"no objective 'span_3_15'.*span_3_15_u_u"):
        override(small.TEXT_CONFIG, "objective=span_3_15")
    for name, objective in OBJECTIVES.items():
        config = dataclasses.replace(small.TEXT_CONFIG, objective=objective)
        assert from_json(to_json(config)) == config, name


def test_large_tasks_keep_few_chunks(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every epoch yields every example once, the first in the same order as of a task in memory."""
    lengths = {"inputs": 32, "targets": 12}
    tasks = PreparedTasks(data_dir, small.VOCABULARY)
    whole = tasks.open("small_many", "train", lengths)
    monkeypatch.setattr(prepared_files, "RESIDENT", 1000)
    monkeypatch.setattr(prepared_files, "KEPT_CHUNKS", 1)
    large = tasks.open("small_many", "train", lengths)
    assert whole.is_resident and not large.is_resident

    def order(examples, shard: int):
        seed = np.random.SeedSequence(5, spawn_key=(shard, 1))
        stream = ExampleStream(examples, shard=(shard, 2), seed=seed)
        while True:
            next(stream)
            yield stream.index

    taken = [order(large, shard) for shard in (0, 1)]
    epochs = [[next(stream) for stream in taken for _ in range(1250)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(2500)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    first = order(whole, 0)
    assert epochs[0][:1250] == [next(first) for _ in range(1250)]
    chunks = [[number // 1024 for number in epoch[:1250]] for epoch in epochs]
    assert all(np.count_nonzero(np.diff(epoch)) == 2 for epoch in chunks)
    assert len(large._chunks) <= 1
    changes = {"mixture": "small_many", "batch_size": 40}
    before, after = (small.stream(data_dir, **changes) for _ in range(2))
    small.digests(before, 2500 // 40 + 20)
    before.save(tmp_path)
    after.restore(tmp_path)
    assert small.digests(after, 50) == small.digests(before, 50)
