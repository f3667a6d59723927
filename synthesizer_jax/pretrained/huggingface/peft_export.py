"""Writes the adapters of a run as a folder of PEFT."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from synthesizer_jax.models.adapters import Adapted
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.models.updates import (
    ENTRIES,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    LowRankUpdate,
    TokenEntries,
)
from synthesizer_jax.pretrained.huggingface import t5gemma, t5gemma2
from synthesizer_jax.pretrained.huggingface.config import ADAPTER_CONFIG, ADAPTER_TENSORS
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.peft_config import PeftConfig
from synthesizer_jax.pretrained.huggingface.peft_modules import (
    PREFIX,
    all_modules,
    is_embedding,
    magnitude_name,
    modules_of,
    rows_name,
    tied_modules,
    update_names,
    whole_names,
)
from synthesizer_jax.pretrained.tensors import Correspondence, correspondences
from synthesizer_jax.primitives.parameters import Variables

_WRITTEN: dict[str, object] = {
    "peft_type": "LORA",
    "task_type": "SEQ_2_SEQ_LM",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_dropout": 0.0,
}
"""The options that have the same values in every folder that `write_adapters` writes."""


def write_adapters(
    folder: pathlib.Path,
    adapted: Adapted[TokenModel],
    variables: Variables,
    read_base: Callable[[], Variables],
    *,
    base: str | None = None,
) -> None:
    """Writes the adapters of a run to an empty directory, in the format of PEFT.

    The tensors have the names and shapes that PEFT uses for the T5 of transformers. If the run has
    trained a complete parameter, ``modules_to_save`` names its module.

    Args:
      folder: the empty directory.
      adapted: the model with looped layers, and the adapters of the model.
      variables: the variables that the run has trained.
      read_base: a function that returns the variables of the base. It is called only if a module
        cannot be described by an update.
      base: the name of the base model on the hub, or `None` if it is not known.

    Raises:
      ValueError: if the model is not a T5, for example if it is a classifier. The message names a
        part of the model that transformers does not support. The error is also raised if PEFT
        cannot represent the adapters.
    """
    writer = _Writer(adapted, variables, read_base)
    parameters = correspondences(adapted.model, kind_of(adapted.model).name_of)
    for c in parameters:
        writer.add(c)
    for c in parameters:
        writer.complete(c)
    config = {"base_model_name_or_path": base, **writer.config()}

    text = json.dumps(_WRITTEN | config, indent=1)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    tensors = {PREFIX + name: np.ascontiguousarray(x) for name, x in writer.tensors.items()}
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    # The library safetensors creates files that only their owner can read, so change the
    # permissions.
    (folder / ADAPTER_TENSORS).chmod(0o644)


class _Writer:
    """Collects the tensors and the options of a folder of PEFT; see `write_adapters`.

    Attributes:
      tensors: the tensors by name, without PEFT's prefix.
    """

    def __init__(
        self,
        adapted: Adapted[TokenModel],
        variables: Variables,
        read_base: Callable[[], Variables],
    ):
        self.tensors: dict[str, np.ndarray] = {}
        self._adapted = adapted
        self._model = adapted.model
        self._arrays = {
            keys: np.asarray(x) for keys, x in traverse_util.flatten_dict(variables).items()
        }
        self._read_base = read_base
        self._saved: set[str] = set()
        self._ranks: dict[str, int] = {}
        self._alphas: dict[str, float] = {}
        self._tokens: dict[str, list[int]] = {}

    def add(self, c: Correspondence) -> None:
        """Adds the tensors of one parameter, if the run has trained it."""
        keys = ("params", *c.path)
        update = self._adapted.updates.get(keys)
        if keys in self._adapted.whole:
            self._add_whole(c, modules_of(c, self._model), self._arrays[keys])
        elif isinstance(update, LowRankUpdate):
            self._add_update(c, update)
        elif isinstance(update, TokenEntries):
            self._add_rows(c, update)

    def complete(self, c: Correspondence) -> None:
        """Adds a parameter of the base, if another parameter of its module is saved completely.

        PEFT needs all parameters of the modules in ``modules_to_save``. In a T5Gemma 2, the modules
        that embed tokens have two parameters: the embedding, and the input vector for the end of an
        image.

        Raises:
          ValueError: if the parameter has an update.
        """
        keys = ("params", *c.path)
        modules = modules_of(c, self._model)
        incomplete = [
            module
            for module in modules
            if module in self._saved and whole_names(module, c)[0] not in self.tensors
        ]
        if not incomplete:
            return
        if keys in self._adapted.updates:
            raise ValueError(
                f"training.adapters train an update of {'/'.join(c.path)}, but another parameter "
                f"of the module {incomplete[0]} as a complete array. PEFT can only do one of these "
                "in a module. Export the model with --to huggingface."
            )
        base = traverse_util.flatten_dict(self._read_base())[keys]
        self._add_whole(c, modules, np.asarray(base))

    def _scale_of(self, c: Correspondence) -> np.float32:
        """Returns the factor of a parameter in transformers.

        The scale of the logits is multiplied into the output projection, as `with_output_of_t5`
        does.
        """
        if c.path == ("logits_kernel",):
            return np.float32(self._model.logits_scale or 1.0)
        return np.float32(1.0)

    def _add_whole(self, c: Correspondence, modules: Sequence[str], array: np.ndarray) -> None:
        """Adds a complete parameter of some modules, given its value in this package."""
        for module in modules:
            self.tensors[whole_names(module, c)[0]] = c.layout.from_ours(array * self._scale_of(c))
            self._saved.add(module)

    def _add_update(self, c: Correspondence, update: LowRankUpdate) -> None:
        """Adds the low-rank update of a parameter to all modules that hold the parameter."""
        keys = ("params", *c.path)
        scale = self._scale_of(c)
        rank, alpha = self._adapted.lora.rank_and_alpha("/".join(c.path))
        # Reshape A to ``[rank, inputs]`` and B to ``[outputs, rank]``.
        a = self._arrays[*keys, LORA_A].reshape(-1, rank).T
        b = (self._arrays[*keys, LORA_B] * scale).reshape(rank, -1).T
        first, *others = modules_of(c, self._model)
        for module in (first, *others):
            if is_embedding(module) != is_embedding(first):
                if update.has_magnitude:
                    # The magnitudes of an embedding belong to its columns, and those of an output
                    # projection belong to its rows, so the output projection is saved completely.
                    base = traverse_util.flatten_dict(self._read_base())[keys]
                    arrays = {
                        leaf: jnp.asarray(self._arrays[*keys, leaf]) for leaf in update.leaves
                    }
                    self._add_whole(c, [module], np.asarray(update.apply(base, arrays)))
                    continue
                # The output projection has the transposed matrix of the embedding.
                factors = b.T, a.T
            else:
                factors = a, b
            for name, factor in zip(update_names(module), factors, strict=True):
                self.tensors[name] = factor
            if update.has_magnitude:
                magnitude = self._arrays[*keys, MAGNITUDE].reshape(-1)
                self.tensors[magnitude_name(module)] = magnitude * scale
            self._ranks[module] = rank
            self._alphas[module] = alpha

    def _add_rows(self, c: Correspondence, update: TokenEntries) -> None:
        """Adds the rows of trained tokens to all modules that hold a parameter."""
        entries = self._arrays["params", *c.path, ENTRIES] * self._scale_of(c)
        rows = c.layout.from_ours(entries)
        ids = list(update.tokens)
        tied = tied_modules(self._model)
        if c.path == ("embedding",) and self._model.tied and tied is not None:
            # PEFT ties all other modules to the input embedding.
            self._tokens[tied.source] = ids
            self.tensors[rows_name(tied.source)] = rows
            return

        for module in modules_of(c, self._model):
            name, module_ids, module_rows = module, ids, rows
            if not is_embedding(module):
                # If the ids of the output projection are equal to those of the embedding, PEFT
                # assumes that both are tied, and ignores the output projection. This is avoided by
                # writing the ids in another order.
                module_ids = ids[::-1] if len(ids) > 1 else ids * 2
                module_rows = rows[::-1] if len(ids) > 1 else np.repeat(rows, 2, axis=0)
            elif not t5gemma.has_output_norm(self._model):
                # For the same reason, PEFT would ignore the complete name of an embedding.
                name = module.rpartition(".")[2]
            self._tokens[name] = module_ids
            self.tensors[rows_name(module)] = module_rows

    def config(self) -> dict[str, object]:
        """Returns the options that depend on the run.

        Raises:
          ValueError: if the run has no low-rank updates.
        """
        lora = self._adapted.lora
        if not self._ranks:
            raise ValueError(
                "training.adapters have no low-rank updates, but PEFT needs at least one. Export "
                "the model with --to huggingface."
            )
        modules = all_modules(self._model)
        if t5gemma2.is_t5gemma2(self._model):
            # Names of modules in the vision tower end in the same way, but these modules have no
            # updates.
            modules += t5gemma2.VISION_MODULES
        return {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "use_rslora": lora.rank_stabilized,
            "use_dora": lora.dora,
            "rank_pattern": _patterns(self._ranks, lora.rank),
            "alpha_pattern": _patterns(self._alphas, lora.alpha),
            "target_modules": self._targets(modules),
            "modules_to_save": sorted(self._saved) or None,
            "trainable_token_indices": self._tokens or None,
        }

    def _targets(self, modules: Collection[str]) -> list[str]:
        """Returns the shortest ends of names with which PEFT selects exactly the updated modules.

        For example, the end ``q`` selects all query projections of a T5.
        """
        for parts in (1, 2):
            ends = {".".join(name.split(".")[-parts:]) for name in self._ranks}
            config = PeftConfig(alpha=1.0, targets=tuple(ends))
            if config.select(modules, outputs=()) == self._ranks.keys():
                return sorted(ends)
        return sorted(self._ranks)


def _patterns(values: Mapping[str, float], default: float) -> dict[str, float]:
    """Returns the values that differ from the default, by patterns of modules.

    Args:
      values: the values of the modules that have updates.
      default: the value of modules that no pattern matches.
    """
    by_end: dict[str, set[float]] = {}
    for name, value in values.items():
        by_end.setdefault(name.rpartition(".")[2], set()).add(value)
    patterns = {}
    for name, value in values.items():
        end = name.rpartition(".")[2]
        # If all modules whose names end in the same way have the same value, the end is enough.
        pattern = end if len(by_end[end]) == 1 else name
        if value != default:
            patterns[re.escape(pattern)] = value
    return patterns
