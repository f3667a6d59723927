"""Sets the learning rates of parameters, or freezes parameters, according to their paths.

The optimizer is built only for the trained parameters. Frozen parameters have no gradients and no
optimizer state, and do not count in the global norm of the gradient.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import NotNegative, PyTree
from synthesizer_jax.models.token_model import looped_paths
from synthesizer_jax.optimizers.base import Optimizer, count_updates, schedule_of
from synthesizer_jax.primitives.parameters import (
    check_path_pattern,
    check_patterns_decide,
    merge_entries,
)


@register
@dataclasses.dataclass(frozen=True)
class OptimizerRule:
    r"""A rule for the learning rate of the parameters with certain paths.

    Attributes:
      pattern: a regular expression that must match the whole path of a parameter, such as
        ``encoder/layers_\d+/.*/table``. Paths have the form of looped layers, even if the model
        scans its layers.
      learning_rate: a factor by which the optimizer's updates are multiplied. Multiplying the
        optimizer's learning rate by this factor would have the same effect.
      frozen: whether the parameters are not trained. Freezing is the same as setting
        `learning_rate` to 0.
    """

    pattern: str
    learning_rate: NotNegative = 1.0
    frozen: bool = False

    def __post_init__(self) -> None:
        check_path_pattern("training.rules", self.pattern)

    @property
    def rate(self) -> float:
        """The factor of the learning rate, which is 0 if the parameters are frozen."""
        return 0.0 if self.frozen else self.learning_rate


def resolve_rules(model: nn.Module, params: PyTree, rules: Sequence[OptimizerRule]) -> PyTree:
    """Returns the factor of the learning rate for every parameter.

    The first rule that matches the path of a parameter decides. If no rule matches, the factor is
    1.

    Returns:
      A pytree like the parameters, with a float32 array for each parameter. The array is a scalar,
      or has the shape ``[layers, 1, …]`` if the rules differ between the layers of a scanned stack.
      A parameter is frozen if all factors in its array are 0.

    Raises:
      ValueError: if a rule applies to no parameter, or every parameter is frozen.
    """
    every = (*rules, OptimizerRule(".*"))
    all_paths: list[str] = []
    factors = {}
    for keys, x in traverse_util.flatten_dict(params).items():
        # A parameter of a scanned stack has one path and one rule for each of its layers.
        paths = looped_paths(model, keys)
        all_paths += paths
        chosen = [_first_match(every, path) for path in paths]
        rates = np.asarray([rule.rate for rule in chosen], np.float32)
        if len(set(chosen)) == 1:
            factors[keys] = rates[0]
        else:
            factors[keys] = rates.reshape(len(rates), *(1 for _ in x.shape[1:]))

    check_patterns_decide("training.rules", [rule.pattern for rule in rules], all_paths)
    if not any(rate.any() for rate in factors.values()):
        raise ValueError(
            "training.rules freeze every parameter. Change the rules so that some are trained."
        )
    return traverse_util.unflatten_dict(factors)


def _first_match(rules: Sequence[OptimizerRule], path: str) -> OptimizerRule:
    """Returns the first rule whose pattern matches a path. At least one pattern must match."""
    return next(rule for rule in rules if re.fullmatch(rule.pattern, path))


@dataclasses.dataclass(frozen=True)
class RuledOptimizer:
    """An optax transformation for the trained parameters, with a learning-rate factor for each.

    Attributes:
      transformation: an optax transformation for trees without frozen parameters, such as the
        results of `trained`.
      rates: the factors of the learning rate; see `resolve_rules`.
      schedule: the learning rate as a function of the number of updates, or None if the optimizer
        has no schedule.
    """

    transformation: optax.GradientTransformation
    rates: PyTree
    schedule: optax.Schedule | None = None

    def init(self, params: PyTree) -> PyTree:
        """Returns the state of the transformation, which has no entries for frozen parameters.

        Some optimizers, such as ``optax.noisy_sgd``, have PRNG keys in their state. The data of a
        key is stored instead of the key, because checkpoints hold only plain arrays.
        """
        state = self.transformation.init(self.trained(params))
        return _without_keys(state)

    def trained(self, tree: PyTree) -> PyTree:
        """Returns a tree like the parameters without the entries of frozen parameters."""
        return trained_entries(self.rates, tree)

    def mask_gradients(self, gradients: PyTree) -> PyTree:
        """Returns the gradients of trained parameters, with zeros for frozen layers.

        A scanned stack holds trained and frozen layers in one array.
        """

        def mask(g: jax.Array, rate: np.ndarray) -> jax.Array:
            """Returns the gradient of one parameter with zeros where its factor is zero."""
            if rate.all():
                return g
            return jnp.where(rate == 0, jnp.zeros_like(g), g)

        return jax.tree.map(mask, gradients, self.trained(self.rates))

    def update(self, gradients: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the new parameters and the new state.

        The values of frozen parameters do not change at all.

        Args:
          gradients: the result of `mask_gradients`.
          opt_state: the state.
          params: all parameters.
        """

        def apply_update(p: jax.Array, u: jax.Array, rate: np.ndarray) -> jax.Array:
            """Returns a new parameter, given its update and the factors of its learning rate."""
            if (rate != 1.0).any():
                u = jnp.asarray(rate) * u
            new = (p + u).astype(p.dtype)
            if rate.all():
                return new
            # Frozen layers keep their old values, because adding zero times an update could change
            # bits.
            return jnp.where(rate == 0, p, new)

        trained = self.trained(params)
        opt_state = self._with_keys(opt_state, trained)
        updates, opt_state = self.transformation.update(gradients, opt_state, trained)
        new = jax.tree.map(apply_update, trained, updates, self.trained(self.rates))
        return merge_entries(new, params), _without_keys(opt_state)

    def _with_keys(self, opt_state: PyTree, trained: PyTree) -> PyTree:
        """Returns a state in which the data of PRNG keys is replaced by the keys.

        The optax transformation expects keys and not their data.
        """
        implementations = list[Any]()  # the PRNG implementation of each leaf, or None

        def record(trained: PyTree) -> None:
            """Records the PRNG implementation of each leaf of the state, or None for numbers."""
            for x in jax.tree.leaves(self.transformation.init(trained)):
                implementations.append(jax.random.key_impl(x) if _is_key(x) else None)

        # Only the dtypes of the initial state are needed, so `init` is traced but not executed.
        jax.eval_shape(record, trained)
        leaves, structure = jax.tree.flatten(opt_state)
        restored = []
        for x, implementation in zip(leaves, implementations, strict=True):
            if implementation is not None:
                x = jax.random.wrap_key_data(x, impl=implementation)
            restored.append(x)
        return jax.tree.unflatten(structure, restored)

    def learning_rate(self, opt_state: PyTree) -> dict[str, jax.Array]:
        """Returns ``{"learning_rate": ...}`` of the next update, or ``{}`` if it is unknown."""
        count = count_updates(opt_state)
        if self.schedule is None or count is None:
            return {}
        return {"learning_rate": jnp.asarray(self.schedule(count), jnp.float32)}


def _is_key(x: jax.Array) -> bool:
    """Returns whether an array holds PRNG keys instead of numbers."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(state: PyTree) -> PyTree:
    """Returns a state in which every PRNG key is replaced by its data."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def trained_entries(rates: PyTree, tree: PyTree) -> PyTree:
    """Returns a tree without the entries of frozen parameters.

    Args:
      rates: the factors of the learning rate; see `resolve_rules`.
      tree: nested dictionaries like the parameters. Leaves may also be tuples of axis names.
    """
    factors = traverse_util.flatten_dict(rates)
    entries = traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict(
        {path: x for path, x in entries.items() if factors[path].any()}
    )


def build_optimizer(
    config: Optimizer,
    rules: Sequence[OptimizerRule] = (),
    *,
    model: nn.Module,
    params: PyTree,
    axes: PyTree,
) -> RuledOptimizer:
    """Builds an optimizer for the parameters that the rules do not freeze.

    Args:
      config: the configuration of the optimizer.
      rules: the rules; see `resolve_rules`.
      model: the model.
      params: the parameters of the model.
      axes: a pytree like the parameters, with a tuple of logical axis names for each parameter.
    """
    rates = resolve_rules(model, params, rules)
    return RuledOptimizer(config.build(trained_entries(rates, axes)), rates, schedule_of(config))
