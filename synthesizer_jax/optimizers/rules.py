"""Learning rates, weight decay and freezing by the path of a parameter, around any optimizer.

The optimizer is built for the parameters that are trained, and knows nothing of the others: they have no
gradients, no state, and no part in a clipped global norm.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.models import stacks_of
from synthesizer_jax.optimizers.base import Optimizer, own_weight_decay, schedule_of
from synthesizer_jax.parameters import check_path_pattern
from synthesizer_jax.registry import register
from synthesizer_jax.typing import NotNegative, PyTree

Keys: TypeAlias = tuple[str, ...]
"""The path of a parameter in nested dictionaries."""


@register
@dataclasses.dataclass(frozen=True)
class OptimizerRule:
    r"""How the parameters with some paths are optimized.

    Attributes:
      pattern: a regular expression for whole paths of parameters, with looped layers, such as
        ``encoder/layers_\d+/.*/table``. Scanned layers have these paths too.
      learning_rate: factor of the optimizer's learning rate; its updates are multiplied by it.
      weight_decay: decoupled weight decay: an update also subtracts the learning rate times this times
        the parameter. 0 exempts parameters from what later rules say. None: none but the optimizer's own,
        which must be 0 if any rule has a weight decay, even one of 0.
      frozen: the parameters are not changed.
    """

    pattern: str
    learning_rate: NotNegative = 1.0
    weight_decay: NotNegative | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        check_path_pattern("training.rules", self.pattern)
        if self.frozen and (self.learning_rate, self.weight_decay) != (1.0, None):
            raise ValueError(
                f"training.rules: {self.pattern!r} is frozen and has a learning_rate or a weight_decay, "
                "which would do nothing; leave them out"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """How one parameter is optimized; a leaf of a pytree.

    The arrays have no dimensions, or ``[layers, 1, …]`` if rules tell the layers of a scanned stack apart.

    Attributes:
      rate: factor of the learning rate, float32.
      decay: decoupled weight decay, float32.
      frozen: whether it is frozen.
    """

    rate: np.ndarray
    decay: np.ndarray
    frozen: np.ndarray

    @property
    def trained(self) -> bool:
        """Whether any layer of it is trained."""
        return not self.frozen.all()


_DEFAULT = OptimizerRule(".*")


def resolve_rules(model: nn.Module, params: PyTree, rules: Sequence[OptimizerRule]) -> PyTree:
    """Returns the `Settings` of every parameter; the first rule that matches its path decides.

    Args:
      model: the unbound model.
      params: its parameters, or their shapes.
      rules: the rules.

    Raises:
      ValueError: a rule decides nothing, or every parameter is frozen.
    """
    flat = traverse_util.flatten_dict(params)
    paths = {keys: looped_paths(model, keys) for keys in flat}
    chosen = {
        keys: [next(r for r in (*rules, _DEFAULT) if re.fullmatch(r.pattern, p)) for p in found]
        for keys, found in paths.items()
    }
    _check_decides(rules, paths, chosen)
    settings = {keys: _settings(chosen[keys], x.ndim) for keys, x in flat.items()}
    if not any(s.trained for s in settings.values()):
        raise ValueError("training.rules freeze every parameter; leave some to be trained")
    return traverse_util.unflatten_dict(settings)


def looped_paths(model: nn.Module, keys: Keys) -> list[str]:
    """Returns the paths that a parameter has with looped layers, one for each layer that is stacked in it.

    Args:
      model: the unbound model.
      keys: the path in the model's own parameters.
    """
    stack = stacks_of(model).get(keys[0])
    if stack is None or not stack.scan or not keys[1].startswith("run_"):
        return ["/".join(keys)]
    index = int(keys[1].removeprefix("run_"))
    first = sum(run.repeats for run in stack.runs[:index])
    layers = range(first, first + stack.runs[index].repeats)
    return ["/".join((keys[0], f"layers_{layer}", *keys[2:])) for layer in layers]


def collapse_layers(path: str) -> str:
    """Returns the path with ``layers_*`` for the number of its layer."""
    return re.sub(r"layers_\d+", "layers_*", path)


def _settings(rules: Sequence[OptimizerRule], ndim: int) -> Settings:
    """Returns the settings of a parameter; several rules are those of its stacked layers."""
    shape = (len(rules), *[1] * (ndim - 1))
    if len(set(rules)) == 1:
        rules, shape = rules[:1], ()
    return Settings(
        rate=np.reshape([r.learning_rate for r in rules], shape).astype(np.float32),
        decay=np.reshape([r.weight_decay or 0.0 for r in rules], shape).astype(np.float32),
        frozen=np.reshape([r.frozen for r in rules], shape),
    )


def _check_decides(
    rules: Sequence[OptimizerRule],
    paths: Mapping[Keys, Sequence[str]],
    chosen: Mapping[Keys, Sequence[OptimizerRule]],
) -> None:
    """Raises a `ValueError` for the first rule that decides for no parameter."""
    used = {rule for found in chosen.values() for rule in found}
    for rule in rules:
        if rule in used:
            continue
        known = [path for found in paths.values() for path in found]
        if any(re.fullmatch(rule.pattern, path) for path in known):
            raise ValueError(
                f"training.rules: earlier rules decide for all that {rule.pattern!r} matches; put it "
                "before them, or leave it out"
            )
        example = did_you_mean(rule.pattern, known) or f", such as {min(known)!r}"
        raise ValueError(
            f"training.rules: {rule.pattern!r} matches no parameter{example}; a pattern matches whole paths"
        )


@dataclasses.dataclass(frozen=True)
class RuledOptimizer:
    """An optax transformation of the parameters that are trained, and the settings of all.

    Attributes:
      transformation: made for what `trained` returns.
      settings: `Settings` of every parameter.
      schedule: the learning rate by the number of updates; needed for weight decay by rules.
    """

    transformation: optax.GradientTransformation
    settings: PyTree
    schedule: optax.Schedule | None = None

    def init(self, params: PyTree) -> PyTree:
        """Returns the state of the transformation, which has nothing of frozen parameters."""
        return self.transformation.init(self.trained(params))

    def trained(self, tree: PyTree) -> PyTree:
        """Returns nested dictionaries like the parameters without the entries that are frozen."""
        return trained_entries(self.settings, tree)

    def merge(self, trained: PyTree, params: PyTree) -> PyTree:
        """Returns the parameters with those that are trained replaced."""
        return merge_entries(trained, params)

    def mask_gradients(self, gradients: PyTree) -> PyTree:
        """Returns the gradients of `trained` parameters with zeros for frozen layers of scanned stacks."""
        return jax.tree.map(
            lambda s, g: jnp.where(s.frozen, jnp.zeros_like(g), g) if s.frozen.any() else g,
            self.trained(self.settings),
            gradients,
        )

    def update(
        self, gradients: PyTree, opt_state: PyTree, params: PyTree, *, step: jax.Array
    ) -> tuple[PyTree, PyTree]:
        """Returns the new parameters and the new state; frozen parameters keep every bit.

        Args:
          gradients: from `mask_gradients`.
          opt_state: the transformation's.
          params: all parameters.
          step: number of updates before this one.
        """
        trained, settings = self.trained(params), self.trained(self.settings)
        updates, opt_state = self.transformation.update(gradients, opt_state, trained)
        rate = 0.0 if self.schedule is None else self.schedule(step)
        new = jax.tree.map(
            lambda s, p, u: _apply_update(s, p, u, learning_rate=rate), settings, trained, updates
        )
        return self.merge(new, params), opt_state


def _apply_update(
    settings: Settings, p: jax.Array, u: jax.Array, *, learning_rate: jax.typing.ArrayLike
) -> jax.Array:
    """Returns a parameter after an update."""
    if settings.decay.any():
        u = u - jnp.asarray(learning_rate * settings.decay) * p
    if (settings.rate != 1.0).any():
        u = jnp.asarray(settings.rate) * u
    new = (p + u).astype(p.dtype)
    return jnp.where(settings.frozen, p, new) if settings.frozen.any() else new


def trained_entries(settings: PyTree, tree: PyTree) -> PyTree:
    """Returns nested dictionaries without the entries that are frozen.

    Args:
      settings: `Settings` of every parameter.
      tree: of the same structure, or with tuples of axes as leaves.
    """
    trains = traverse_util.flatten_dict(settings)
    flat = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict({k: x for k, x in flat.items() if trains[k].trained})


def merge_entries(trained: PyTree, params: PyTree) -> PyTree:
    """Returns nested dictionaries with the entries of `trained`, and otherwise those of `params`."""
    flat = traverse_util.flatten_dict(params) | traverse_util.flatten_dict(trained)
    return traverse_util.unflatten_dict(flat)


def build_optimizer(
    recipe: Optimizer,
    rules: Sequence[OptimizerRule] = (),
    *,
    model: nn.Module,
    params: PyTree,
    axes: PyTree,
) -> RuledOptimizer:
    """Builds an optimizer for the parameters that the rules leave to be trained.

    Args:
      recipe: the optimizer's configuration.
      rules: see `resolve_rules`.
      model: the unbound model.
      params: the shapes of its parameters.
      axes: like the parameters, with a tuple of logical axis names for each.

    Raises:
      ValueError: a rule decides nothing; every parameter is frozen; or a rule has a weight decay, and
        the optimizer has its own or no schedule.
    """
    settings = resolve_rules(model, params, rules)
    schedule = schedule_of(recipe)
    _check_weight_decay(recipe, rules)
    transformation = recipe.build(trained_entries(settings, axes))
    return RuledOptimizer(transformation, settings, schedule)


def _check_weight_decay(recipe: Optimizer, rules: Sequence[OptimizerRule]) -> None:
    """Raises a `ValueError` if rules have a weight decay that the optimizer does not go with."""
    name, decays = type(recipe).__name__, [rule.weight_decay for rule in rules]
    if any(decays) and schedule_of(recipe) is None:
        raise ValueError(
            f"training.rules: weight_decay needs the learning rate, and {name} has no field "
            "learning_rate; give it one, or leave weight_decay out"
        )
    own = own_weight_decay(recipe)
    if own and any(decay is not None for decay in decays):
        raise ValueError(
            f"training.rules: weight_decay, even of 0, would leave {name}'s own, {own:g}, as it is; set it "
            f"to 0 and end the rules with one for '.*' with weight_decay={own:g}"
        )
