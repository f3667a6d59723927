"""Learning rates and freezing by the path of a parameter, around any optimizer.

The optimizer is built for the parameters that are trained, and knows nothing of the others: they have no
gradients, no state, and no part in a clipped global norm.
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
from synthesizer_jax.models import stacks_of
from synthesizer_jax.optimizers.base import Optimizer, count_updates, schedule_of
from synthesizer_jax.primitives.parameters import check_path_pattern, check_patterns_decide


@register
@dataclasses.dataclass(frozen=True)
class OptimizerRule:
    r"""How the parameters with some paths are optimized.

    Attributes:
      pattern: a regular expression for whole paths of parameters, with looped layers, such as
        ``encoder/layers_\d+/.*/table``. Scanned layers have these paths too.
      learning_rate: factor of the optimizer's learning rate; its updates are multiplied by it.
      frozen: the parameters are not changed, as with a `learning_rate` of 0.
    """

    pattern: str
    learning_rate: NotNegative = 1.0
    frozen: bool = False

    def __post_init__(self) -> None:
        check_path_pattern("training.rules", self.pattern)

    @property
    def rate(self) -> float:
        """The factor of the learning rate, 0 for what is frozen."""
        return 0.0 if self.frozen else self.learning_rate


def resolve_rules(model: nn.Module, params: PyTree, rules: Sequence[OptimizerRule]) -> PyTree:
    """Returns the factor of every parameter's learning rate; the first rule that matches its path decides.

    Returns:
      Like the parameters, float32 arrays without dimensions, or ``[layers, 1, …]`` if rules tell the
      layers of a scanned stack apart. Where all are 0 the parameter is frozen.

    Raises:
      ValueError: a rule decides nothing, or every parameter is frozen.
    """
    every = (*rules, OptimizerRule(".*"))
    all_paths: list[str] = []
    factors = {}
    for keys, x in traverse_util.flatten_dict(params).items():
        paths = looped_paths(model, keys)
        chosen = [next(r for r in every if re.fullmatch(r.pattern, path)) for path in paths]
        all_paths += paths
        rates = np.asarray([rule.rate for rule in chosen], np.float32)
        same = len(set(chosen)) == 1
        factors[keys] = rates[0] if same else rates.reshape(len(rates), *[1] * (x.ndim - 1))
    check_patterns_decide("training.rules", [rule.pattern for rule in rules], all_paths)
    if not any(rate.any() for rate in factors.values()):
        raise ValueError("training.rules freeze every parameter; leave some to be trained")
    return traverse_util.unflatten_dict(factors)


def looped_paths(model: nn.Module, keys: tuple[str, ...]) -> list[str]:
    """Returns the paths that a parameter has with looped layers, one for each layer stacked in it."""
    stack = stacks_of(model).get(keys[0])
    if stack is None or not stack.scan or not keys[1].startswith("run_"):
        return ["/".join(keys)]
    index = int(keys[1].removeprefix("run_"))
    first = sum(run.repeats for run in stack.runs[:index])
    layers = range(first, first + stack.runs[index].repeats)
    return ["/".join((keys[0], f"layers_{layer}", *keys[2:])) for layer in layers]


@dataclasses.dataclass(frozen=True)
class RuledOptimizer:
    """An optax transformation of the parameters that are trained.

    Attributes:
      transformation: made for what `trained` returns.
      rates: see `resolve_rules`.
      schedule: the learning rate by the number of updates; None: the optimizer has none.
    """

    transformation: optax.GradientTransformation
    rates: PyTree
    schedule: optax.Schedule | None = None

    def init(self, params: PyTree) -> PyTree:
        """Returns the state of the transformation, which holds no entries for frozen parameters.

        PRNG keys in it, such as those of ``optax.noisy_sgd``, are kept as their data, because checkpoints
        hold plain arrays only.
        """
        state = self.transformation.init(self.trained(params))
        return _without_keys(state)

    def trained(self, tree: PyTree) -> PyTree:
        """Returns nested dictionaries like the parameters without the entries that are frozen."""
        return trained_entries(self.rates, tree)

    def mask_gradients(self, gradients: PyTree) -> PyTree:
        """Returns the gradients of `trained` parameters with zeros for frozen layers of scanned stacks."""
        return jax.tree.map(
            lambda g, rate: g if rate.all() else jnp.where(rate == 0, jnp.zeros_like(g), g),
            gradients,
            self.trained(self.rates),
        )

    def update(self, gradients: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the new parameters and the new state, from what `mask_gradients` returns.

        Frozen parameters keep every bit.
        """

        def apply_update(p: jax.Array, u: jax.Array, rate: np.ndarray) -> jax.Array:
            if (rate != 1.0).any():
                u = jnp.asarray(rate) * u
            new = (p + u).astype(p.dtype)
            return new if rate.all() else jnp.where(rate == 0, p, new)

        trained = self.trained(params)
        opt_state = self._with_keys(opt_state, trained)
        updates, opt_state = self.transformation.update(gradients, opt_state, trained)
        new = jax.tree.map(apply_update, trained, updates, self.trained(self.rates))
        return merge_entries(new, params), _without_keys(opt_state)

    def _with_keys(self, opt_state: PyTree, trained: PyTree) -> PyTree:
        """Returns a state with PRNG keys in the place of their data, as the transformation has made it."""
        implementations = list[Any]()  # JAX's specification of a leaf's keys; None: no keys

        def record(trained: PyTree) -> None:
            for x in jax.tree.leaves(self.transformation.init(trained)):
                implementations.append(jax.random.key_impl(x) if _is_key(x) else None)

        jax.eval_shape(record, trained)
        leaves, structure = jax.tree.flatten(opt_state)
        restored = [
            x if implementation is None else jax.random.wrap_key_data(x, impl=implementation)
            for x, implementation in zip(leaves, implementations, strict=True)
        ]
        return jax.tree.unflatten(structure, restored)

    def learning_rate(self, opt_state: PyTree) -> dict[str, jax.Array]:
        """Returns ``learning_rate``, that of the next update; nothing if it is not known."""
        count = count_updates(opt_state)
        if self.schedule is None or count is None:
            return {}
        return {"learning_rate": jnp.asarray(self.schedule(count), jnp.float32)}


def _is_key(x: jax.Array) -> bool:
    """Returns whether an array holds PRNG keys, and not numbers."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _without_keys(state: PyTree) -> PyTree:
    """Returns a state with the data of PRNG keys in their place."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def trained_entries(rates: PyTree, tree: PyTree) -> PyTree:
    """Returns nested dictionaries, or such with axes as leaves, without the entries that are frozen."""
    factors, flat = traverse_util.flatten_dict(rates), traverse_util.flatten_dict(tree)
    return traverse_util.unflatten_dict({k: x for k, x in flat.items() if factors[k].any()})


def merge_entries(trained: PyTree, params: PyTree) -> PyTree:
    """Returns nested dictionaries with the entries of `trained`, and otherwise those of `params`."""
    flat = traverse_util.flatten_dict(params) | traverse_util.flatten_dict(trained)
    return traverse_util.unflatten_dict(flat)


def build_optimizer(
    config: Optimizer,
    rules: Sequence[OptimizerRule] = (),
    *,
    model: nn.Module,
    params: PyTree,
    axes: PyTree,
) -> RuledOptimizer:
    """Builds an optimizer for the parameters that the rules leave to be trained; see `resolve_rules`.

    `axes` is like the parameters, with a tuple of logical axis names for each.
    """
    rates = resolve_rules(model, params, rules)
    return RuledOptimizer(config.build(trained_entries(rates, axes)), rates, schedule_of(config))
