"""Reads folders of PEFT that hold LoRA adapters of a T5, T5Gemma or T5Gemma 2.

A folder of PEFT contains ``adapter_config.json`` and ``adapter_model.safetensors``. The tensors are
low-rank updates of matrices and embeddings, magnitudes (DoRA), the rows of trained tokens, and
complete parameters of the modules that ``modules_to_save`` names.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from flax import traverse_util

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.registry import format_value, replace
from synthesizer_jax.checkpoints.streamed import Part, Unread
from synthesizer_jax.models import Encoder, EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface import t5gemma, t5gemma2
from synthesizer_jax.pretrained.huggingface.config import ADAPTER_CONFIG, ADAPTER_TENSORS, read_json
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.hub import find_folder
from synthesizer_jax.pretrained.huggingface.names import EMBEDDINGS, OUTPUT, TRANSPOSED
from synthesizer_jax.pretrained.huggingface.peft_config import PeftConfig
from synthesizer_jax.pretrained.huggingface.weights import open_safetensors
from synthesizer_jax.pretrained.tensors import (
    FLOATS,
    SAME,
    Correspondence,
    Tensor,
    correspondences,
    read_parameter,
    reading,
)

PREFIX = "base_model.model."
"""The prefix of every tensor's name in a folder of PEFT."""

WEIGHT, _BASE_LAYER = ".weight", ".base_layer.weight"
"""The suffixes of the names of tensors without an update and with an update by PEFT."""

SHARED, *_EMBEDDINGS_OF_STACKS = (name.removesuffix(WEIGHT) for name in EMBEDDINGS)
"""The modules of a T5 that hold the embedding: the shared module, and a module in each stack."""

_OUTPUTS = tuple(name.removesuffix(WEIGHT) for name in (OUTPUT, t5gemma.OUTPUT))
"""The modules that hold the output projection."""

_TORCH_TENSORS = "adapter_model.bin"
"""The file name of older adapters. The file is a pickle, so it is not read."""


def is_adapter(source: pathlib.Path) -> bool:
    """Returns whether a path is a folder of PEFT."""
    return (source / ADAPTER_CONFIG).is_file()


def base_of(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the base model to which the adapters in a folder belong.

    The base model may itself be a folder of adapters.

    Raises:
      ValueError: if the folder does not name a base model, or if the chain of base models leads
        back to the same adapters.
      FileNotFoundError: if the base model does not exist; see `find_folder`.
    """
    base = other = _named_base(folder)
    seen = {folder.resolve()}
    # Follow the chain of base models to a folder without adapters, so that a circular chain is
    # found before any tensor is read.
    while other.resolve() not in seen:
        if not is_adapter(other):
            return base
        seen.add(other.resolve())
        other = _named_base(other)
    raise ValueError(
        f"base_model_name_or_path in {folder / ADAPTER_CONFIG} leads back to {other}, which "
        "contains adapters. Write the folder of the model there."
    )


def _named_base(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder that ``base_model_name_or_path`` names; see `base_of` for the errors."""
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str):
        raise ValueError(
            f"base_model_name_or_path in {path} is {format_value(name)}, but it must be the folder "
            "of the model, or its OWNER/NAME on the Hugging Face Hub. Write one of these there."
        )
    base = storage_path(name).expanduser()
    try:
        return find_folder(base, None if base.exists() else revision)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"base_model_name_or_path in {path}: {error}") from error


def with_adapters(folder: pathlib.Path, base: Pretrained) -> Pretrained:
    """Applies the adapters in a folder to the parameters of a base model, and returns the model.

    A parameter is changed when it is read. If the base model is an `Encoder`, tensors of the
    decoder are ignored.

    In transformers, several modules may share one embedding. PEFT can change each of these modules
    differently. The model that is returned then has one parameter for each of them.

    Raises:
      FileNotFoundError: if the folder has no safetensors file.
      ValueError: if the adapters are not LoRA adapters of a supported form, or belong to a
        different model. The message lists all tensors that do not fit.
    """
    config = PeftConfig.read(folder / ADAPTER_CONFIG)
    saved = _open_tensors(folder)
    adapters = _Adapters(config, saved, base.model)
    parameters = adapters.parameters()
    if adapters.problems or not saved:
        reason = "; ".join(adapters.problems) or "it contains no LoRA adapters"
        raise ValueError(f"{folder} does not fit its base: {reason}.")

    params: dict[tuple[str, ...], Unread] = traverse_util.flatten_dict(base.params)
    changed = {site.path: change.read_with(params, site) for site, change in parameters}
    return base._replace(
        model=adapters.model, params=traverse_util.unflatten_dict(params | changed)
    )


def _open_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder by their names without PEFT's prefix."""
    path = folder / ADAPTER_TENSORS
    if not path.is_file() and (folder / _TORCH_TENSORS).is_file():
        raise FileNotFoundError(
            f"{folder} contains {_TORCH_TENSORS}, which is a pickle, and no {ADAPTER_TENSORS}. "
            "Load it with PEFT, and save it again with save_pretrained(FOLDER, "
            "safe_serialization=True)."
        )
    with reading(path):
        return {
            name.removeprefix(PREFIX): tensor for name, tensor in open_safetensors(path).items()
        }


def _tensors_of(model: TokenModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that belong to a model, by their names in the model.

    If the model is an encoder, the tensors of a decoder do not belong to it. The tensors of the
    vision tower of a T5Gemma 2 do not belong to any model.
    """
    found = dict(tensors)
    if t5gemma2.is_t5gemma2(model):
        found = {name: x for name, x in found.items() if not t5gemma2.is_of_images(name)}
    if not isinstance(model, Encoder):
        return found
    others = ("decoder", OUTPUT.partition(".")[0])
    return {
        name.removeprefix(_prefix_in_whole(model)): tensor
        for name, tensor in found.items()
        if name.removeprefix(t5gemma.PREFIX).partition(".")[0] not in others
    }


def _prefix_in_whole(encoder: Encoder) -> str:
    """Returns the prefix that the names of an encoder's modules have only in a whole model."""
    if t5gemma2.is_t5gemma2(encoder):
        return t5gemma2.PREFIX
    return t5gemma.PREFIX if t5gemma.has_output_norm(encoder) else ""


def modules_of(c: Correspondence, model: TokenModel) -> list[str]:
    """Returns the names of the modules of transformers that hold a parameter of this package.

    In transformers, several modules of a T5 hold the embedding, including a tied output projection.
    All modules that hold the embedding initially share one tensor. If PEFT wraps one of the
    modules, each module has its own copy of the tensor.
    """
    module = c.name.removesuffix(WEIGHT)
    if t5gemma2.is_t5gemma2(model):
        module = t5gemma2.module_name(module)
    if c.path != ("embedding",):
        return [module]

    has_decoder = isinstance(model, EncoderDecoder)
    if t5gemma.has_output_norm(model):
        modules, output = [module], t5gemma.OUTPUT
        if has_decoder and t5gemma2.is_t5gemma2(model):
            modules.append(t5gemma2.DECODER_EMBEDDING)
    else:
        modules, output = list(_EMBEDDINGS_OF_STACKS), OUTPUT
        if not has_decoder:
            modules = [name for name in modules if "decoder" not in name]
    if has_decoder and model.tied:
        modules.append(output.removesuffix(WEIGHT))
    return modules


def is_embedding(module: str) -> bool:
    """Returns whether a module of transformers looks up rows of its tensor."""
    return module.rpartition(".")[2] in ("shared", "embed_tokens", "relative_attention_bias")


def all_modules(model: TokenModel) -> list[str]:
    """Returns the names of all modules of transformers that hold a parameter of a model."""
    modules = [
        module
        for c in correspondences(model, kind_of(model).name_of)
        for module in modules_of(c, model)
    ]
    if not t5gemma.has_output_norm(model):
        modules.append(SHARED)
    return modules


class Change(NamedTuple):
    """How PEFT changes the tensor W ``[rows, columns]`` of one module of transformers.

    The attributes are in the order in which they apply.

    Attributes:
      whole: a tensor that replaces W, or None.
      factors: the factors L ``[rows, rank]`` and R ``[rank, columns]`` of an update
        ``W + scale · L · R``, or None.
      scale: the scale of the update.
      magnitude: the new norms of the rows or columns of the updated tensor, or None.
      norm_axis: the axis over which the norms are taken.
      tokens: the ids of tokens whose rows are replaced.
      rows: the new rows of the tokens, or None.
    """

    whole: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    magnitude: Tensor | None = None
    norm_axis: int = 1
    tokens: tuple[int, ...] = ()
    rows: Tensor | None = None

    def is_same(self, other: Change) -> bool:
        """Returns whether two changes have the same effect."""
        tensors = [(self.whole, other.whole), (self.magnitude, other.magnitude)]
        tensors += zip(self.factors or (None, None), other.factors or (None, None), strict=True)
        numbers = [
            (x.scale, x.norm_axis if x.magnitude is not None else None) for x in (self, other)
        ]
        return (
            numbers[0] == numbers[1]
            and all(_are_same(x, y) for x, y in tensors)
            and _rows_by_token(self) == _rows_by_token(other)
        )

    def read_with(self, params: Mapping[tuple[str, ...], Unread], site: _Site) -> Unread:
        """Returns the changed parameter, which is not read yet.

        Args:
          params: the parameters of the base model.
          site: the place of the parameter.
        """
        base = params[site.base]
        if site.is_transposed:
            read = base.stored
            base = Unread(site.shape, lambda part: read(part[::-1]).T, base.dtype)
        if self.whole is not None:
            base = Unread(
                site.shape, functools.partial(read_parameter, self.whole, site.correspondence)
            )
        return Unread(site.shape, functools.partial(self._read, base, site))

    def _read(self, base: Unread, site: _Site, part: Part) -> np.ndarray:
        """Reads a part of the changed parameter.

        Args:
          base: the parameter without the change.
          site: the place of the parameter.
          part: the part to read.
        """
        layout = site.correspondence.layout
        if self.magnitude is not None:
            # The norms need the whole tensor.
            matrix = self._updated(layout.from_ours(base.read("float32")))
            return np.ascontiguousarray(layout.to_ours(matrix, site.shape)[part])

        x = base.read("float32", part)
        if self.factors is not None:
            left, right = (_read_floats(tensor) for tensor in self.factors)
            x = x + layout.to_ours(self.scale * (left @ right), site.shape)[part]
        if self.rows is not None:
            # The rows of the tensor are the columns of an output projection of this package.
            axis = 1 if layout.transposed else 0
            start, stop = (part[axis] if part else slice(None)).indices(site.shape[axis])[:2]
            x = np.moveaxis(x.copy(), axis, 0)
            columns = part[1 - axis] if part else slice(None)
            for token, row in zip(self.tokens, _read_floats(self.rows), strict=True):
                if start <= token < stop:
                    x[token - start] = row[columns]
            x = np.ascontiguousarray(np.moveaxis(x, 0, axis))
        return x

    def _updated(self, matrix: np.ndarray) -> np.ndarray:
        """Returns the tensor with its low-rank update and its magnitudes (DoRA)."""
        if self.factors is not None:
            left, right = (_read_floats(tensor) for tensor in self.factors)
            matrix = matrix + np.float32(self.scale) * (left @ right)
        if self.magnitude is not None:
            norm = np.linalg.norm(matrix, axis=self.norm_axis)
            factor = _read_floats(self.magnitude) / np.where(norm == 0, 1, norm)
            matrix = matrix * np.expand_dims(factor, self.norm_axis)
        return matrix


def _read_floats(tensor: Tensor) -> np.ndarray:
    """Reads a whole tensor as float32."""
    return tensor.read(()).astype(np.float32)


def _are_same(x: Tensor | None, y: Tensor | None) -> bool:
    """Returns whether two tensors are equal, or both are missing."""
    if x is None or y is None:
        return x is y
    return x is y or np.array_equal(x.read(()), y.read(()))


def _rows_by_token(change: Change) -> dict[int, list[float]]:
    """Returns the new rows of a change by token, because the order of the tokens is arbitrary."""
    if change.rows is None:
        return {}
    return dict(zip(change.tokens, change.rows.read(()).astype(np.float32).tolist(), strict=True))


def _transposed(tensor: Tensor) -> Tensor:
    """Returns the transpose of a matrix."""
    return Tensor(tensor.shape[::-1], tensor.dtype, lambda index: tensor.read(()).T[index])


@dataclasses.dataclass(frozen=True)
class _Site:
    """The place of a changed parameter.

    Attributes:
      correspondence: the parameter and its tensor in transformers.
      base: the path of the parameter of the base model that is changed.
      is_transposed: whether the parameter is the transpose of the parameter of the base model.
    """

    correspondence: Correspondence
    base: tuple[str, ...]
    is_transposed: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the changed parameter in ``params``."""
        return self.correspondence.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the changed parameter."""
        return self.correspondence.shape


class _Adapters:
    """Matches the tensors of a folder of PEFT with the parameters of its base model.

    Args:
      config: the options of the folder.
      saved: the tensors by name.
      model: the base model.

    Attributes:
      model: the model with the adapters, which differs from the base model if modules that share an
        embedding have different adapters.
      problems: reasons why the folder does not fit the base model, as parts of a sentence.
    """

    def __init__(
        self, config: PeftConfig, saved: Mapping[str, Tensor], model: EncoderDecoder | Encoder
    ):
        self.model = model
        self.problems: list[str] = []
        self._config = config
        self._base = model
        self._known: set[str] = set()
        self._tensors = _tensors_of(model, saved)
        self._share_embedding()

    def parameters(self) -> list[tuple[_Site, Change]]:
        """Returns the changed parameters. `problems` is complete afterwards."""
        found: list[tuple[_Site, Change]] = []
        updated: set[str] = set()
        matrices: list[str] = []
        for c in correspondences(self._base, kind_of(self._base).name_of):
            modules = modules_of(c, self._base)
            if len(c.shape) > 1:
                matrices += modules
            changes = [self._change_of(module, c) for module in modules]
            updated.update(m for m, x in zip(modules, changes, strict=True) if x.factors)
            found += self._sites(c, modules, changes)

        self._check_targets(matrices, updated)
        self.problems += [
            f"{name} is neither an update of a matrix of the base nor one of its parameters"
            for name in sorted(self._tensors.keys() - self._known)
        ]
        return found

    def _sites(
        self, c: Correspondence, modules: Sequence[str], changes: Sequence[Change]
    ) -> list[tuple[_Site, Change]]:
        """Returns the changes of the parameter, or of the parameters that it becomes.

        If modules that share an embedding are changed differently, the model gets an embedding for
        the encoder, or an output projection.

        Args:
          c: the parameter.
          modules: the modules that hold the parameter.
          changes: the changes of the modules.
        """
        of_module = dict(zip(modules, changes, strict=True))
        # The module whose change the parameter itself gets. The decoder comes first, if there is
        # one.
        first = modules[0]
        sites = [] if changes[0] == Change() else [(_Site(c, c.path), changes[0])]
        for module in modules[1:]:
            change = of_module[module]
            if change.is_same(of_module[first]):
                continue
            if module in _OUTPUTS:
                scale = self._base.logits_scale
                if scale is None:
                    scale = self._base.d_model**-0.5
                self.model = replace(self.model, tied=False, logits_scale=scale)
                split = Correspondence(
                    ("logits_kernel",), c.shape[::-1], module + WEIGHT, TRANSPOSED
                )
            else:
                self.model = replace(
                    self.model,
                    encoder_d_model=self._base.d_model,
                    encoder_embedding_scale=self._base.embedding_scale,
                )
                split = Correspondence(("encoder_embedding",), c.shape, module + WEIGHT, SAME)
            sites.append((_Site(split, c.path, split.layout == TRANSPOSED), change))
        return sites

    def _change_of(self, module: str, c: Correspondence) -> Change:
        """Returns the change of a module. Tensors that do not fit are added to `problems`."""
        change = Change(whole=self._whole_of(module, c))
        if len(c.shape) > 1:
            change = self._with_factors(change, module, c)
            change = self._with_rows(change, module, c)
        return change

    def _take(self, name: str) -> Tensor | None:
        """Returns a tensor by its name, and remembers that the name belongs to the base."""
        self._known.add(name)
        return self._tensors.get(name)

    def _whole_of(self, module: str, c: Correspondence) -> Tensor | None:
        """Returns the tensor that replaces the tensor of a module."""
        shape = c.layout.shape(c.shape)
        for suffix in (WEIGHT, _BASE_LAYER):
            name = module + suffix
            tensor = self._take(name)
            if tensor is None:
                continue
            if tensor.shape != shape:
                self.problems.append(
                    f"{name} has the shape {tensor.shape}, but that of the base is {shape}"
                )
            elif tensor.dtype not in FLOATS:
                self.problems.append(
                    f"{name} is {tensor.dtype}, which is not a floating-point dtype"
                )
            else:
                return tensor
        return None

    def _with_factors(self, change: Change, module: str, c: Correspondence) -> Change:
        """Adds the low-rank update and the magnitude of a module to its change."""
        # The matrix of the torch module has the shape ``[outputs, inputs]``. An embedding has the
        # shape ``[inputs, outputs]``.
        shape = c.layout.shape(c.shape)
        names = update_names(module)
        a, b = (self._take(name) for name in names)
        magnitude = self._take(magnitude_name(module))
        if a is None and b is None and magnitude is None:
            return change

        embeds = is_embedding(module)
        inputs, outputs = shape if embeds else shape[::-1]
        what = " and ".join(names)
        if a is None or b is None or not _are_update(a, b, inputs, outputs):
            self.problems.append(f"{what} do not fit {c.name}, which has the shape {shape}")
            return change
        rank = a.shape[0]
        expected = self._config.rank_of(self._full_name(module))
        if expected not in (None, rank):
            self.problems.append(
                f"{what} have the rank {rank}, but the configuration says {expected}"
            )
        if self._config.has_magnitudes != (magnitude is not None):
            self.problems.append(
                f"use_dora is {self._config.has_magnitudes}, but {magnitude_name(module)} "
                f"{'exists' if magnitude is not None else 'is missing'}"
            )
        elif magnitude is not None and magnitude.shape != (outputs,):
            self.problems.append(
                f"{magnitude_name(module)} has the shape {magnitude.shape} instead of {(outputs,)}"
            )
        return change._replace(
            factors=(_transposed(a), _transposed(b)) if embeds else (b, a),
            scale=self._config.scale_of(self._full_name(module), rank),
            magnitude=magnitude,
            norm_axis=0 if embeds else 1,
        )

    def _with_rows(self, change: Change, module: str, c: Correspondence) -> Change:
        """Adds the rows of trained tokens to the change of a module."""
        source = module
        rows = self._take(rows_name(module))
        if rows is None and module in (*_EMBEDDINGS_OF_STACKS, _OUTPUTS[0]):
            # PEFT ties all embeddings and the output projection of a T5 to its shared embedding,
            # even if the output projection has a tensor of its own.
            source = SHARED
            rows = self._take(rows_name(source))
        if rows is None:
            return change

        tokens = self._config.tokens_of(self._full_name(source))
        num_tokens, width = c.layout.shape(c.shape)
        if rows.shape != (len(tokens), width) or rows.dtype not in FLOATS:
            self.problems.append(
                f"{rows_name(source)} has the shape {rows.shape} instead of {(len(tokens), width)}"
            )
            return change
        if max(tokens) >= num_tokens or min(tokens) < 0:
            self.problems.append(
                f"trainable_token_indices contains {max(tokens)}, but {c.name} has only the tokens "
                f"0 to {num_tokens - 1} (resize the embedding of the base)"
            )
            return change
        return change._replace(tokens=tokens, rows=rows)

    def _full_name(self, module: str) -> str:
        """Returns the name that a module has in a whole model."""
        if isinstance(self._base, Encoder):
            return _prefix_in_whole(self._base) + module
        return module

    def _check_targets(self, modules: Sequence[str], updated: set[str]) -> None:
        """Adds a problem if the updates are not of the modules that the configuration selects."""
        config = self._config
        if config.targets is None:
            return
        full_names = {self._full_name(module): module for module in modules}
        if not t5gemma.has_output_norm(self._base):
            full_names[SHARED] = SHARED
        outputs = [name for name in full_names if name in _OUTPUTS or is_embedding(name)]
        selected = {full_names[name] for name in config.select(full_names, outputs=outputs)}
        if SHARED in selected:
            selected.remove(SHARED)
            if config.ties:
                # PEFT added the updates of the modules that share the embedding.
                selected |= {*_EMBEDDINGS_OF_STACKS, _OUTPUTS[0]} & updated
                self._known.update(update_names(SHARED))
            else:
                self.problems.append(
                    f"target_modules selects {SHARED}, but transformers does not compute with it "
                    "(train embed_tokens instead)"
                )
        self.problems += [
            f"target_modules selects {name}, but {update_names(name)[0]} is missing"
            for name in sorted(selected - updated)
        ]
        self.problems += [
            f"{update_names(name)[0]} exists, but target_modules does not select {name}"
            for name in sorted(updated - selected)
        ]
        if not (selected or updated or self._base_is_encoder):
            self.problems.append("target_modules selects no module of the base")

    @property
    def _base_is_encoder(self) -> bool:
        """Whether the base model is only an encoder, so that the adapters may be of the decoder."""
        return isinstance(self._base, Encoder)

    def _share_embedding(self) -> None:
        """Copies the tensor ``shared.weight`` of a T5 to the modules that share the embedding.

        If a folder of PEFT contains ``shared.weight``, the tensor is usually a copy of the base
        model's tensor. However, if ``modules_to_save`` names the module ``shared``, the tensor has
        no effect, because transformers computes with the embeddings of the stacks. A tensor without
        an effect is added to `problems`.
        """
        tensor = self._tensors.pop(SHARED + WEIGHT, None)
        if tensor is None:
            return
        if any(SHARED.endswith(name) for name in self._config.whole):
            self.problems.append(
                f"modules_to_save contains {SHARED}, but transformers does not compute with it "
                "(train embed_tokens instead)"
            )
            return
        for c in correspondences(self._base, kind_of(self._base).name_of):
            if c.path == ("embedding",):
                for module in modules_of(c, self._base):
                    self._tensors.setdefault(module + WEIGHT, tensor)


def update_names(module: str) -> tuple[str, str]:
    """Returns PEFT's names of the factors A and B of a module's update.

    The factors of a matrix are A ``[rank, inputs]`` and B ``[outputs, rank]``. The factors of an
    embedding are A ``[rank, tokens]`` and B ``[d_model, rank]``.
    """
    if is_embedding(module):
        return f"{module}.lora_embedding_A", f"{module}.lora_embedding_B"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def magnitude_name(module: str) -> str:
    """Returns PEFT's name of the magnitude of a module's update."""
    return f"{module}.lora_magnitude_vector"


def rows_name(module: str) -> str:
    """Returns PEFT's name of the rows of trained tokens in a module."""
    return f"{module}.token_adapter.trainable_tokens_delta"


def _are_update(a: Tensor, b: Tensor, inputs: int, outputs: int) -> bool:
    """Returns whether two tensors can be the factors A and B of a matrix's low-rank update."""
    rank = a.shape[:1]
    shapes = (*rank, inputs), (outputs, *rank)
    return (a.shape, b.shape) == shapes and a.dtype in FLOATS and b.dtype in FLOATS
