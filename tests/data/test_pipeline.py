"""Tests training streams over prepared tasks: contents and order of batches, and continuing."""

import collections
import dataclasses
import itertools
import json
import pathlib
import shutil
import types

import numpy as np
import pytest

from synthesizer_jax.base.registry import from_json, to_json
from synthesizer_jax.cli.recipes import override
from synthesizer_jax.data import prepared as prepared_files
from synthesizer_jax.data.batch import GROUP
from synthesizer_jax.data.objectives import OBJECTIVES, FullLM
from synthesizer_jax.data.pipeline import DEPTH, PrefetchedStream, Stream
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes, Classes
from synthesizer_jax.tasks.splits import open_stream
from synthesizer_jax.training import experiment  # noqa: F401 - registers DataConfig
from tests.data import small

PACKED = {"inputs_length": 64, "pack": True, "max_segments": 3}
SPANS = OBJECTIVES["span_3_15_u_u"]
SPANNED = {"mixture": "small_both", "inputs_length": 48, "targets_length": 48}
BUCKETED = {"shards": 4, "batch_size": 12, "targets_length": 8, "buckets": ((12, 8), (18, 8))}
WORDS = tuple(map(str, range(39, -1, -1)))
"""The targets of `small_few`. Many of them have the same first byte."""
CLASSES = {"mixture": "small_few", "targets_length": 1, "batch_size": 8, "classes": WORDS}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The prepared tasks. Tests must not change them."""
    folder = tmp_path_factory.mktemp("data")
    small.write(folder)
    return folder


def test_rows_hold_what_t5_trains_on(data_dir: pathlib.Path) -> None:
    """Rows contain tokens, shifted targets and loss weights. Packed rows also contain segments."""
    batch = next(small.stream(data_dir))
    assert {name: (value.shape, str(value.dtype)) for name, value in batch.items()} == {
        "encoder_input_tokens": ((16, 32), "int32"),
        "decoder_input_tokens": ((16, 12), "int32"),
        "decoder_target_tokens": ((16, 12), "int32"),
        "decoder_loss_weights": ((16, 12), "float32"),
    }
    for changes in ({}, PACKED):
        segments = set()
        for batch in itertools.islice(small.stream(data_dir, **changes), 6):
            for fields in small.examples_of(batch):
                found = {name: x.tolist() for name, x in fields.items()}
                text = small.spell(fields["encoder_input_tokens"])
                inputs, targets = small.example(text.split()[0], int(text.split()[1]))
                assert found["encoder_input_tokens"] == inputs
                assert found["decoder_target_tokens"] == targets
                assert found["decoder_input_tokens"] == [0, *targets[:-1]]
                assert found["decoder_loss_weights"] == [1] * len(targets)
                if changes:
                    segments.update(found["decoder_segment_ids"])
            real = batch["encoder_input_tokens"] != 0
            if changes:
                assert not batch["encoder_segment_ids"][~real].any()
        assert segments == ({1, 2, 3} if changes else set())


def test_long_examples_are_cut_before_what_the_task_appends(data_dir: pathlib.Path) -> None:
    changes = {"mixture": "small_sentinel", "inputs_length": 6, "targets_length": 3}
    batch = next(small.stream(data_dir, **changes))
    last = small.VOCABULARY.vocab_size - 1
    assert (batch["encoder_input_tokens"][:, -2:] == [last, 1]).all()
    for tokens in batch["decoder_target_tokens"].tolist():
        assert tokens[: tokens.index(1)][-1] == last


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_of_a_shard_gives_each_of_its_examples_once(
    data_dir: pathlib.Path, shuffle: bool
) -> None:
    changes = {"mixture": "small_many", "batch_size": 40, "shards": 4, "shuffle": shuffle}
    drawn = small.inputs(small.stream(data_dir, here=[2], **changes), 188)
    rows = [int(string.split()[1]) for string in drawn]
    own = [*range(2, 2500, 4)]
    (first, second, third) = (rows[i : i + 625] for i in (0, 625, 1250))
    assert sorted(first) == sorted(second) == sorted(third) == own
    if not shuffle:
        assert own == first == second
        return
    assert own != first != second != third
    assert max(first[:256]) < 1024 < max(second[:256])  # only the first epoch is in order
    other = small.stream(data_dir, here=[2], seed=1, **changes)
    assert small.inputs(other, 2) != drawn[:20]


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


@pytest.mark.parametrize("changes", [{"mixture": "small_many", "batch_size": 8}, BUCKETED])
def test_hosts_read_disjoint_shards_that_cover_everything(
    data_dir: pathlib.Path, changes: dict
) -> None:
    """Hosts read disjoint shards that together cover all examples.

    With buckets, all hosts use the same lengths for a batch.
    """
    whole = small.stream(data_dir, **changes)
    shards = changes.get("shards", 8)
    hosts = [[0], [*range(1, shards - 1)], [shards - 1]]
    parts = [small.stream(data_dir, here=part, saved=part, **changes) for part in hosts]
    read: list[set[str]] = [set() for _ in parts]
    for _ in range(2500 // 8 if "buckets" not in changes else GROUP + 2):
        batches = [next(part) for part in parts]
        for name, value in next(whole).items():
            np.testing.assert_array_equal(np.concatenate([b[name] for b in batches]), value)
        for own, batch in zip(read, batches, strict=True):
            own.update(small.inputs(iter([batch]), 1))
    if "buckets" not in changes:
        assert sum(map(len, read)) == len(set().union(*read)) == 2500 // 8 * 8


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PACKED,
        BUCKETED,
        CLASSES,
        {"mixture": "small_texts", "inputs_length": 0, "targets_length": 32, "pack": True},
        {**SPANNED, "objective": OBJECTIVES["ul2"]},
        {**SPANNED, "objective": SPANS, "pack": True},
    ],
    ids=["pairs", "packed", "buckets", "classes", "packed texts", "ul2", "packed spans"],
)
def test_every_step_can_be_restored_from_the_files_of_other_hosts(
    data_dir, tmp_path, changes
) -> None:
    whole = small.stream(data_dir, **changes)
    expected = []
    shards = np.array_split(range(changes.get("shards", 8)), 2)
    hosts = [small.stream(data_dir, here=p.tolist(), saved=p.tolist(), **changes) for p in shards]
    for step in range(25):
        for host in hosts:
            host.save(tmp_path / str(step))
            next(host)
        expected += small.digests(whole, 1)
    again = small.stream(data_dir, **changes)
    for step in range(24, -1, -1):
        again.restore(tmp_path / str(step))
        assert small.digests(again, 2)[: 25 - step] == expected[step : step + 2]


def test_large_tasks_keep_few_chunks(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """A stream over a large task keeps only a few chunks in memory, and yields every example once.

    The first epoch has the same order as for a small task that fits into memory.
    """
    changes = {"mixture": "small_many", "batch_size": 50, "shards": 2}
    whole = small.inputs(small.stream(data_dir, **changes), 50)
    monkeypatch.setattr(prepared_files, "RESIDENT", 1000)
    monkeypatch.setattr(prepared_files, "KEPT_CHUNKS", 1)
    large = PreparedTasks(data_dir, small.VOCABULARY).open("small_many", "train", None)
    assert not large.is_resident
    assert [len(large[i][0]) > 0 for i in (0, 1024, 0)] and len(large._chunks) == 1
    stream = small.stream(data_dir, **changes)
    epochs = [small.inputs(stream, 50) for _ in range(3)]
    assert epochs[0] == whole
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(len(set(epoch)) == 2500 for epoch in epochs)
    rows = [int(text.split()[1]) for text in epochs[2]]
    for shard in range(2):
        chunks = np.array(rows).reshape(-1, 2, 25)[:, shard].reshape(-1) // 1024
        assert np.count_nonzero(np.diff(chunks)) == 2
    stream.save(tmp_path)
    after = small.stream(data_dir, **changes)
    after.restore(tmp_path)
    assert small.digests(after, 50) == small.digests(stream, 50)


def test_a_position_belongs_to_its_stream(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    saved = tmp_path / "saved"
    own = shutil.copytree(data_dir, tmp_path / "data")
    tasks = PreparedTasks(own, small.VOCABULARY)

    def refused(message: str, base: dict, **changes: object) -> None:
        small.stream(data_dir, **base).save(saved)
        with pytest.raises(ValueError, match=f"another stream: {message}"):
            small.stream(own, **{**base, **changes}).restore(saved)

    packed, spanned = {"pack": True}, {**SPANNED, "objective": SPANS}
    refused("seed was 0 and is now 3", packed, seed=3)
    refused("batch_size was 16|shards was 8", packed, shards=4)
    refused("pack was True", packed, pack=False)
    refused(r"buckets was \(\(12, 8\), \(18, 8\)\) in groups.* is now \(\)", BUCKETED, buckets=())
    refused("classes was", CLASSES, classes=WORDS[::-1])
    for other in (None, OBJECTIVES["ul2"]):
        refused("objective of small_letters was", spanned, objective=other)
    info = tasks.directory("small_few", "train") / "info.json"
    record = json.loads(info.read_text())
    info.write_text(json.dumps(record | {"checksum": 5}))
    refused(r"checksum of small_few was \d+ and is now 5", packed)
    info.write_text(
        json.dumps(record | {"examples": 39, "files": dict.fromkeys(record["files"], 39)})
    )
    refused(
        r"examples of small_few was 40 and is now 39\. Restore .* or start a new run from", packed
    )
    info.write_text(json.dumps(record))
    tasks.save_rates("small", small.MIXTURES["small"] | {"small_few": 1.5})
    refused(r"rate of small_few was 1\.0 and is now 1\.5", packed)
    (saved / "shard-00003-of-00008.json").unlink()
    with pytest.raises(ValueError, match=r"lacks .*shard-00003-of-00008\.json"):
        small.stream(data_dir, pack=True).restore(saved)


def test_a_position_of_another_version_is_valid(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Streams can continue from positions that earlier versions saved.

    Such a position may lack the numbers of examples or newer fields, or may contain default values.
    """
    stream = small.stream(data_dir)
    stream.save(tmp_path)
    path = tmp_path / "stream.json"
    saved = json.loads(path.read_text())
    assert "examples of small_many" in saved and "shuffle" not in saved
    kept = {k: v for k, v in saved.items() if not k.startswith("examples of")}
    path.write_text(json.dumps(kept | {"shuffle": True, "seed": 0, "pack": False}))
    stream.restore(tmp_path)
    path.write_text(json.dumps(kept | {"shuffle": False}))
    with pytest.raises(ValueError, match="shuffle was False and is now True"):
        stream.restore(tmp_path)


def test_settings_that_cannot_work_give_one_sentence(data_dir: pathlib.Path) -> None:
    for changes, message in (
        (
            {"batch_size": 13, "shards": 4},
            r"batch_size=13 .* data\.shards=4\. .* are 12 and 16",
        ),
        ({"batch_size": 3, "shards": 4}, r"batch_size=3 .* The smallest multiple is 4"),
        ({"inputs_length": -1}, r"inputs_length is -1, but it must be 0 to"),
        ({"inputs_length": 0, "buckets": ((1, 4),)}, r"contains \(1, 4\), .* 0 to data\.inputs_l"),
        ({**BUCKETED, "pack": True}, r"data\.buckets .* if rows are not packed\. Set data"),
        (
            {**BUCKETED, "buckets": ((64, 8),)},
            r"contains \(64, 8\), .* 1 to data\.inputs_length \(32\)",
        ),
        (
            {**CLASSES, "targets_length": 4},
            r"data\.targets_length is 4 and data\.pack is false\. Set data",
        ),
        ({**CLASSES, "pack": True}, r"data\.pack is true\. Set"),
        ({**CLASSES, "classes": ("a",)}, "data.classes is a. Give two or more"),
        ({**CLASSES, "classes": ("a", "b", "a")}, "label words, each only once"),
        ({**CLASSES, "classes": (1, 2)}, "data.classes is"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(small.CONFIG, **changes)
    for changes, message in (
        (
            {"shards": 64, "batch_size": 64},
            r"small_few.* has 40 examples, fewer than data\.shards \(64\)",
        ),
        (
            {"mixture": "small_few", "inputs_length": 0},
            r"small_few has inputs, but data\.inputs_length is 0\. Set it",
        ),
        ({"objective": SPANS}, r"data\.objective makes examples of texts"),
        (
            {"mixture": "small_texts", "inputs_length": 0, "objective": SPANS},
            "is 0, but it must be at least 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            small.stream(data_dir, **changes)
    with pytest.raises(FileNotFoundError, match=r"No task of 'small' is prepared for .* 'test'.*r"):
        small.stream(data_dir, split="test")


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


def test_spans_restore_the_text(data_dir: pathlib.Path) -> None:
    """Documents are joined completely and cut into segments, without the EOS that the task adds."""
    changes = {"inputs_length": 32, "shards": 1, "mixture": "small_notes", "objective": SPANS}
    found = ""
    for example in small.examples_of(next(small.stream(data_dir, small.TEXT_CONFIG, **changes))):
        sides = ("encoder_input_tokens", "decoder_target_tokens")
        (*source, end), (*target, last) = (example[side].tolist() for side in sides)
        assert end == last == 1 and 1 not in source + target
        starts = [i for i, token in enumerate(target) if token >= 259]
        for a, b in itertools.pairwise([*starts, len(target)]):
            place = source.index(target[a])
            source[place : place + 1] = target[a + 1 : b]
        found += small.spell(np.array(source))
    epoch = found[: len("".join(texts := [small.text("notes", i) for i in range(40)]))]
    assert all(text in epoch for text in texts)


def test_other_tokens_may_follow_the_sentinels(data_dir: pathlib.Path) -> None:
    """An objective uses the vocabulary's first sentinel, which may not be the last id."""

    class WithAddedTokens(Bytes):
        first_sentinel = 300

    config = dataclasses.replace(small.TEXT_CONFIG, inputs_length=32, objective=SPANS)
    plain = next(small.stream(data_dir, config))["encoder_input_tokens"]
    found = next(open_stream(config, WithAddedTokens(), data_dir=data_dir))["encoder_input_tokens"]
    assert plain.max() == small.VOCABULARY.vocab_size - 1
    shift = np.where(plain >= 259, plain.max() - 300, 0)
    np.testing.assert_array_equal(found, plain - shift)


def test_objectives_of_tasks_and_of_the_command_line(data_dir: pathlib.Path) -> None:
    """A task's own objective has priority over the command line's.

    Masked targets have no loss weight, and objectives can be chosen by name.
    """
    found = small.stream(data_dir, **{**SPANNED, "objective": SPANS}).fingerprint()
    assert found["objective of small_own"] == repr(FullLM(documents=3))
    assert found["objective of small_letters"] == repr(SPANS)
    assert "objective of small_few" not in found and "objective" not in found
    masked = {"inputs_length": 32, "objective": OBJECTIVES["masked_lm"]}
    batch = next(small.stream(data_dir, small.TEXT_CONFIG, **masked))
    weights, targets = batch["decoder_loss_weights"], batch["decoder_target_tokens"]
    np.testing.assert_array_equal(weights, targets != 0)
    assert 0 < weights.sum() < (batch["encoder_input_tokens"] != 0).sum() / 4
    changed = override(small.TEXT_CONFIG, "objective=ul2")
    assert changed.objective == OBJECTIVES["ul2"]
    assert override(changed, "objective=none") == small.TEXT_CONFIG
    with pytest.raises(ValueError, match=r"no objective 'span_3_15'.*span_3_15_u_u"):
        override(small.TEXT_CONFIG, "objective=span_3_15")
    for name, objective in OBJECTIVES.items():
        config = dataclasses.replace(small.TEXT_CONFIG, objective=objective)
        assert from_json(json.loads(json.dumps(to_json(config)))) == config, name


def test_a_target_is_the_number_of_its_class(data_dir: pathlib.Path) -> None:
    seen = set()
    for batch in itertools.islice(small.stream(data_dir, **CLASSES), 5):
        texts = [*map(small.spell, batch["encoder_input_tokens"])]
        classes = batch["decoder_target_tokens"]
        assert classes.shape == (8, 1) and classes.dtype == np.int32
        assert [WORDS[c] for c in classes[:, 0]] == [text.split()[1] for text in texts]
        assert (batch["decoder_loss_weights"] == 1).all()  # also for class 0
        assert (batch["decoder_input_tokens"] == 0).all()
        seen.update(classes[:, 0].tolist())
    assert seen == set(range(40))
    lacking = small.stream(data_dir, **{**CLASSES, "classes": ("0", "1", "3")})
    message = r"small_few's split 'train' has the target '\d+', which is none of.*\(0, 1, 3\)\. Add"
    with pytest.raises(ValueError, match=message):
        list(itertools.islice(lacking, 10))


def test_classes_are_told_apart_by_all_of_their_tokens() -> None:
    classes = Classes(("a", "b"), small.VOCABULARY)
    assert classes.index(np.array(small.ids("b")), owner="x") == 1
    for wrong in ("ab", "", "<unk>"):
        with pytest.raises(ValueError, match="x has the target"):
            classes.index(np.array(small.ids(wrong)), owner="x")
    unknowing = types.SimpleNamespace(eos_id=1, encode=lambda text: [2])
    with pytest.raises(ValueError, match="'a' and 'b', which have the same tokens"):
        Classes(("a", "b"), unknowing)


def test_a_thread_makes_batches_ahead_of_position(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    expected = small.digests(small.stream(data_dir, **PACKED), 12)
    made = []

    class Counting(Stream):
        def __next__(self) -> dict[str, np.ndarray]:
            if len(made) == 8 + DEPTH:
                raise ValueError("record 3 is damaged")
            made.append(super().__next__())
            return made[-1]

    stream = small.stream(data_dir, **PACKED)
    stream.__class__ = Counting
    with PrefetchedStream(stream) as batches:
        for step in range(8):
            batches.save(tmp_path / str(step))
            assert small.digests(batches, 1) == [expected[step]]
        batches._thread.submit(int).result()  # waits for the work that has begun
        assert len(made) == 8 + DEPTH
        small.digests(batches, DEPTH)
        with pytest.raises(ValueError, match="record 3 is damaged"):
            next(batches)
    with PrefetchedStream(small.stream(data_dir, **PACKED)) as batches:
        batches.restore(tmp_path / "3")
        batches.save(tmp_path / "again")
        assert small.digests(batches, 3) == expected[3:6]
    plain = small.stream(data_dir, **PACKED)
    plain.restore(tmp_path / "again")
    assert small.digests(plain, 2) == expected[3:5]
