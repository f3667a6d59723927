"""Everything that training changes, and how it is laid over a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.optimizers import Optimizer
from synthesizer_jax.optimizers.adafactor import state_axes
from synthesizer_jax.optimizers.rules import OptimizerRule, RuledOptimizer, build_optimizer
from synthesizer_jax.primitives.parameters import Variables, abstract_variables
from synthesizer_jax.sharding import replicated, shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run; a pytree.

    Attributes:
      step: number of finished steps, an int32 array.
      params: trainable parameters, float32.
      constants: saved, never optimized (Fixed Random tables).
      opt_state: the optimizer's state.
      ema: the exponential moving average of the parameters; empty if the run has none.
    """

    step: PyTree
    params: PyTree
    constants: PyTree
    opt_state: PyTree
    ema: PyTree = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> Variables:
        """What the model's `apply` takes in training."""
        return {"params": self.params, **({"constants": self.constants} if self.constants else {})}

    @property
    def averaged_variables(self) -> Variables:
        """What is evaluated and used later: the variables with the average of the parameters, if any."""
        return {**self.variables, **({"params": self.ema} if self.ema else {})}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes, logical axes and shardings of a run's state, known before anything is allocated.

    Attributes:
      abstract: a `TrainState` of `jax.ShapeDtypeStruct` leaves with shardings.
      axes: logical axes of the parameters.
    """

    abstract: TrainState
    axes: PyTree

    @property
    def shardings(self) -> TrainState:
        """A `TrainState` of `NamedSharding` leaves."""
        return jax.tree.map(lambda x: x.sharding, self.abstract)


def make_layout(
    model: nn.Module,
    config: Optimizer,
    *,
    tokens: tuple[jax.ShapeDtypeStruct, ...],
    mesh: Mesh | AbstractMesh,
    rules: Sequence[OptimizerRule] = (),
    ema: bool = False,
) -> tuple[RuledOptimizer, Layout]:
    """Builds the optimizer, which is told the logical axes, and plans the state.

    Args:
      model: an unbound model.
      config: the optimizer's configuration.
      tokens: abstract arguments of the model's call, such as `Experiment.example`.
      mesh: the device mesh.
      rules: see `build_optimizer`.
      ema: whether the state has an average of the parameters.
    """
    shapes, axes = abstract_variables(model, *tokens)
    optimizer = build_optimizer(config, rules, model=model, params=shapes["params"], axes=axes["params"])
    constants = shapes.get("constants", {})
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=shapes["params"],
        constants=constants,
        opt_state=jax.eval_shape(optimizer.init, shapes["params"]),
        ema=shapes["params"] if ema else {},
    )
    opt_axes = state_axes(state.opt_state, axes["params"], shapes["params"])
    of_params = shardings(axes["params"], shapes["params"], mesh)
    state_shardings = TrainState(
        step=replicated(mesh),
        params=of_params,
        constants=shardings(axes.get("constants", {}), constants, mesh),
        opt_state=shardings(opt_axes, state.opt_state, mesh),
        ema=of_params if ema else {},
    )
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, state_shardings
    )
    return optimizer, Layout(abstract=abstract, axes=axes["params"])


def init_state(
    model: nn.Module,
    optimizer: RuledOptimizer,
    layout: Layout,
    *,
    seed: int,
    tokens: tuple[jax.ShapeDtypeStruct, ...],
) -> TrainState:
    """Fresh parameters, made directly in their places on the mesh.

    The values depend on the seed alone, not on the mesh (partitionable random bits).
    """

    def make(key: jax.Array) -> TrainState:
        variables = model.init(key, *(jnp.zeros(t.shape, t.dtype) for t in tokens))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=variables["params"],
            constants=variables.get("constants", {}),
            opt_state=optimizer.init(variables["params"]),
            ema=variables["params"] if layout.abstract.ema else {},
        )

    return jax.jit(make, out_shardings=layout.shardings)(jax.random.key(seed))


@jax.named_scope("optimizer")
def apply_gradients(
    state: TrainState, gradients: PyTree, optimizer: RuledOptimizer, *, ema: float | None = None
) -> TrainState:
    """Returns the state after a step.

    The average follows the parameters by ``average + (1 − d) · (params − average)`` with
    ``d = min(ema, (1 + step) / (10 + step))``, as in TensorFlow's ``ExponentialMovingAverage`` with
    ``num_updates``: it starts as the initial parameters, and the smaller decay of the first steps forgets
    them. A bias correction is not needed.

    Args:
      state: the state before it.
      gradients: from `RuledOptimizer.mask_gradients`.
      optimizer: the optimizer.
      ema: decay of the average of the parameters; None: the state has none.
    """
    params, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    average = state.ema
    if ema is not None:
        weight = 1.0 - jnp.minimum(ema, (1.0 + state.step) / (10.0 + state.step))
        average = jax.tree.map(lambda a, p: a + (weight * (p - a)).astype(a.dtype), average, params)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, ema=average)


def restart_ema(state: TrainState) -> TrainState:
    """Returns a fresh state whose average, if it has one, starts as a copy of its parameters."""
    copied = jax.tree.map(jnp.copy, state.params) if state.ema else {}  # a step donates both
    return dataclasses.replace(state, ema=copied)
