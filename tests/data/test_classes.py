"""Targets as classes, and one sentence where there is none."""

import dataclasses
import itertools
import pathlib

import numpy as np
import pytest

from synthesizer_jax.data.classes import Classes
from synthesizer_jax.data.pipeline import OtherStreamError, Stream
from tests.data import small

WORDS = tuple(map(str, range(39, -1, -1)))
"""The targets of `small_few`, of which many share their first byte."""

CHANGES = {
    "mixture": "small_few",
    "targets_length": 1,
    "batch_size": 8,
    "classes": WORDS,
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    small.write(folder)
    return folder


def stream(data_dir: pathlib.Path, **changes: object) -> Stream:
    return small.stream(data_dir, **{**CHANGES, **changes})


def test_a_target_is_the_number_of_its_class(data_dir: pathlib.Path) -> None:
    seen = set()
    for batch in itertools.islice(stream(data_dir), 5):
        texts = small.inputs(iter([batch]), 1)
        classes = batch["decoder_target_tokens"]
        assert classes.shape == (8, 1) and classes.dtype == np.int32
        assert [WORDS[c] for c in classes[:, 0]] == [text.split()[1] for text in texts]
        assert (batch["decoder_loss_weights"] == 1).all()  # also of class 0
        assert (batch["decoder_input_tokens"] == 0).all()
        seen.update(classes[:, 0].tolist())
    assert seen == set(range(40))


@pytest.mark.parametrize("buckets", [(), ((8, 1), (16, 1))])
def test_a_position_continues(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, buckets: tuple[tuple[int, int], ...]
) -> None:
    first = stream(data_dir, buckets=buckets)
    for _ in range(5):
        next(first)
    first.save(tmp_path)
    wanted = small.digests(first, 5)
    again = stream(data_dir, buckets=buckets)
    again.restore(tmp_path)
    assert small.digests(again, 5) == wanted
    with pytest.raises(OtherStreamError, match="classes was"):
        stream(data_dir, buckets=buckets, classes=WORDS[::-1]).restore(tmp_path)


def test_a_target_that_is_no_class_is_said(data_dir: pathlib.Path) -> None:
    lacking = stream(data_dir, classes=("0", "1", "3"))
    message = r"small_few's split 'train' has the target '\d+', which is none of"
    with pytest.raises(ValueError, match=message) as e:
        for _ in range(10):
            next(lacking)
    assert "(0, 1, 3); add it, or choose a data.split whose labels are known" in str(e.value)


def test_a_target_that_begins_with_a_class_is_none() -> None:
    classes = Classes(("a", "b"), small.VOCABULARY)
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
        dataclasses.replace(small.CONFIG, **{**CHANGES, **changes})
