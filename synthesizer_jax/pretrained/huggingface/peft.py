"""Reads folders of PEFT that hold LoRA adapters of a T5, T5Gemma or T5Gemma 2.

A folder of PEFT contains ``adapter_config.json`` and ``adapter_model.safetensors``. The tensors are
low-rank updates of matrices and embeddings, magnitudes (DoRA), the rows of trained tokens, and
complete parameters of the modules that ``modules_to_save`` names.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flax import traverse_util

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.registry import format_value, replace
from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.models import Encoder, EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface import t5gemma, t5gemma2
from synthesizer_jax.pretrained.huggingface.config import ADAPTER_CONFIG, ADAPTER_TENSORS, read_json
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.hub import find_folder
from synthesizer_jax.pretrained.huggingface.names import OUTPUT, TRANSPOSED
from synthesizer_jax.pretrained.huggingface.peft_change import Change, Site, transposed
from synthesizer_jax.pretrained.huggingface.peft_config import PeftConfig
from synthesizer_jax.pretrained.huggingface.peft_modules import (
    OUTPUTS,
    PREFIX,
    SHARED,
    WEIGHT,
    is_embedding,
    magnitude_name,
    modules_of,
    rows_name,
    tied_modules,
    update_names,
    whole_names,
)
from synthesizer_jax.pretrained.huggingface.weights import open_safetensors
from synthesizer_jax.pretrained.tensors import (
    FLOATS,
    SAME,
    Correspondence,
    Tensor,
    correspondences,
    reading,
)

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
            "of the model, or its OWNER/NAME on the Hugging Face hub. Write one of these there."
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

    In transformers, several modules may share one embedding, and PEFT can change each of these
    modules differently. In this case, the returned model has one parameter for each module.

    Raises:
      FileNotFoundError: if the folder has no safetensors file.
      ValueError: if the adapters are not LoRA adapters of a supported form, or belong to a
        different model. The message lists all tensors that do not fit.
    """
    config = PeftConfig.read(folder / ADAPTER_CONFIG)
    saved = _open_tensors(folder)
    matched = _Matcher(config, saved, base.model).match()
    if matched.problems or not saved:
        reason = "; ".join(matched.problems) or "it contains no LoRA adapters"
        raise ValueError(f"{folder} does not fit its base: {reason}.")

    params: dict[tuple[str, ...], Unread] = traverse_util.flatten_dict(base.params)
    changed = {site.path: change.read_with(params, site) for site, change in matched.changes}
    return base._replace(model=matched.model, params=traverse_util.unflatten_dict(params | changed))


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


class _Matched(NamedTuple):
    """The result of matching a folder of PEFT with its base model.

    Attributes:
      model: the model with the adapters, which differs from the base model if modules that share an
        embedding have different adapters.
      changes: the changed parameters. If there are problems, some of them may be missing.
      problems: reasons why the folder does not fit the base model, as parts of a sentence.
    """

    model: EncoderDecoder | Encoder
    changes: list[tuple[Site, Change]]
    problems: list[str]


class _Matcher:
    """Matches the tensors of a folder of PEFT with the parameters of its base model.

    Each matcher can be used only once, because it keeps a record of the tensors it has matched.

    Args:
      config: the options of the folder.
      saved: the tensors by name.
      model: the base model.
    """

    def __init__(
        self, config: PeftConfig, saved: Mapping[str, Tensor], model: EncoderDecoder | Encoder
    ):
        self._config = config
        self._base = model
        self._model = model
        self._problems: list[str] = []
        self._known: set[str] = set()
        self._updated: set[str] = set()
        self._tensors = _tensors_of(model, saved)
        self._share_embedding()

    def match(self) -> _Matched:
        """Returns the changed parameters, the model that has them, and all problems."""
        found: list[tuple[Site, Change]] = []
        matrices: list[str] = []
        for c in correspondences(self._base, kind_of(self._base).name_of):
            modules = modules_of(c, self._base)
            if len(c.shape) > 1:
                matrices += modules
            changes = [self._change_of(module, c) for module in modules]
            found += self._sites(c, modules, changes)

        self._check_targets(matrices)
        self._problems += [
            f"{name} is neither an update of a matrix of the base nor one of its parameters"
            for name in sorted(self._tensors.keys() - self._known)
        ]
        return _Matched(self._model, found, self._problems)

    def _sites(
        self, c: Correspondence, modules: Sequence[str], changes: Sequence[Change]
    ) -> list[tuple[Site, Change]]:
        """Returns the changed parameters that are made from one parameter of the base model.

        If modules that share an embedding are changed differently, the model gets an embedding for
        the encoder, or an output projection.

        Args:
          c: the parameter of the base model.
          modules: the modules that hold the parameter.
          changes: the changes of the modules.
        """
        # The parameter itself gets the change of the first module. If several modules of a T5 hold
        # the parameter, the first module belongs to the decoder.
        first, *others = modules
        sites = [] if changes[0] == Change() else [(Site(c, c.path), changes[0])]
        for module, change in zip(others, changes[1:], strict=True):
            if change.is_same(changes[0]):
                continue
            if t5gemma2.is_t5gemma2(self._base):
                self._problems.append(
                    f"{first} and {module} are one parameter of a T5Gemma 2, so their adapters "
                    "must be equal"
                )
            elif module in OUTPUTS:
                scale = self._base.logits_scale
                if scale is None:
                    scale = self._base.d_model**-0.5
                self._model = replace(self._model, tied=False, logits_scale=scale)
                split = Correspondence(
                    ("logits_kernel",), c.shape[::-1], module + WEIGHT, TRANSPOSED
                )
                sites.append((Site(split, c.path, is_transposed=True), change))
            else:
                self._model = replace(
                    self._model,
                    encoder_d_model=self._base.d_model,
                    encoder_embedding_scale=self._base.embedding_scale,
                )
                split = Correspondence(("encoder_embedding",), c.shape, module + WEIGHT, SAME)
                sites.append((Site(split, c.path), change))
        return sites

    def _change_of(self, module: str, c: Correspondence) -> Change:
        """Returns the change of a module. Tensors that do not fit are added to the problems."""
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
        for name in whole_names(module, c):
            tensor = self._take(name)
            if tensor is None:
                continue
            if tensor.shape != shape:
                self._problems.append(
                    f"{name} has the shape {tensor.shape}, but in the base its shape is {shape}"
                )
            elif tensor.dtype not in FLOATS:
                self._problems.append(
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
        self._updated.add(module)

        embeds = is_embedding(module)
        inputs, outputs = shape if embeds else shape[::-1]
        both = " and ".join(names)
        if a is None or b is None or not _are_update(a, b, inputs, outputs):
            self._problems.append(f"{both} do not fit {c.name}, which has the shape {shape}")
            return change
        rank = a.shape[0]
        expected = self._config.rank_of(self._full_name(module))
        if expected not in (None, rank):
            self._problems.append(
                f"{both} have the rank {rank}, but the configuration says {expected}"
            )
        if self._config.has_magnitudes != (magnitude is not None):
            self._problems.append(
                f"use_dora is {self._config.has_magnitudes}, but {magnitude_name(module)} "
                f"{'exists' if magnitude is not None else 'is missing'}"
            )
        elif magnitude is not None and magnitude.shape != (outputs,):
            self._problems.append(
                f"{magnitude_name(module)} has the shape {magnitude.shape} instead of {(outputs,)}"
            )
        return change._replace(
            factors=(transposed(a), transposed(b)) if embeds else (b, a),
            scale=self._config.scale_of(self._full_name(module), rank),
            magnitude=magnitude,
            norm_axis=0 if embeds else 1,
        )

    def _with_rows(self, change: Change, module: str, c: Correspondence) -> Change:
        """Adds the rows of trained tokens to the change of a module."""
        source = module
        rows = self._take(rows_name(module))
        tied = tied_modules(self._base)
        if rows is None and tied and module in tied.others and self._config.ties_tokens:
            source = tied.source
            rows = self._take(rows_name(source))
        if rows is None:
            return change

        tokens = self._config.tokens_of(self._full_name(source))
        num_tokens, width = c.layout.shape(c.shape)
        if rows.shape != (len(tokens), width) or rows.dtype not in FLOATS:
            self._problems.append(
                f"{rows_name(source)} has the shape {rows.shape} instead of {(len(tokens), width)}"
            )
            return change
        unknown = [token for token in tokens if not 0 <= token < num_tokens]
        if unknown:
            self._problems.append(
                f"trainable_token_indices contains {unknown[0]}, but {c.name} has only the tokens "
                f"0 to {num_tokens - 1} (resize the embedding of the base)"
            )
            return change
        return change._replace(tokens=tokens, rows=rows)

    def _full_name(self, module: str) -> str:
        """Returns the name that a module has in a whole model."""
        if isinstance(self._base, Encoder):
            return _prefix_in_whole(self._base) + module
        return module

    def _check_targets(self, modules: Sequence[str]) -> None:
        """Adds problems if the configuration selects other modules than those with updates."""
        config, updated = self._config, self._updated
        if config.targets is None:
            return
        full_names = {self._full_name(module): module for module in modules}
        if not t5gemma.has_output_norm(self._base):
            full_names[SHARED] = SHARED
        outputs = [name for name in full_names if name in OUTPUTS or is_embedding(name)]
        selected = {full_names[name] for name in config.select(full_names, outputs=outputs)}
        tied = tied_modules(self._base)
        if tied and config.ties and tied.source in selected:
            # PEFT added the updates of the modules that share the embedding.
            selected |= set(tied.others) & updated
        if SHARED in selected:
            selected.remove(SHARED)
            if config.ties:
                self._known.update(update_names(SHARED))
            else:
                self._problems.append(
                    f"target_modules selects {SHARED}, but transformers does not compute with it "
                    "(train embed_tokens instead)"
                )
        self._problems += [
            f"target_modules selects {name}, but {update_names(name)[0]} is missing"
            for name in sorted(selected - updated)
        ]
        self._problems += [
            f"{update_names(name)[0]} exists, but target_modules does not select {name}"
            for name in sorted(updated - selected)
        ]
        # If the base is only an encoder, all adapters may belong to the decoder.
        if not (selected or updated or isinstance(self._base, Encoder)):
            self._problems.append("target_modules selects no module of the base")

    def _share_embedding(self) -> None:
        """Copies the saved tensors of an embedding to all modules that share the embedding.

        If a module has an update, PEFT may also save the tensor of the base. All modules of the
        base share this tensor, unless they are saved as complete tensors.

        If the folder of a T5 contains ``shared.weight``, the tensor is usually a copy of the base
        model's tensor. However, if ``modules_to_save`` names the module ``shared``, the tensor has
        no effect, because transformers computes with the embeddings of the stacks. A tensor without
        an effect is added to the problems.
        """
        shared = self._tensors.pop(SHARED + WEIGHT, None)
        if shared is not None and any(SHARED.endswith(name) for name in self._config.whole):
            self._problems.append(
                f"modules_to_save contains {SHARED}, but transformers does not compute with it "
                "(train embed_tokens instead)"
            )
            shared = None

        for c in correspondences(self._base, kind_of(self._base).name_of):
            names = [whole_names(module, c) for module in modules_of(c, self._base)]
            if c.path == ("embedding",) and shared is not None:
                for name, _ in names:
                    self._tensors.setdefault(name, shared)
            of_base = next((self._tensors[x] for _, x in names if x in self._tensors), None)
            for name, name_in_base in names:
                if of_base is not None and name not in self._tensors:
                    self._tensors.setdefault(name_in_base, of_base)


def _are_update(a: Tensor, b: Tensor, inputs: int, outputs: int) -> bool:
    """Returns whether two tensors can be the factors A and B of a matrix's low-rank update."""
    rank = a.shape[:1]
    shapes = (*rank, inputs), (outputs, *rank)
    return (a.shape, b.shape) == shapes and a.dtype in FLOATS and b.dtype in FLOATS
