"""Attempts to convert damaged checkpoints of other libraries.

The written runs are compared with the damaged files, as `read_values`, an independent reader, reads them.
"""

from __future__ import annotations

import copy
import gzip
import json
import pathlib
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
from malformed_cases import BYTES, Case, Rng, damage_file, run_checked

CONFIG: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 384,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
BAD_VALUES = (None, -1, 0, 2**70, 1.5, "x", [], {}, True, float("nan"))
CODE = b"cposix\nsystem\n(S'touch executed'\ntR."
"""A pickle that runs a command."""


class TouchOnLoad:
    """Its pickle creates a file in the directory of the attempt's results."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return pathlib.Path.touch, (self.path,)


def cases(root: pathlib.Path, rng: Rng, count: int) -> Iterator[Case]:
    """Yields the attempts."""
    good = root / "good"
    results = root / "results"
    results.mkdir()
    make_sources(good, rng)
    for number in range(count):
        kind, damages = KINDS[number % len(KINDS)]
        source = root / f"attempt_{number}"
        shutil.copytree(good / kind, source)
        name = damages[number // len(KINDS) % len(damages)](source, rng)
        target = source / "checkpoint" if kind == "msgpack" else source
        run = results / f"run_{number}"
        yield Case(
            name=f"{kind}: {name}",
            command=[
                *("convert", str(target), str(run), "--no-check"),
                *(
                    []
                    if kind in ("one", "shards", "flax", "tokenizer")
                    else ["--vocabulary", "bytes"]
                ),
            ],
            locations=(str(source),),
            watched=(results,),
            check=lambda _, target=target, run=run: compare(target, run),
        )
        shutil.rmtree(source)
        shutil.rmtree(run, ignore_errors=True)


def compare(source: pathlib.Path, run: pathlib.Path) -> str | None:
    """Returns what is wrong with a run that was written."""
    import orbax.checkpoint as ocp

    state = run / "checkpoints" / "0" / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        params = checkpointer.restore(state)["params"]
    found = sorted(np.sort(np.ravel(x)).tobytes() for x in leaves(params).values())
    try:
        expected = sorted(
            np.sort(np.ravel(x.astype(np.float32))).tobytes() for x in read_values(source).values()
        )
    except Exception as error:
        return f"the independent reader cannot read the source: {error}"
    return None if found == expected else "the run holds other values than the source"


def leaves(tree: Any, name: str = "") -> dict[str, np.ndarray]:
    """The arrays of nested dictionaries by path."""
    if isinstance(tree, dict):
        return {k: v for key in tree for k, v in leaves(tree[key], f"{name}/{key}").items()}
    return {name: np.asarray(tree)}


def read_values(source: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads a source without the package or the libraries it uses."""
    if source.is_file():
        data = source.read_bytes()
        tree = read_msgpack(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        return leaves(tree["optimizer"]["target"])
    if (source / "checkpoint").is_file() or (source / "_METADATA").is_file():
        return {path.name: read_zarr(path) for path in source.glob("target.*")}
    if (source / "flax_model.msgpack").is_file():
        return leaves(read_msgpack((source / "flax_model.msgpack").read_bytes()))
    if (source / "model.safetensors").is_file():
        return read_safetensors(source / "model.safetensors")
    found: dict[str, np.ndarray] = {}
    for path in sorted(source.glob("model-*.safetensors")):
        found |= read_safetensors(path)
    return found


def read_zarr(path: pathlib.Path) -> np.ndarray:
    """Reads TensorStore's array of one block that is not compressed."""
    about = json.loads((path / ".zarray").read_text())
    assert about["compressor"] is None
    (block,) = (p for p in path.iterdir() if not p.name.startswith("."))
    return np.frombuffer(block.read_bytes(), about["dtype"]).reshape(about["shape"])


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads safetensors of float32."""
    header, data = split_header(path)
    return {
        name: np.frombuffer(data[slice(*x["data_offsets"])], np.float32)
        for name, x in header.items()
        if name != "__metadata__"
    }


def read_msgpack(data: bytes) -> Any:
    """Reads Flax's msgpack: arrays are an extension of shape, dtype and bytes."""

    def array(code: int, packed: bytes) -> Any:
        shape, dtype, values = msgpack.unpackb(packed, raw=True)
        return np.frombuffer(values, dtype.decode()).reshape(shape)

    return msgpack.unpackb(data, ext_hook=array, raw=False, strict_map_key=False)


def split_header(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and the data after it."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(path: pathlib.Path, header: Any, data: bytes, size: int | None = None) -> None:
    """Writes a safetensors file whose header need not be true."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)


# -- good sources ------------------------------------------------------------------------------------


def make_sources(directory: pathlib.Path, rng: Rng) -> None:
    """Writes a checkpoint in every format, and checks that they are converted."""
    from flax import serialization
    from safetensors.numpy import save_file

    from synthesizer_jax.pretrained.export import export_run
    from synthesizer_jax.pretrained.huggingface.config import read_config
    from synthesizer_jax.pretrained.huggingface.names import torch_name
    from synthesizer_jax.pretrained.tensors import correspondences

    def folder(name: str) -> pathlib.Path:
        path = directory / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(CONFIG))
        tokenizer = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 125}
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        return path

    values = np.random.default_rng(rng.randrange(2**32))
    one = folder("one")
    wanted = correspondences(read_config(one, output=True).build(), torch_name)
    tensors = {c.name: values.standard_normal(c.their_shape, np.float32) for c in wanted}
    save_file(tensors, one / "model.safetensors")
    shards, weight_map = folder("shards"), {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        save_file(part, shards / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    tree: dict[str, Any] = {}
    for name, x in tensors.items():
        *keys, _ = name.split(".")
        branch = tree
        for key in keys:
            branch = branch.setdefault(key, {})
        embedding = keys[-1] in ("shared", "relative_attention_bias")
        last = "weight" if x.ndim == 1 else "embedding" if embedding else "kernel"
        branch[last] = np.ascontiguousarray(x.T) if last == "kernel" else x
    data = serialization.msgpack_serialize(tree)
    (folder("flax") / "flax_model.msgpack").write_bytes(data)
    for name in ("one", "shards", "flax"):
        run_checked(
            ["convert", str(directory / name), str(directory / f"{name}_run"), "--no-check"]
        )
    make_tokenizer(one)
    export_run(directory / "one_run", directory / "msgpack", to="t5x")
    again = ["--vocabulary", "bytes", "--no-check"]
    source = directory / "msgpack" / "checkpoint"
    run_checked(["convert", str(source), str(directory / "msgpack_run"), *again])
    make_directories(directory, serialization.msgpack_restore(source.read_bytes()))
    for name in ("tokenizer", "zarr", "orbax"):
        options = again if name != "tokenizer" else again[2:]
        run_checked(["convert", str(directory / name), str(directory / f"{name}_run"), *options])


def make_tokenizer(one: pathlib.Path) -> None:
    """Writes a folder with a tokenizer of transformers in the place of ByT5's."""
    folder = one.parent / "tokenizer"
    shutil.copytree(one, folder)
    (folder / "tokenizer_config.json").unlink()
    pieces = [[piece, -float(i)] for i, piece in enumerate(["<pad>", "</s>", "<unk>", "▁a", "b"])]
    added = [{"id": i, "content": piece} for i, (piece, _) in enumerate(pieces[:3])]
    model = {"type": "Unigram", "unk_id": 2, "vocab": pieces}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))


def make_directories(directory: pathlib.Path, tree: dict[str, Any]) -> None:
    """Writes parameters of T5X as TensorStore's arrays and as Orbax's directory, uncompressed."""
    import orbax.checkpoint as ocp
    import tensorstore
    from flax import serialization

    target = tree["optimizer"]["target"]
    (directory / "zarr").mkdir()
    for name, x in leaves(target).items():
        path = directory / "zarr" / f"target{name.replace('/', '.')}"
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {"compressor": None},
        }
        store = tensorstore.open(spec, create=True, dtype=x.dtype, shape=x.shape).result()
        store.write(x).result()
    data = serialization.msgpack_serialize({"optimizer": {"target": {}}})
    (directory / "zarr" / "checkpoint").write_bytes(data)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(directory / "orbax", {"target": target})


# -- damage ------------------------------------------------------------------------------------------


def damage_config(source: pathlib.Path, rng: Rng) -> str:
    """Gives a field of config.json another value, or removes it."""
    field = rng.choice(sorted(CONFIG))
    config: dict[str, Any] = dict(CONFIG)
    if rng.random() < 0.2:
        del config[field]
    else:
        config[field] = rng.choice(BAD_VALUES)
    (source / "config.json").write_text(json.dumps(config))
    return f"{field} is {config.get(field, 'missing')}"


def contradict_config(source: pathlib.Path, rng: Rng) -> str:
    """Gives config.json sizes that the tensors do not have."""
    field = rng.choice([k for k, v in CONFIG.items() if isinstance(v, int) and v > 1])
    (source / "config.json").write_text(json.dumps(CONFIG | {field: CONFIG[field] + 2}))
    return f"{field} contradicts the tensors"


def change_family(source: pathlib.Path, rng: Rng) -> str:
    """Declares another family or activation."""
    change = rng.choice(
        [
            {"model_type": "t5gemma"},
            {"model_type": "umt5"},
            {"feed_forward_proj": "relu"},
            {"feed_forward_proj": "gated-tanh"},
            {"tie_word_embeddings": True},
            {"decoder_start_token_id": 4},
            {"architectures": ["T5EncoderModel"]},
        ]
    )
    (source / "config.json").write_text(json.dumps(CONFIG | change))
    return f"config.json says {change}"


def pick_tensors(source: pathlib.Path, rng: Rng) -> pathlib.Path:
    """One of the safetensors files."""
    return rng.choice(sorted(source.glob("*.safetensors")))


def lie_in_header(source: pathlib.Path, rng: Rng) -> str:
    """Changes an entry of a header, whose length stays true."""
    path = pick_tensors(source, rng)
    header, data = split_header(path)
    name = rng.choice([n for n in header if n != "__metadata__"])
    entry = copy.deepcopy(header[name])
    begin, end = entry["data_offsets"]
    lies: list[tuple[str, Any]] = [
        ("data_offsets", [begin, end + 4]),
        ("data_offsets", [end, begin]),
        ("data_offsets", [-4, end]),
        ("data_offsets", [2**63, 2**63 + 4]),
        ("data_offsets", [begin]),
        ("data_offsets", None),
        ("shape", [*entry["shape"], 2]),
        ("shape", [2**62, 4]),
        ("shape", [-1]),
        ("shape", "8"),
        ("dtype", "F64"),
        ("dtype", "I32"),
        ("dtype", "F13"),
        ("dtype", 5),
    ]
    field, value = rng.choice(lies)
    header[name] = entry | {field: value}
    write_header(path, header, data)
    return f"header of {path.name}: {field} of {name} is {value}"


def lie_about_header(source: pathlib.Path, rng: Rng) -> str:
    """Writes another length of the header."""
    path = pick_tensors(source, rng)
    header, data = split_header(path)
    size = rng.choice([0, 1, 2**31, 2**40, 2**63, 2**64 - 1, len(json.dumps(header)) - 1])
    write_header(path, header, data, size)
    return f"header of {path.name} says {size} bytes"


def change_names(source: pathlib.Path, rng: Rng) -> str:
    """Renames, removes or adds a tensor in a header."""
    path = pick_tensors(source, rng)
    header, data = split_header(path)
    name = rng.choice([n for n in header if n != "__metadata__"])
    how = rng.choice(["rename", "remove", "add"])
    if how == "rename":
        header["../" + name] = header.pop(name)
    elif how == "remove":
        del header[name]
    else:
        header["more.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_header(path, header, data)
    return f"{how} {name} in {path.name}"


def damage_index(source: pathlib.Path, rng: Rng) -> str:
    """Changes the index of shards."""
    path = source / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    name = rng.choice(sorted(weight_map))
    other = rng.choice(
        [
            *("../outside.safetensors", "/etc/passwd", "model-9.safetensors", "", ".", "..", 5),
            *(None, "a/../model-0.safetensors", "..\\x", "model-0.safetensors\0", ["a"]),
        ]
    )
    how = rng.choice(["place", "forget", "more", "empty", "list"])
    if how == "place":
        weight_map[name] = other
    elif how == "forget":
        del weight_map[name]
    elif how == "more":
        weight_map["more.weight"] = "model-0.safetensors"
    value = {"empty": {}, "list": list(weight_map)}.get(how, weight_map)
    path.write_text(json.dumps({"weight_map": value}))
    return f"index: {how} {name} {other if how == 'place' else ''}"


def damage_shards(source: pathlib.Path, rng: Rng) -> str:
    """Removes, copies or swaps shards."""
    first, second, third = sorted(source.glob("model-*.safetensors"))
    how = rng.choice(["remove", "duplicate", "swap", "directory"])
    if how == "remove":
        second.unlink()
    elif how == "duplicate":
        shutil.copyfile(first, third)
    elif how == "directory":
        second.unlink()
        second.mkdir()
    else:
        first.rename(source / "x")
        second.rename(first)
        (source / "x").rename(second)
    return f"shards: {how}"


def damage_tokenizer(source: pathlib.Path, rng: Rng) -> str:
    """Gives a field of tokenizer.json another value, or damages its bytes."""
    path = source / "tokenizer.json"
    if rng.random() < 0.3:
        return damage_file(path, rng.choice(BYTES), rng)
    data = json.loads(path.read_text())
    field = rng.choice(["type", "unk_id", "vocab", "id", "content", "added_tokens", "normalizer"])
    value = rng.choice([*BAD_VALUES, 2**31, "\ud800", [["x"]]])
    if field in ("type", "unk_id", "vocab"):
        data["model"][field] = value
    elif field in ("id", "content"):
        data["added_tokens"][0][field] = value
    else:
        data[field] = value
    path.write_text(json.dumps(data))
    return f"tokenizer.json: {field} is {value!r}"


def damage_store(source: pathlib.Path, rng: Rng) -> str:
    """Removes, renames or damages an array, a block of it, or what describes it."""
    array = rng.choice(sorted(source.glob("target.*")))
    how = rng.choice(["remove", "rename", "block", "bytes", "description"])
    if how == "remove":
        shutil.rmtree(array)
    elif how == "rename":
        array.rename(source / f"{array.name}.more")
    elif how == "block":
        next(p for p in array.iterdir() if not p.name.startswith(".")).unlink()
    elif how == "bytes":
        return damage_file(array / ".zarray", rng.choice(BYTES), rng)
    else:
        about = json.loads((array / ".zarray").read_text())
        about[rng.choice(sorted(about))] = rng.choice(BAD_VALUES)
        (array / ".zarray").write_text(json.dumps(about))
    return f"{how} {array.name}"


def damage_metadata(source: pathlib.Path, rng: Rng) -> str:
    """Damages Orbax's description of the tree."""
    path = source / "_METADATA"
    if rng.random() < 0.5:
        return damage_file(path, rng.choice(BYTES), rng)
    value = rng.choice(
        [{}, [], {"tree_metadata": 5}, {"tree_metadata": {}}, {"tree_metadata": {"x": 1}}]
    )
    path.write_text(json.dumps(value))
    return f"_METADATA is {value}"


def damage_bytes(source: pathlib.Path, rng: Rng) -> str:
    """Damages the bytes of one file."""
    files = [p for p in sorted(source.rglob("*")) if p.is_file() and p.stat().st_size]
    return damage_file(rng.choice(files), rng.choice(BYTES), rng)


def damage_beginning(source: pathlib.Path, rng: Rng) -> str:
    """Damages the first bytes of the weights, where names and shapes are."""
    path = max((p for p in source.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content, damage = path.read_bytes(), rng.choice(BYTES)
    path.write_bytes(damage(content[:3000], rng) + content[3000:])
    return f"{damage.__name__} of the first bytes of {path.name}"


def leave_code(source: pathlib.Path, rng: Rng) -> str:
    """Leaves nothing but a pickle that runs code."""
    for path in [*source.glob("*.safetensors*"), *source.glob("*.msgpack")]:
        path.unlink()
    executed = source.parent / "results" / "executed"
    data = rng.choice([CODE, pickle.dumps({"shared.weight": TouchOnLoad(executed)})])
    (source / "pytorch_model.bin").write_bytes(data)
    return "a pickle with code"


def damage_tree(source: pathlib.Path, rng: Rng) -> str:
    """Changes a tree of msgpack: removes, renames, or reshapes an array, or makes it integers."""
    from flax import serialization

    path = next(p for p in source.iterdir() if p.name in ("checkpoint", "flax_model.msgpack"))
    tree = serialization.msgpack_restore(path.read_bytes())
    names = sorted(name for name in leaves(tree) if "state" not in name)
    name = rng.choice(names)
    *keys, last = name.strip("/").split("/")
    branch = tree
    for key in keys:
        branch = branch[key]
    how = rng.choice(["remove", "rename", "reshape", "integers", "text", "dictionary"])
    if how == "rename":
        branch["../" + last] = branch.pop(last)
    elif how == "remove":
        del branch[last]
    else:
        changes: dict[str, Callable[[Any], Any]] = {
            "reshape": lambda x: np.ravel(x)[:-1],
            "integers": lambda x: x.astype(np.int32),
            "text": lambda x: "text",
            "dictionary": lambda x: {"a": x},
        }
        branch[last] = changes[how](branch[last])
    path.write_bytes(serialization.msgpack_serialize(tree))
    return f"{how} {re.sub('^/', '', name)}"


Damage = Callable[[pathlib.Path, Rng], str]

FOLDER: tuple[Damage, ...] = (damage_config, contradict_config, change_family, leave_code)
TENSORS: tuple[Damage, ...] = (
    *(lie_in_header, lie_about_header, change_names, damage_bytes, damage_beginning),
)
KINDS: tuple[tuple[str, tuple[Damage, ...]], ...] = (
    ("one", (*FOLDER, *TENSORS, lie_in_header, damage_config)),
    ("shards", (*TENSORS, damage_index, damage_index, damage_shards)),
    ("flax", (damage_tree, damage_bytes, damage_beginning, damage_config)),
    ("msgpack", (damage_tree, damage_bytes, damage_beginning)),
    ("tokenizer", (damage_tokenizer,)),
    ("zarr", (damage_store,)),
    ("orbax", (damage_metadata, damage_store)),
)
