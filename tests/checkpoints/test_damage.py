"""Tests damaged files of runs, T5X checkpoints and folders of transformers.

Every damage leads to an error of one sentence, and no files are left behind.
"""

import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from synthesizer_jax.base.registry import to_json
from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.huggingface.tokenizer import read_vocabulary
from synthesizer_jax.runs import code
from synthesizer_jax.training.run_directory import load_experiment, save_experiment
from synthesizer_jax.training.source import Source, read_source, write_source
from synthesizer_jax.training.step import TrainState
from tests.pretrained.folders import TINY, make_folder, make_tensors
from tests.pretrained.test_t5x import as_t5x, write_zarr
from tests.pretrained.test_tokenizer import GOOD, PIECES
from tests.training.tiny import CopyStream, experiment


def state() -> TrainState:
    return TrainState(jnp.int32(1), {"x": jnp.arange(4000.0).reshape(40, 100)}, {}, {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with undamaged files of all kinds, each in a separate folder."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("run/code", "t5x", "tensorstore/checkpoint_1", "tokenizer"):
        (folder / name).mkdir(parents=True)
    save_experiment(experiment(), folder / "run")
    write_source(Source(license="apache-2.0"), folder / "run")
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.save(state(), CopyStream())
    checkpoints.close()
    make_folder(folder / "transformers", TINY, make_tensors(TINY), shards=3)
    make_folder(folder / "torch", TINY, {})
    (folder / "torch" / "model.safetensors").unlink()
    tree = as_t5x(make_tensors(TINY))
    (folder / "t5x" / "checkpoint_1").write_bytes(serialization.msgpack_serialize(tree))
    for path, x in jax.tree.leaves_with_path(tree["optimizer"]["target"]):
        write_zarr(folder / "tensorstore" / "checkpoint_1", "/".join(key.key for key in path), x)
    empty = serialization.msgpack_serialize({"optimizer": {"target": {}}})
    (folder / "tensorstore" / "checkpoint_1" / "checkpoint").write_bytes(empty)
    return folder


def convert(source: pathlib.Path) -> None:
    convert_checkpoint(source, source.parent / "converted", vocabulary=Bytes())


READERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "run/experiment.json": lambda file: load_experiment(file.parent),
    "run/source.json": lambda file: read_source(file.parent),
    "run/code/imports.json": lambda file: code.require_code(file.parents[1]),
    "checkpoints/1": lambda file: Checkpoints(file.parents[2]).restore_newest(
        jax.eval_shape(state), CopyStream()
    ),
    "tokenizer/": lambda file: read_vocabulary(file.parent, file.parent),
    "transformers/": lambda file: convert(file.parent),
    "torch/": lambda file: convert(file.parent),
    "t5x/": convert,
    "tensorstore/": lambda file: convert(file.parents[1]),
}


def saved(change: Callable[[Any], object]) -> str:
    """Returns the JSON of an experiment, to which a change was applied."""
    data = to_json(experiment())
    change(data)
    return json.dumps(data)


def with_fields(**fields: object) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **fields}).encode()


def without(*keys: str) -> Callable[[bytes], bytes]:
    """Returns a function that removes an entry from T5X's parameters."""

    def damage(data: bytes) -> bytes:
        tree = serialization.msgpack_restore(data)
        branch = tree["optimizer"]["target"]
        for key in keys[:-1]:
            branch = branch[key]
        del branch[keys[-1]]
        return serialization.msgpack_serialize(tree)

    return damage


def packed(tree: Any) -> bytes:
    return serialization.msgpack_serialize(tree)


EXPERIMENT, IMPORTS = "run/experiment.json", "run/code/imports.json"
CONTENTS = "checkpoints/1/contents/contents.json"
SHARD, INDEX = (
    "transformers/model-00002-of-00003.safetensors",
    "transformers/model.safetensors.index.json",
)
ZARRAY = "tensorstore/checkpoint_1/target.token_embedder.embedding/.zarray"
BPE = {
    "type": "BPE",
    "byte_fallback": True,
    "unk_token": "a",
    "vocab": {"a": 0, "b": 1},
    "merges": [],
}
T5X, TOKENIZER = "t5x/checkpoint_1", "tokenizer/tokenizer.json"
DAMAGES: list[tuple[str, str | bytes | Callable[[bytes], bytes] | None, str]] = [
    # Each case has a file, the new content of the file (None deletes the file), and the expected
    # error.
    (EXPERIMENT, lambda data: data[:900], r"cannot be read: .* line \d"),
    (EXPERIMENT, "[]", r"it contains \(\), but it must contain an Experiment"),
    (EXPERIMENT, '{"type": "Experiment"}', r"missing .*'model'"),
    (EXPERIMENT, "[" * 100_000, r"cannot be read: maximum recursion depth"),
    (EXPERIMENT, '{"a":' * 500 + "1" + "}" * 500, r"recursion|must contain an Experiment"),
    (
        EXPERIMENT,
        saved(lambda d: d["data"].update({"x" * 10**6: 1})),
        r"DataConfig has no field 'x{56}…",
    ),
    (
        EXPERIMENT,
        saved(lambda d: d["model"].update(encoder={"type": "os.x"})),
        "encoder: .* unknown type",
    ),
    (
        EXPERIMENT,
        saved(lambda d: d["model"]["encoder"].update(runs=[])),
        r"runs is \(\), but it must be not empty",
    ),
    (
        EXPERIMENT,
        saved(lambda d: d["model"].update(parent="x")),
        "EncoderDecoder has no field 'parent'",
    ),
    *(
        ("run/source.json", content, r"source\.json cannot be read: .*good copy in its place")
        for content in ("{", "[]", "{}", '{"languages": [], "x": 1}', '{"languages": 3}')
    ),
    ("run/source.json", '{"languages": [3]}', r"languages is \(3,\), but .* is expected"),
    *(
        (IMPORTS, names, r"code/imports\.json cannot be read: ")
        for names in (
            *("{", "[]", '{"packages": [], "files": ["../mine.py"]}'),
            *('{"packages": [], "files": [3]}', '{"packages": [".a"], "files": []}'),
        )
    ),
    (
        CONTENTS,
        with_fields(position={"position.json": "7"}),
        "its contents differ from what was saved",
    ),
    (CONTENTS, with_fields(arrays={}), "its contents differ from what was saved"),
    (CONTENTS, lambda data: b"\0" + data[1:], "contents.json cannot be read"),
    (CONTENTS, '{"step": 2}', "contents.json cannot be read"),
    (CONTENTS, None, "No such file"),
    ("checkpoints/1/state/_METADATA", None, "checkpoints/1 cannot be read"),
    ("checkpoints/1/state/_METADATA", "{", "checkpoints/1 cannot be read"),
    (SHARD, lambda data: data[:-7], "cannot be read"),
    (SHARD, None, "is missing"),
    (
        INDEX,
        '{"weight_map": {"shared.weight": "../outside.safetensors"}}',
        "not a file of the folder",
    ),
    (
        "torch/pytorch_model.bin",
        b"cos\nsystem\n(S'touch executed'\ntR.",
        r"Install torch, or give a folder|nothing was loaded",
    ),
    *(
        (
            TOKENIZER,
            json.dumps(GOOD | change),
            r"tokenizer\.json cannot be read",
        )
        for change in (
            {"model": {"type": "BPE"}},
            {"model": GOOD["model"] | {"unk_id": 9}},
            {"model": GOOD["model"] | {"vocab": PIECES[:1]}},
            {"model": GOOD["model"] | {"vocab": [["\ud800", 0.0], *PIECES]}},
            {"model": []},
            {"added_tokens": [{"id": 2 * 10**9, "content": "x"}]},
            {"added_tokens": []},
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}},
            {"model": BPE | {"vocab": {"a": 0, "b": 2}}},
            {"normalizer": {"type": "Sequence", "normalizers": [{"type": "New"}]}},
            {"pre_tokenizer": {"type": "New"}},
        )
    ),
    (T5X, lambda data: data[:-50], "checkpoint_1 cannot be read"),
    (T5X, lambda data: b"\x1f\x8b" + data, "checkpoint_1 cannot be read"),
    (T5X, packed({"a": 1}), "it has no parameters under optimizer/target"),
    (
        *(T5X, packed({"target": {5: np.ones(2, np.float32)}})),
        "has no matrix encoder/layers_0/attention/query/kernel",
    ),
    (T5X, without("decoder", "relpos_bias"), "decoder/relpos_bias/rel_embedding is missing"),
    (T5X, without("token_embedder"), "has no matrix token_embedder/embedding, so"),
    (
        "tensorstore/checkpoint_1/target.token_embedder.embedding/0.0",
        *(None, r"token_embedder\.embedding cannot be read: "),  # arrays are not read as zeros
    ),
    (ZARRAY, lambda data: data.replace(b"384", b"1099511627776", 1), "its chunks have the shape"),
    (ZARRAY, lambda data: data.replace(b'"<f4"', b'[["a", "<f4", []]]'), "its dtype is"),
    (ZARRAY, lambda data: data + b"\0", "Extra data"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_damage_gives_one_sentence_and_no_trace(
    whole, tmp_path, monkeypatch, name, content, message
) -> None:
    # If a pickle were executed, it would create files in this directory.
    monkeypatch.chdir(tmp_path)
    folder = name.split("/")[0]
    shutil.copytree(whole / folder, tmp_path / folder)
    file = tmp_path / name
    if content is None:
        file.unlink()
    else:
        changed = content(file.read_bytes()) if callable(content) else content
        file.write_bytes(changed.encode() if isinstance(changed, str) else changed)
    before = sorted(tmp_path.rglob("*"))
    (read,) = (read for part, read in READERS.items() if name.startswith(part))
    with pytest.raises(
        (ValueError, FileNotFoundError, ModuleNotFoundError), match=message
    ) as error:
        read(file)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    assert re.search(rf"{re.escape(folder)}|{file.name}", str(error.value))
    assert sorted(tmp_path.rglob("*")) == before
