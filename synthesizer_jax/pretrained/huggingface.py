"""Folders of Hugging Face transformers that hold a T5: ``config.json``, safetensors, a vocabulary.

T5 1.0 and 1.1, LM-adapted T5, FLAN-T5, mT5, umT5, ByT5, UL2 and FLAN-UL2 are one architecture with
different fields. Nothing in a folder is executed: tensors are read from safetensors only.
"""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Set

import ml_dtypes  # noqa: F401 (makes bfloat16 a dtype of NumPy, which safetensors asks for)
import numpy as np
import safetensors

from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.pretrained.architecture import Architecture, Pretrained
from synthesizer_jax.pretrained.tensors import (
    MATRIX,
    SAME,
    TRANSPOSED,
    Layout,
    correspondences,
    read_params,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SENTENCEPIECE = ("spiece.model", "sentencepiece.model")

FAMILIES = ("t5", "mt5", "umt5")
"""Values of ``model_type`` in ``config.json``."""

ACTIVATIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
    "gated-relu": ("relu", "linear"),
}
"""Values of ``feed_forward_proj``; transformers computes a gated GELU by tanh, as T5 does."""

HEADS_OF_INPUTS = Layout((1, 2, 0), (2, 1))
"""``[heads · width, d_model]`` for ``[d_model, heads, width]``: a torch matrix of outputs and inputs."""

HEADS_OF_OUTPUTS = Layout((2, 0, 1), (1, 2))
"""``[d_model, heads · width]`` for ``[heads, width, d_model]``."""

_SUBLAYERS = {
    ("encoder", "attention"): "layer.0.SelfAttention",
    ("encoder", "mlp"): "layer.1.DenseReluDense",
    ("encoder", "pre_attention_layer_norm"): "layer.0.layer_norm",
    ("encoder", "pre_mlp_layer_norm"): "layer.1.layer_norm",
    ("decoder", "self_attention"): "layer.0.SelfAttention",
    ("decoder", "encoder_decoder_attention"): "layer.1.EncDecAttention",
    ("decoder", "mlp"): "layer.2.DenseReluDense",
    ("decoder", "pre_self_attention_layer_norm"): "layer.0.layer_norm",
    ("decoder", "pre_cross_attention_layer_norm"): "layer.1.layer_norm",
    ("decoder", "pre_mlp_layer_norm"): "layer.2.layer_norm",
}

_LEAVES = {
    ("align", "query", "kernel"): (".q", HEADS_OF_INPUTS),
    ("align", "key", "kernel"): (".k", HEADS_OF_INPUTS),
    ("align", "part_0", "query", "kernel"): (".q", HEADS_OF_INPUTS),
    ("align", "part_0", "key", "kernel"): (".k", HEADS_OF_INPUTS),
    ("align", "part_1", "rel_embedding"): (".relative_attention_bias", TRANSPOSED),
    ("value", "kernel"): (".v", HEADS_OF_INPUTS),
    ("out", "kernel"): (".o", HEADS_OF_OUTPUTS),
    ("wi", "kernel"): (".wi", TRANSPOSED),
    ("wi_0", "kernel"): (".wi_0", TRANSPOSED),
    ("wi_1", "kernel"): (".wi_1", TRANSPOSED),
    ("wo", "kernel"): (".wo", TRANSPOSED),
    ("scale",): ("", SAME),
}

_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names of the one embedding; files hold the first, or all."""

UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""A tensor of the first published T5 folders that no model reads."""


def their_name(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns transformers' name and layout of a parameter of ours.

    Args:
      path: the keys of the parameter, with looped layers.
    """
    if path == ("embedding",):
        return _EMBEDDINGS[0], MATRIX
    if path == ("logits_kernel",):
        return "lm_head.weight", TRANSPOSED
    stack, part, *rest = path
    if part == "final_norm":
        return f"{stack}.final_layer_norm.weight", SAME
    if part == "relpos_bias":
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        return name, TRANSPOSED
    name, layout = _LEAVES[tuple(rest[1:])]
    number = part.removeprefix("layers_")
    return f"{stack}.block.{number}.{_SUBLAYERS[stack, rest[0]]}{name}.weight", layout


def read_folder(folder: pathlib.Path) -> Pretrained:
    """Reads a model, its parameters and its vocabulary.

    Args:
      folder: what ``save_pretrained`` writes, or a snapshot of the Hub.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the folder holds another architecture, or files that contradict each other; the
        message lists all tensors that do not fit.
    """
    model = read_architecture(folder).build()
    wanted = correspondences(model, their_name)
    with _open_tensors(folder) as tensors:
        shared = next((name for name in _EMBEDDINGS if name in tensors.names), _EMBEDDINGS[0])
        wanted = [c._replace(name=shared) if c.path == ("embedding",) else c for c in wanted]
        copies = {*_EMBEDDINGS, "lm_head.weight"} if model.tied else {*_EMBEDDINGS}
        _check_copies(tensors, copies - {shared}, shared)
        params = read_params(tensors, wanted, ignored={*copies, UNUSED})
    return Pretrained(model, {"params": params}, read_vocabulary(folder))


def _check_copies(tensors: _Tensors, copies: Set[str], original: str) -> None:
    """Raises a `ValueError` where a tensor that the model shares is another one."""
    for name in copies & tensors.names:
        if original in tensors.names and not np.array_equal(
            tensors.read(name), tensors.read(original)
        ):
            raise ValueError(
                f"{name} is not equal to {original}, but {CONFIG} says that the model shares them; "
                "correct tie_word_embeddings"
            )


class _Config:
    """The fields of a JSON file, checked as they are read."""

    def __init__(self, path: pathlib.Path):
        if not path.is_file():
            raise FileNotFoundError(
                f"{path.parent} holds no {path.name}; give a folder that transformers has saved"
            )
        self.path, self.fields = path, _read_json(path)

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns a positive integer."""
        value = self.fields.get(name, default)
        if value is None and default is None and name not in self.fields:
            raise ValueError(f"{self.path} has no {name}; it is not the configuration of a T5")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ValueError(f"{self.path}: {name} is {value!r}; expected a positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        """Returns a number of at least 0."""
        value = self.fields.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 <= value < math.inf
        ):
            raise ValueError(f"{self.path}: {name} is {value!r}; expected a number of at least 0")
        return float(value)

    def choice(
        self, name: str, choices: Mapping[str, object] | tuple[str, ...], default: str
    ) -> str:
        """Returns one of several strings."""
        value = self.fields.get(name, default)
        if not isinstance(value, str) or value not in choices:
            raise ValueError(
                f"{self.path}: {name} is {value!r}{did_you_mean(str(value), choices)}; "
                f"supported: {', '.join(choices)}"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Returns true or false."""
        value = self.fields.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {name} is {value!r}; expected true or false")
        return value


def read_architecture(folder: pathlib.Path) -> Architecture:
    """Returns the architecture that a folder's ``config.json`` describes.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it describes another architecture.
    """
    config = _Config(folder / CONFIG)
    family = config.choice("model_type", FAMILIES, "t5")
    for name, expected in (("pad_token_id", 0), ("decoder_start_token_id", 0)):
        if config.fields.get(name, expected) != expected:
            raise ValueError(
                f"{config.path}: {name} is {config.fields[name]!r}; models here have {expected}"
            )
    num_layers = config.integer("num_layers")
    has_own_depth = config.fields.get("num_decoder_layers") is not None
    return Architecture(
        vocab_size=config.integer("vocab_size"),
        d_model=config.integer("d_model"),
        num_heads=config.integer("num_heads"),
        head_dim=config.integer("d_kv"),
        d_ff=config.integer("d_ff"),
        num_layers=num_layers,
        num_decoder_layers=config.integer("num_decoder_layers") if has_own_depth else num_layers,
        activations=ACTIVATIONS[config.choice("feed_forward_proj", ACTIVATIONS, "relu")],
        tied=config.flag("tie_word_embeddings", True),
        num_buckets=config.integer("relative_attention_num_buckets", 32),
        max_distance=config.integer("relative_attention_max_distance", 128),
        bias_per_layer=family == "umt5",
        epsilon=config.number("layer_norm_epsilon", 1e-6),
        dropout_rate=config.number("dropout_rate", 0.1),
    )


def read_vocabulary(folder: pathlib.Path) -> Bytes | SentencePiece | None:
    """Returns the configuration of a folder's vocabulary; None where there is none that is known."""
    path = folder / TOKENIZER_CONFIG
    fields = _read_json(path) if path.is_file() else {}
    extra_ids = fields.get("extra_ids")
    extra = {} if not isinstance(extra_ids, int) else {"extra_ids": extra_ids}
    if fields.get("tokenizer_class") == "ByT5Tokenizer":
        return Bytes(**({"extra_ids": 125} | extra))
    for name in SENTENCEPIECE:
        if (folder / name).is_file():
            return SentencePiece(str(folder / name), **extra)
    return None


class _Tensors:
    """The tensors of open safetensors files.

    Args:
      files: the file of each tensor.
    """

    def __init__(self, files: Mapping[str, safetensors.safe_open]):
        self._files = files

    @property
    def names(self) -> Set[str]:
        """The names of all tensors."""
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading it."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Returns the name of a tensor's dtype without reading it."""
        return str(self._files[name].get_slice(name).get_dtype())

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        array: np.ndarray = self._files[name].get_tensor(name)
        return array


@contextlib.contextmanager
def _open_tensors(folder: pathlib.Path) -> Iterator[_Tensors]:
    """Opens the safetensors of a folder; only headers are read."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, safetensors.safe_open] = {}
        for path, names in _shards(folder).items():
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} cannot be read ({error}); copy or download it again"
                ) from None
            held = set(file.keys())
            if names is not None and held != names:
                wrong = sorted(held ^ names)
                raise ValueError(
                    f"{path} and {INDEX} disagree about {len(wrong)} tensors, such as {wrong[0]!r}; "
                    "copy or download the folder again"
                )
            opened |= dict.fromkeys(held, file)
        yield _Tensors(opened)


def _shards(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """Returns the files with a folder's tensors, and the names that the index lists for each.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the index names files outside of the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / WEIGHTS).is_file():
            raise FileNotFoundError(
                f"{folder} holds neither {WEIGHTS} nor {INDEX}; save the model with "
                "save_pretrained(…, safe_serialization=True)"
            )
        return {folder / WEIGHTS: None}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; copy or download it again")
    shards: dict[pathlib.Path, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file or "\\" in file:
            raise ValueError(f"{index}: {name} is in {file!r}, which is not a file of the folder")
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder / file} is missing; copy or download it again")
        shards.setdefault(folder / file, set())
        names = shards[folder / file]
        assert names is not None
        names.add(name)
    return shards


def _read_json(path: pathlib.Path) -> dict[str, object]:
    """Reads a JSON object.

    Raises:
      ValueError: the file is not one.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON; copy or download it again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object; copy or download it again")
    return data
