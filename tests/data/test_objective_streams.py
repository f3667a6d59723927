"""Objectives in the stream: live and cached, at any step, and whatever is wrong with them."""

import pathlib
import re
from collections.abc import Iterator

import numpy as np
import pytest
from synthesizer_jax.data.cache import Caches

from synthesizer_jax.cli.settings import override
from synthesizer_jax.data import cache, cache_writing, pipeline, seqio_members
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import OBJECTIVES, FullLM
from synthesizer_jax.data.pipeline import OtherStreamError
from synthesizer_jax.data.task_streams import InMemoryTaskStream
from synthesizer_jax.registry import from_json, to_json
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.generation_formats import LanguageModeling
from synthesizer_jax.tasks.streams import open_stream
from synthesizer_jax.tasks.task import Task
from synthesizer_jax.training import experiment  # noqa: F401 - it registers DataConfig
from tests.data import counted, small, texts

pytest.importorskip("grain")

SPANS = OBJECTIVES["span_3_15_u_u"]
LENGTHS = {"inputs_length": 32, "targets_length": 32}


@pytest.fixture(scope="module", autouse=True)
def tasks_of_texts() -> None:
    texts.add()
    own = Task(
        "texts_own",
        "small_rows/few",
        LanguageModeling(),
        metrics=(),
        splits=("train", "validation"),
        objective=FullLM(documents=3),
    )
    rates = {"texts_many": 2.0, "texts_own": 1.0, "counted_few": 1.0}
    task_registry.add([own], {"texts_and_pairs": rates})


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    caches = Caches(folder, texts.VOCABULARY)
    for mixture in (texts.MIXTURE, "texts_and_pairs"):
        cache_writing.write_caches(mixture, caches, split="train")
    return folder


@pytest.mark.parametrize("mixture", [texts.MIXTURE, "texts_and_pairs"])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("objective", ["span_3_15_u_u", "ul2", "prefix_lm", "masked_lm"])
def test_a_cache_gives_the_examples_of_an_objective_that_seqio_gives(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, mixture: str, pack: bool, objective: str
) -> None:
    changes = {
        **{"mixture": mixture, "pack": pack, "objective": OBJECTIVES[objective]},
        **{"inputs_length": 48, "targets_length": 48},
    }
    live = texts.stream(data_dir, cached=False, **changes)
    cached = texts.stream(data_dir, cached=True, **changes)
    assert cached.is_cached and not live.is_cached
    assert cached.fingerprint() == live.fingerprint()
    assert counted.digests(cached, 12) == counted.digests(live, 12)
    cached.save(tmp_path)
    after = texts.stream(data_dir, cached=False, **changes)
    after.restore(tmp_path)
    assert counted.digests(after, 12) == counted.digests(cached, 12)


def test_spans_restore_the_text(data_dir: pathlib.Path) -> None:
    """Whole documents one after another, in segments, without the EOS of the task between them."""
    config = DataConfig("texts_few", 32, 32, batch_size=16, shards=1, objective=SPANS)
    stream = open_stream(config, texts.VOCABULARY, data_dir=data_dir)
    sentinels = set(range(359 - 100, 359))
    batch = next(stream)
    found = b""
    sides = batch["encoder_input_tokens"], batch["decoder_target_tokens"]
    for inputs, targets in zip(*sides, strict=True):
        assert (inputs == 1).sum() == (targets == 1).sum() == 1
        spans: dict[int, list[int]] = {}
        for token in targets[: targets.tolist().index(1)].tolist():
            if token in sentinels:
                span = spans.setdefault(token, [])
            else:
                span.append(token)
        for token in inputs[: inputs.tolist().index(1)].tolist():
            found += bytes(i - 3 for i in spans.get(token, [token]))
    text, row = found.decode(), texts.CONFIG.targets_length
    assert len(text) > row
    assert sum(text.startswith(small.text("few", i)) for i in range(40)) > 0
    length = sum(len(small.text("few", i)) for i in range(40))
    assert sorted(re.findall("few [0-9]+(?: and more)?", text[:length])) == sorted(
        small.text("few", i) for i in range(40)
    )


def test_masked_targets_have_no_weight(data_dir: pathlib.Path) -> None:
    batch = next(texts.stream(data_dir, objective=OBJECTIVES["masked_lm"], **LENGTHS))
    weights, targets = batch["decoder_loss_weights"], batch["decoder_target_tokens"]
    np.testing.assert_array_equal(weights, targets != 0)
    assert 0 < weights.sum() < (batch["encoder_input_tokens"] != 0).sum() / 4


def test_own_objectives_come_first(data_dir: pathlib.Path) -> None:
    stream = texts.stream(data_dir, mixture="texts_and_pairs", objective=SPANS, **LENGTHS)
    found = stream.fingerprint()
    assert found["objective of texts_own"] == repr(FullLM(documents=3))
    assert found["objective of texts_many"] == repr(SPANS)
    assert "objective of counted_few" not in found and "objective" not in found


def test_a_position_belongs_to_its_objective(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    texts.stream(data_dir, objective=SPANS, **LENGTHS).save(tmp_path)
    for other in (None, OBJECTIVES["iid_15_u_u"]):
        with pytest.raises(OtherStreamError, match="texts_few"):
            texts.stream(data_dir, objective=other, **LENGTHS).restore(tmp_path)


def test_what_no_objective_can_read(
    data_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"data\.objective makes examples of texts"):
        counted.stream(data_dir, mixture="counted_few", objective=SPANS)
    with pytest.raises(ValueError, match=r"inputs_length is 0; .* needs 2 or more"):
        texts.stream(data_dir, objective=SPANS)
    monkeypatch.setattr(seqio_members, "RESIDENT", 100)
    with pytest.raises(
        ValueError, match=r"texts_many's split.*synthesizer-jax data cache texts_many"
    ):
        texts.stream(data_dir, objective=SPANS, cached=False, **LENGTHS)
    assert next(texts.stream(data_dir, objective=SPANS, cached=True, **LENGTHS))


def test_large_tasks_are_cached_and_few_chunks_are_kept(
    data_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every epoch yields every example once, the first in the same order as of a task in memory."""
    caches = Caches(data_dir, texts.VOCABULARY)
    lengths = {"inputs": 0, "targets": 32}
    whole = caches.open("texts_many", "train", lengths)
    monkeypatch.setattr(cache, "RESIDENT", 1000)
    monkeypatch.setattr(cache, "KEPT_CHUNKS", 1)
    large = caches.open("texts_many", "train", lengths)
    assert whole is not None and large is not None
    assert whole.is_resident and not large.is_resident

    def order(examples: cache.CachedExamples, shard: int) -> Iterator[int]:
        seed = np.random.SeedSequence(5, spawn_key=(shard, 1))
        stream = InMemoryTaskStream(examples, shard=(shard, 2), seed=seed)
        while True:
            next(stream)
            assert stream.index is not None
            yield stream.index

    taken = [order(large, shard) for shard in (0, 1)]
    epochs = [[next(stream) for stream in taken for _ in range(1250)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(2500)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    first = order(whole, 0)
    assert epochs[0][:1250] == [next(first) for _ in range(1250)]
    chunks = [[number // 1024 for number in epoch[:1250]] for epoch in epochs]
    assert all(np.count_nonzero(np.diff(epoch)) == 2 for epoch in chunks)
    assert chunks[1] != chunks[2] or chunks[0] != chunks[1]
    assert len(large._chunks) <= 1


def test_large_tasks_continue_in_later_epochs(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "RESIDENT", 1000)
    changes = {"mixture": "texts_many", "batch_size": 40, "cached": True}
    before = texts.stream(data_dir, **changes)
    counted.digests(before, 2500 // 40 + 40)
    before.save(tmp_path)
    after = texts.stream(data_dir, **changes)
    after.restore(tmp_path)
    assert counted.digests(after, 50) == counted.digests(before, 50)


def test_objectives_are_named_on_the_command_line() -> None:
    changed = override(texts.CONFIG, "objective=ul2")
    assert changed.objective == OBJECTIVES["ul2"]
    assert from_json(to_json(changed)) == changed
    assert override(changed, "objective=none") == texts.CONFIG
    with pytest.raises(ValueError, match=r"no objective 'span_3_15'.*span_3_15_u_u"):
        override(texts.CONFIG, "objective=span_3_15")


def test_every_objective_is_saved(data_dir: pathlib.Path) -> None:
    for name, objective in OBJECTIVES.items():
        config = DataConfig("texts", 64, 64, batch_size=8, objective=objective)
        assert from_json(to_json(config)) == config, name
    assert pipeline.STREAM_FILE
