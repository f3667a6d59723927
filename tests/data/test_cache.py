"""Cached tokens against those that SeqIO makes, and everything that can be wrong with a cache."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from synthesizer_jax.data.cache import Caches
from synthesizer_jax.data.cache_records import decode_chunk, encode_chunk

from synthesizer_jax.data import cache, cache_writing
from synthesizer_jax.data.pipeline import OtherStreamError
from synthesizer_jax.data.task_streams import Chunk, Ragged
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import staging
from tests.data import counted, small

pytest.importorskip("grain")


@pytest.fixture(scope="module", autouse=True)
def tasks_of_counts() -> None:
    counted.add()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Data sets and their caches; they are not to be changed."""
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    report = write(folder)
    assert {info.task: info.examples for info in report.written} == {
        **{"counted_many": 2500, "counted_few": 40, "counted_sentinel": 2500, "counted_never": 40}
    }
    return folder


@pytest.fixture
def own_dir(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that may be changed."""
    return pathlib.Path(shutil.copytree(data_dir, tmp_path / "tfds"))


def write(folder: pathlib.Path, **options: bool) -> cache_writing.Report:
    caches = Caches(folder, counted.VOCABULARY)
    return cache_writing.write_caches(counted.MIXTURE, caches, split="train", **options)


def cache_of(folder: pathlib.Path, task: str = "counted_many") -> pathlib.Path:
    return Caches(folder, counted.VOCABULARY).directory(task, "train")


def record_file(folder: pathlib.Path) -> pathlib.Path:
    (path,) = cache_of(folder).glob("*.array_record")
    return path


@pytest.mark.parametrize("lengths", [(32, 12), (6, 3), (2, 2), (1, 1), (7, 1)])
@pytest.mark.parametrize("pack", [False, True])
def test_a_cache_gives_what_seqio_gives(
    data_dir: pathlib.Path, lengths: tuple[int, int], pack: bool
) -> None:
    changes = {"inputs_length": lengths[0], "targets_length": lengths[1], "pack": pack}
    changes |= {"max_segments": 4, "batch_size": 64}
    live = counted.stream(data_dir, cached=False, **changes)
    cached = counted.stream(data_dir, cached=True, **changes)
    assert cached.is_cached and not live.is_cached
    assert cached.fingerprint() == live.fingerprint()
    batches = 60 if lengths == (32, 12) else 8
    assert counted.digests(cached, batches) == counted.digests(live, batches)


@pytest.mark.parametrize("pack", [False, True])
def test_a_position_continues_with_and_without_cache(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, pack: bool
) -> None:
    for first, second in ((True, False), (False, True)):
        before = counted.stream(data_dir, cached=first, pack=pack, inputs_length=64)
        counted.digests(before, 23)
        before.save(tmp_path / str(first))
        after = counted.stream(data_dir, cached=second, pack=pack, inputs_length=64)
        after.restore(tmp_path / str(first))
        assert counted.digests(after, 20) == counted.digests(before, 20)


def test_a_process_that_reads_a_cache_imports_no_tensorflow(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    live = counted.stream(data_dir, cached=False, pack=True)
    counted.digests(live, 5)
    live.save(tmp_path)
    changes = json.dumps({"pack": True, "cached": None})
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.counted", str(data_dir), changes, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == counted.digests(live, 12)


def test_caches_are_used_as_the_recipe_says(
    own_dir: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert counted.stream(own_dir).is_cached
    assert not counted.stream(own_dir, cached=False).is_cached
    shutil.rmtree(cache_of(own_dir, "counted_few"))
    part = counted.stream(own_dir)
    assert not part.is_cached
    live = counted.stream(own_dir, cached=False)
    assert counted.digests(part, 5) == counted.digests(live, 5)
    with pytest.raises(FileNotFoundError, match=r"counted_few's .* data cache counted_few .*null"):
        counted.stream(own_dir, cached=True)
    assert not caplog.records


def test_current_caches_are_kept(own_dir: pathlib.Path) -> None:
    shutil.rmtree(cache_of(own_dir, "counted_few"))
    report = write(own_dir)
    assert [info.task for info in report.written] == ["counted_few"]
    assert len(report.kept) == 3
    assert len(write(own_dir, renew=True).written) == 4
    assert counted.stream(own_dir, cached=True).is_cached


def test_another_vocabulary_has_a_cache_of_its_own(own_dir: pathlib.Path) -> None:
    other = Caches(own_dir, Bytes(extra_ids=7).build())
    assert other.find("counted_many", "train") is None
    other.directory("counted_many", "train").parent.mkdir(parents=True)
    cache_of(own_dir).rename(other.directory("counted_many", "train"))
    with pytest.raises(ValueError, match=r"cache of another vocabulary; make it again with 'synth"):
        other.find("counted_many", "train")


def test_an_outdated_cache_is_not_read(
    own_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = counted.digests(counted.stream(own_dir, cached=False), 2)
    monkeypatch.setattr(cache, "code_digest", lambda task: "another")
    with pytest.raises(cache.OutdatedCacheError, match=r"another version of the task counted_few"):
        counted.stream(own_dir, cached=True)
    stream = counted.stream(own_dir)
    assert "another version of the task counted_few" in caplog.text
    assert not stream.is_cached
    assert counted.digests(stream, 2) == expected
    monkeypatch.undo()
    info = cache_of(own_dir) / cache.INFO
    info.write_text(info.read_text().replace('"format": 3', '"format": 4'))
    with pytest.raises(
        cache.OutdatedCacheError, match=r"version 4 of the cache's format.*reads vers"
    ):
        counted.stream(own_dir, cached=True)


def test_a_new_data_set_needs_a_new_cache(own_dir: pathlib.Path) -> None:
    path = own_dir / "small_rows" / "many" / "1.0.0"
    path.rename(path.with_name("1.0.1"))
    with pytest.raises(
        cache.OutdatedCacheError, match="another version of the data set small_rows"
    ):
        Caches(own_dir, counted.VOCABULARY).find("counted_many", "train")


def test_damage_is_said_with_its_remedy(own_dir: pathlib.Path) -> None:
    path, info = record_file(own_dir), cache_of(own_dir) / cache.INFO
    contents, text = path.read_bytes(), info.read_text()
    remedy = r"make it again with 'synthesizer-jax data cache counted_many --split train"

    def reading() -> None:
        counted.digests(counted.stream(own_dir), 300)

    path.write_bytes(contents[:-70_000])
    with pytest.raises(ValueError, match=rf"is damaged: it has [\d,]+ bytes instead of .*{remedy}"):
        reading()
    path.write_bytes(contents[:100] + bytes([contents[100] ^ 1]) + contents[101:])
    with pytest.raises(ValueError, match=rf"record 0 of the cache .* hash mismatch .*{remedy}"):
        reading()
    path.unlink()
    with pytest.raises(ValueError, match=rf"is incomplete, it lacks examples-00000.*{remedy}"):
        reading()
    path.write_bytes(contents)
    for broken in (
        *(text[:50], "[]", text.replace('"examples": 2500', '"examples": 2400')),
        text.replace('"sentinel": null', '"sentinel": 7'),
    ):
        info.write_text(broken)
        with pytest.raises(ValueError, match=rf"info.json is damaged .*{remedy}"):
            reading()
    record = json.loads(text) | {"checksum": 5}
    info.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"its checksum is another.*{remedy}"):
        reading()
    info.unlink()
    with pytest.raises(ValueError, match=rf"is incomplete, it lacks info.json; {remedy}"):
        reading()
    assert [i.task for i in write(own_dir).written] == ["counted_many"]
    reading()


def test_an_interrupted_call_leaves_what_was_there(
    own_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = counted.digests(counted.stream(own_dir, cached=True), 3)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging.Staging, "commit", fail)
        with pytest.raises(KeyboardInterrupt):
            write(own_dir, renew=True)
    assert counted.digests(counted.stream(own_dir, cached=True), 3) == expected
    assert not list(own_dir.glob(".import-*"))


def test_records_are_data() -> None:
    chunk = Chunk(
        Ragged(np.array([5, 70_000, 7], np.int32), np.array([0, 0, 2, 3])),
        Ragged(np.array([8], np.int32), np.array([0, 1, 1, 1])),
    )
    record = encode_chunk(chunk)
    again = decode_chunk(record, vocab_size=80_000)
    for given, read in zip(
        (*chunk.inputs, *chunk.targets), (*again.inputs, *again.targets), strict=True
    ):
        np.testing.assert_array_equal(given, read, strict=True)
    with pytest.raises(ValueError, match="token 70000 of a vocabulary of 300"):
        decode_chunk(record, vocab_size=300)
    for damaged in (b"", record[:5], record[:-4], record + b"1234", b"\xff" * len(record)):
        with pytest.raises(ValueError, match=r"holds|buffer|offset"):
            decode_chunk(damaged, vocab_size=80_000)


def test_a_position_of_earlier_packing_is_refused(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    stream = counted.stream(data_dir, pack=True)
    stream.save(tmp_path)
    path = tmp_path / "stream.json"
    saved = json.loads(path.read_text())
    del saved["packing"]
    path.write_text(json.dumps(saved))
    with pytest.raises(OtherStreamError, match="packing was None and is best fit among 128"):
        stream.restore(tmp_path)


def test_the_vocabulary_counts_and_not_its_path() -> None:
    digest = cache.vocabulary_digest(counted.VOCABULARY)
    assert digest == cache.vocabulary_digest(Bytes().build())
    assert digest != cache.vocabulary_digest(Bytes(extra_ids=1).build())


def test_info_is_read_back(data_dir: pathlib.Path) -> None:
    info = Caches(data_dir, counted.VOCABULARY).find("counted_sentinel", "train")
    assert info is not None
    assert info.sentinel == counted.VOCABULARY.vocab_size - 1
    assert sum(info.lengths["inputs"].values()) == info.examples == 2500
    assert info.tokens["inputs"] == sum(len(small.text("many", i)) for i in range(2500))
    assert cache.CacheInfo.from_record(json.loads(info.to_json())) == info
    assert dataclasses.replace(info, files={"../x": (1, 3)})  # only reading refuses it
    with pytest.raises(ValueError, match="outside"):
        cache.CacheInfo.from_record(
            json.loads(dataclasses.replace(info, files={"../x": (1, 3)}).to_json())
        )
