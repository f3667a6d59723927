"""The file ``adapter_config.json`` of PEFT, and its rules for the names of modules.

PEFT selects modules by their names in transformers, such as
``encoder.block.0.layer.0.SelfAttention.q``.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from synthesizer_jax.base.files import describing
from synthesizer_jax.base.registry import format_value
from synthesizer_jax.pretrained.huggingface.config import read_json

ALL_LINEAR = "all-linear"
"""The value of ``target_modules`` that means all matrices except the output projection."""

OPTIONS: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "bias": ("none", "all", "lora_only"),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
    "kasa_config": (),
    "layer_replication": (),
    "lora_bias": (False,),
    "megatron_config": (),
    "monteclora_config": (),
    "target_parameters": ([],),
    "use_bdlora": (False,),
    "use_dora": (False, True),
    "use_qalora": (False,),
    "use_rslora": (False, True),
    "velora_config": (),
}
"""The supported values of PEFT's options that change what is computed or saved.

Null is supported for all options except ``peft_type``. The modules that a text needs have no
biases, so all values of ``bias`` mean the same. With the supported values of ``init_lora_weights``,
the base model is unchanged, so the tensors define the adapted model completely. Other initializers,
such as ``pissa``, subtract the initial update from the matrices of the base model.
"""

IGNORED = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "trainable_token_indices",
    }
)
"""The options of PEFT that may have any value.

`PeftConfig` reads some of these options. The remaining options only describe how the adapters were
trained. For example, the configurations of initializers only matter for certain values of
``init_lora_weights``, which `OPTIONS` checks.
"""


@dataclasses.dataclass(frozen=True)
class PeftConfig:
    """The options of a folder of PEFT that say which modules have adapters.

    Attributes:
      alpha: determines the scale of the updates.
      rank: the rank of the updates. None means that only the tensors determine the rank.
      rank_stabilized: whether the scale is ``alpha / √rank`` instead of ``alpha / rank``.
      has_magnitudes: whether the updates have magnitudes (DoRA).
      rank_pattern: ranks that differ from `rank`, by regular expressions of modules.
      alpha_pattern: values that differ from `alpha`, by regular expressions of modules.
      targets: a regular expression of the modules that have updates, or the ends of their names.
        None means that only the tensors determine the modules.
      excluded: a regular expression of modules that have no updates, or the ends of their names.
      layers: the indices of the layers whose modules have updates. None means all layers.
      layer_lists: regular expressions of the names of lists of layers. If there are none, `layers`
        applies to all lists.
      whole: the names of modules that are saved as complete tensors.
      tokens: the ids of trained tokens by the ends of the names of embeddings. The empty name
        stands for the input embedding.
      ties: whether the adapters of modules that share a tensor were tied.
    """

    alpha: float
    rank: int | None = None
    rank_stabilized: bool = False
    has_magnitudes: bool = False
    rank_pattern: Mapping[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = dataclasses.field(default_factory=dict)
    targets: str | tuple[str, ...] | None = None
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None
    layer_lists: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    tokens: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    ties: bool = False

    @classmethod
    def read(cls, path: pathlib.Path) -> PeftConfig:
        """Reads the file ``adapter_config.json``.

        Raises:
          ValueError: if an option has a value that is not supported. The message names the option.
        """
        data = read_json(path)
        with describing(path, "Merge the adapters into the model with PEFT, and give that folder."):
            _check_options(data)
            tokens = data.get("trainable_token_indices") or {}
            by_module = tokens if isinstance(tokens, dict) else {"": tokens}
            is_without_targets = data.get("target_modules") is None
            config = cls(
                alpha=float(data["lora_alpha"]),
                rank=data.get("r"),
                rank_stabilized=bool(data.get("use_rslora")),
                has_magnitudes=bool(data.get("use_dora")),
                rank_pattern=_mapping(data, "rank_pattern"),
                alpha_pattern=_mapping(data, "alpha_pattern"),
                targets=None if is_without_targets else _names(data, "target_modules"),
                excluded=_names(data, "exclude_modules"),
                layers=_indices(data.get("layers_to_transform")),
                layer_lists=_as_tuple(_names(data, "layers_pattern")),
                whole=_as_tuple(_names(data, "modules_to_save")),
                tokens={name: tuple(map(int, ids)) for name, ids in by_module.items()},
                ties=bool(data.get("ensure_weight_tying")),
            )
            config.check_patterns()
            return config

    def check_patterns(self) -> None:
        """Raises a `ValueError` if an option is not a valid regular expression."""
        expressions = {
            "rank_pattern": tuple(self.rank_pattern),
            "alpha_pattern": tuple(self.alpha_pattern),
            "layers_pattern": self.layer_lists,
            "modules_to_save": self.whole,
        }
        if isinstance(self.targets, str):
            expressions["target_modules"] = (self.targets,)
        if isinstance(self.excluded, str):
            expressions["exclude_modules"] = (self.excluded,)
        for name, patterns in expressions.items():
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(
                        f"{name} contains {pattern!r}, which is not a valid regular expression: "
                        f"{error}"
                    ) from None

    @property
    def ties_tokens(self) -> bool:
        """Whether the modules that share the input embedding have the same rows of trained tokens.

        PEFT ties these modules, unless the configuration names modules with different ids.
        """
        return self.ties or len(set(self.tokens.values())) <= 1

    def select(self, modules: Iterable[str], *, outputs: Collection[str]) -> set[str]:
        """Returns the names of the modules that have low-rank updates, by PEFT's rules.

        Args:
          modules: the names of all matrices and embeddings.
          outputs: the names of the output projections, and of embeddings, which `ALL_LINEAR` does
            not select.
        """
        if isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR:
            return {name for name in modules if name not in outputs and not self._is_excluded(name)}
        return {name for name in modules if not self._is_excluded(name) and self._is_target(name)}

    def _is_excluded(self, module: str) -> bool:
        """Returns whether a module cannot have an update."""
        is_whole = any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in self.whole)
        return is_whole or (bool(self.excluded) and _matches(self.excluded, module))

    def _is_target(self, module: str) -> bool:
        """Returns whether ``target_modules`` selects a module, in one of the selected layers."""
        if self.targets is None or not _matches(self.targets, module):
            return False
        # `layers` only restricts targets that are ends of names. Regular expressions and complete
        # names specify the layer themselves.
        if not self.layers or isinstance(self.targets, str) or module in self.targets:
            return True
        # An index is the first number in a name that follows the name of a list of layers.
        lists = [rf"(?:^|.*?\.){name}" for name in self.layer_lists] or [r".*?\.[^.]*"]
        matches = (re.match(rf"{name}\.(?P<index>\d+)\.", module) for name in lists)
        found = next(filter(None, matches), None)
        return found is not None and int(found["index"]) in self.layers

    def rank_of(self, module: str) -> int | None:
        """Returns the rank of a module's update, or `None` if it is not known."""
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Returns the scale of a module's update."""
        alpha = float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (rank**0.5 if self.rank_stabilized else rank)

    def tokens_of(self, module: str) -> tuple[int, ...]:
        """Returns the ids of the tokens that are trained in a module."""
        return next((ids for name, ids in self.tokens.items() if module.endswith(name)), ())


def _check_options(config: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names an option of PEFT whose value is not supported."""
    for name, allowed in OPTIONS.items():
        value = config.get(name)
        if value not in allowed and (value is not None or name == "peft_type"):
            raise ValueError(f"{name} is {format_value(value)}, which is not supported")
    for name in sorted(config.keys() - OPTIONS.keys() - IGNORED):
        if config[name] not in (None, False, [], {}):
            raise ValueError(
                f"{name} is {format_value(config[name])}, but this option is not known"
            )


def _mapping(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns an option that maps patterns to numbers."""
    value = data.get(name) or {}
    numbers = value.values() if isinstance(value, dict) else [None]
    if not all(isinstance(x, int | float) and x > 0 for x in numbers):
        raise ValueError(
            f"{name} is {format_value(value)}, but it must map patterns to positive numbers"
        )
    return dict(value)


def _names(data: Mapping[str, Any], name: str) -> str | tuple[str, ...]:
    """Returns an option that is a pattern or a list of names. Null means an empty list."""
    value = data.get(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list | None) or not all(isinstance(x, str) for x in value or ()):
        raise ValueError(
            f"{name} is {format_value(value)}, but it must be a string or a list of strings"
        )
    return tuple(value or ())


def _as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns a tuple of names, which has one entry if `names` is a string."""
    return (names,) if isinstance(names, str) else names


def _indices(value: Any) -> tuple[int, ...] | None:
    """Returns the indices of layers, which PEFT stores as a number or a list of numbers."""
    if value is None:
        return None
    return tuple(map(int, value)) if isinstance(value, list) else (int(value),)


def _matches(names: str | tuple[str, ...], module: str) -> bool:
    """Returns whether a regular expression matches a module, or one of `names` ends its name."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches the end of a module's name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
