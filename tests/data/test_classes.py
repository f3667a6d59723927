"""Targets as classes: the same from SeqIO and from a cache, and one sentence where there is none."""

import dataclasses
import itertools
import pathlib

import numpy as np
import pytest
from synthesizer_jax.data.cache import Caches
from synthesizer_jax.data.cache_writing import write_caches

from synthesizer_jax.data.classes import Classes
from synthesizer_jax.data.pipeline import OtherStreamError, Stream
from tests.data import counted, small

WORDS = tuple(map(str, range(39, -1, -1)))
"""The targets of `counted_few`, of which many share their first byte."""

CHANGES = {
    "mixture": "counted_few",
    "targets_length": 1,
    "batch_size": 8,
    "classes": WORDS,
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    counted.add()
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    return folder


@pytest.fixture(scope="module")
def cached_dir(data_dir: pathlib.Path) -> pathlib.Path:
    pytest.importorskip("grain")
    write_caches("counted_few", Caches(data_dir, counted.VOCABULARY), split="train")
    return data_dir


def stream(data_dir: pathlib.Path, **changes: object) -> Stream:
    return counted.stream(data_dir, **{"cached": False, **CHANGES, **changes})


def test_a_target_is_the_number_of_its_class(data_dir: pathlib.Path) -> None:
    seen = set()
    for batch in itertools.islice(stream(data_dir), 5):
        texts = counted.texts(iter([batch]), 1)
        classes = batch["decoder_target_tokens"]
        assert classes.shape == (8, 1) and classes.dtype == np.int32
        assert [WORDS[c] for c in classes[:, 0]] == [text.split()[1] for text in texts]
        assert (batch["decoder_loss_weights"] == 1).all()  # also of class 0
        assert (batch["decoder_input_tokens"] == 0).all()
        seen.update(classes[:, 0].tolist())
    assert seen == set(range(40))


@pytest.mark.parametrize("buckets", [(), ((8, 1), (16, 1))])
def test_a_cache_gives_the_same_classes(
    cached_dir: pathlib.Path, buckets: tuple[tuple[int, int], ...]
) -> None:
    live, cached = (stream(cached_dir, cached=c, buckets=buckets) for c in (False, True))
    assert cached.is_cached and not live.is_cached
    assert counted.digests(live, 12) == counted.digests(cached, 12)


@pytest.mark.parametrize("buckets", [(), ((8, 1), (16, 1))])
def test_a_position_continues(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, buckets: tuple[tuple[int, int], ...]
) -> None:
    first = stream(data_dir, buckets=buckets)
    for _ in range(5):
        next(first)
    first.save(tmp_path)
    wanted = counted.digests(first, 5)
    again = stream(data_dir, buckets=buckets)
    again.restore(tmp_path)
    assert counted.digests(again, 5) == wanted
    with pytest.raises(OtherStreamError, match="classes was"):
        stream(data_dir, buckets=buckets, classes=WORDS[::-1]).restore(tmp_path)


def test_a_target_that_is_no_class_is_said(data_dir: pathlib.Path) -> None:
    lacking = stream(data_dir, classes=("0", "1", "3"))
    with pytest.raises(
        ValueError, match=r"counted_few has the target '\d+', which is none of"
    ) as e:
        for _ in range(10):
            next(lacking)
    assert "(0, 1, 3); add it, or choose a data.split whose labels are known" in str(e.value)


def test_a_target_that_begins_with_a_class_is_none() -> None:
    classes = Classes(("a", "b"), counted.VOCABULARY)
    assert classes.index(np.array(small.ids("b")), owner="x") == 1
    for wrong in ("ab", "", "<unk>"):
        with pytest.raises(ValueError, match="x has the target"):
            classes.index(np.array(small.ids(wrong)), owner="x")


def test_classes_that_a_vocabulary_cannot_tell_apart() -> None:
    class Unknowing:
        def encode(self, text: str) -> list[int]:
            return [2]

        def decode(self, ids: object) -> str:
            return ""

    with pytest.raises(ValueError, match="'a' and 'b', which are the same to the vocabulary"):
        Classes(("a", "b"), Unknowing())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets_length": 4}, "data.targets_length=4 and data.pack=false; set data.targets_l"),
        ({"pack": True}, "data.pack=true; set"),
        ({"classes": ("a",)}, "data.classes is a; give two or more"),
        ({"classes": ("a", "b", "a")}, "label words, each once"),
        ({"classes": (1, 2)}, "data.classes is"),
    ],
)
def test_wrong_settings_are_one_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(counted.CONFIG, **{**CHANGES, **changes})
