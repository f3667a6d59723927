"""Tests that models of the Hugging Face hub are found by name.

tests/peers runs similar tests with the library `huggingface_hub`.
"""

import fnmatch
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.huggingface.hub import FILES
from synthesizer_jax.runs.events import read_events
from tests.cli.commands import call
from tests.pretrained.folders import TINY, UNTIED, make_folder, make_tensors
from tests.pretrained.test_peft import adapters, write

NAME, COMMIT = "google/flan-t5-small", "0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab"
HUB = """
import fnmatch, pathlib, shutil
HERE = pathlib.Path(__file__).parent

class LocalEntryNotFoundError(FileNotFoundError):
    pass

def snapshot_download(name, *, revision, allow_patterns):
    source, to = HERE / "hub" / name / (revision or "main"), HERE / "COMMIT"
    if not source.is_dir():
        raise LocalEntryNotFoundError("Cannot find it\\nanywhere")
    for path in filter(pathlib.Path.is_file, source.rglob("*")):
        name = path.relative_to(source)
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if any(fnmatch.fnmatch(str(name), pattern) for pattern in allow_patterns):
            shutil.copy(path, to / name)
    return str(to)
""".replace("COMMIT", COMMIT)
"""A replacement of the library, which has a folder in place of the hub."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that simulates the hub: ``hub/NAME/REVISION`` contains a model.

    The working directory of the test is empty.
    """
    place = tmp_path / "library"
    place.mkdir()
    (place / "huggingface_hub.py").write_text(HUB)
    monkeypatch.syspath_prepend(place)
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return place


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found.variables, expected.variables)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_name_is_the_folder_at_a_commit(hub, shards):
    config = TINY | UNTIED
    folder = make_folder(hub / "hub" / NAME / "refs", config, make_tensors(config), shards=shards)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    same(load(NAME, revision="refs"), load(folder))
    assert not (hub / COMMIT / "pytorch_model.bin").exists()
    call("convert", NAME, "run", "--revision", "refs")
    same(load("run"), load(folder))
    (event,) = read_events(hub.parent / "work" / "run")
    assert event["event"] == "converted" and event["text"] == f"{NAME}@{COMMIT}"


def test_adapters_name_their_base_and_its_revision(hub):
    tensors = make_tensors(TINY | UNTIED)
    base = make_folder(hub / "hub" / NAME / "v2", TINY | UNTIED, tensors)
    named = write(hub / "named", NAME, adapters(tensors), revision="v2")
    same(load(named), load(write(hub / "local", base, adapters(tensors))))
    convert_checkpoint(named, hub / "run")
    (event,) = read_events(hub / "run")
    assert event["text"].startswith(f"{named}, adapters of ") and event["text"].endswith(COMMIT)


def test_a_name_has_the_ids_of_the_folder(hub):
    """A model that is loaded by name has the same special ids as its folder.

    Adapters of the model have the same special ids, too.

    The file ``generation_config.json`` has ids that ``config.json`` lacks.
    """
    config = TINY | UNTIED
    tensors = make_tensors(TINY | UNTIED)
    folder = make_folder(hub / "hub" / NAME / "main", config, tensors)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 107]}))
    named = write(hub / "named", NAME, adapters(tensors))
    assert [load(place).model.ids.also_end for place in (folder, NAME, named)] == [(107,)] * 3


def test_every_file_that_is_read_is_downloaded(hub, monkeypatch):
    folder = make_folder(hub / "local", TINY, make_tensors(TINY))
    (folder / "tokenizer_config.json").write_text("{}")
    write(hub / "adapters", folder, {})
    asked = set()
    is_file = pathlib.Path.is_file

    def record(path, *args, **kwargs):
        if path.parent in (folder, hub / "adapters"):
            asked.add(path.name)
        return is_file(path, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "is_file", record)
    for place in (folder, hub / "adapters"):
        with pytest.raises((FileNotFoundError, ValueError), match=r"no vocabulary|no LoRA"):
            load(place)
    found = {name for name in asked if any(fnmatch.fnmatch(name, pattern) for pattern in FILES)}
    assert {
        "generation_config.json",
        "spiece.model",
        "tokenizer.json",
        "adapter_config.json",
    } <= found
    # These files belong to runs and to T5X's checkpoints.
    of_others = {"experiment.json", "checkpoint", "manifest.ocdbt", "_METADATA"}
    assert {name for name in asked - found if not name.startswith("pytorch_model")} <= of_others


def test_the_first_t5s_have_no_owner(hub):
    """The names of the first T5 models have no owner.

    Adapters that were made at that time use these names for their base models.
    """
    tensors = make_tensors(TINY)
    folder = make_folder(hub / "hub" / "google-t5" / "t5-base" / "main", TINY, tensors)
    same(load("t5-base"), load(folder))
    with pytest.raises(
        FileNotFoundError, match=r"no t5-huge\. Give a folder or a checkpoint file\.$"
    ):
        load("t5-huge")


def test_an_existing_path_has_priority_over_a_name(hub):
    tensors = make_tensors(TINY)
    make_folder(hub / "hub" / NAME / "main", TINY | UNTIED, make_tensors(TINY | UNTIED))
    folder = make_folder(hub.parent / "work" / NAME, TINY, tensors)
    same(load(NAME), load(folder))
    with pytest.raises(ValueError, match="The revision v2 is only for a model of the hub"):
        load(NAME, revision="v2")


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_a_folder_and_a_variant_of_a_repository(hub, variant):
    """A model may be a subfolder or a variant in a repository.

    From a diffusers pipeline, only the tokenizer and one variant of the text encoder are
    downloaded.
    """
    pipeline = hub / "hub" / "owner" / "pipeline" / "main"
    encoder = make_folder(pipeline / "text_encoder_2", TINY, make_tensors(TINY, seed=1), shards=2)
    make_folder(pipeline / "text_encoder_2", TINY, make_tensors(TINY), shards=2, variant="fp16")
    (pipeline / "tokenizer_2").mkdir()
    (encoder / "tokenizer_config.json").rename(pipeline / "tokenizer_2" / "tokenizer_config.json")
    make_folder(pipeline / "transformer", TINY, make_tensors(TINY))
    expected = load(pipeline, subfolder="text_encoder_2", variant=variant)
    same(load("owner/pipeline", subfolder="text_encoder_2", variant=variant), expected)
    same(load("owner/pipeline/text_encoder_2", variant=variant), expected)
    copied = {str(path.relative_to(hub / COMMIT)) for path in (hub / COMMIT).rglob("*.*")}
    assert {name.partition("/")[0] for name in copied} == {"text_encoder_2", "tokenizer_2"}
    assert {"fp16" in name for name in copied if "model" in name} == {variant is not None}
    message = r'hf download owner/pipeline --include "a/\*" --local-dir pipeline'
    with pytest.raises(
        FileNotFoundError, match=rf"has no safetensors in a at the commit {COMMIT}.*{message}"
    ):
        load("owner/pipeline/a")
    with pytest.raises(
        FileNotFoundError, match=r"no a in .*\. Its folders are text_encoder_2, tokenizer_2, tran"
    ):
        load(pipeline, subfolder="a")
    convert_checkpoint(pathlib.Path("owner/pipeline/text_encoder_2"), hub / "run")
    (event,) = read_events(hub / "run")
    assert event["text"] == f"owner/pipeline@{COMMIT}/text_encoder_2"


def test_missing_models_and_files_give_one_sentence(hub, monkeypatch):
    command = "run 'hf download google/flan-t5-small --local-dir flan-t5-small'"
    with pytest.raises(
        FileNotFoundError, match=f"{command}.*gave no such model now.*Cannot find it anywhere"
    ):
        load(NAME)
    (hub / "hub" / NAME / "main").mkdir(parents=True)
    (hub / "hub" / NAME / "main" / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(FileNotFoundError, match=f"no safetensors at the commit {COMMIT}"):
        load(NAME)
    with pytest.raises(
        FileNotFoundError, match=r"no runs/a/b/c\. Give a folder or a checkpoint file\.$"
    ):
        load("runs/a/b/c")
    monkeypatch.setattr("synthesizer_jax.pretrained.huggingface.hub.is_installed", lambda _: False)
    with pytest.raises(
        FileNotFoundError, match=rf"{command}.*pip install 'synthesizer-jax\[hub\]'"
    ):
        load(NAME)
