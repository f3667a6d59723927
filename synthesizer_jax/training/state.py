"""Everything that training changes, and how it is laid over a mesh."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from synthesizer_jax.optimizers import Optimizer
from synthesizer_jax.optimizers.adafactor import state_axes
from synthesizer_jax.parameters import Variables, abstract_variables
from synthesizer_jax.sharding import replicated, shardings
from synthesizer_jax.typing import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run; a plain pytree.

    Attributes:
      step: number of finished steps, an int32 array.
      params: trainable parameters, float32.
      constants: saved, never optimized (Fixed Random tables).
      opt_state: the optimizer's state.
    """

    step: PyTree
    params: PyTree
    constants: PyTree
    opt_state: PyTree

    @property
    def variables(self) -> Variables:
        """What the model's `apply` takes."""
        return {"params": self.params, **({"constants": self.constants} if self.constants else {})}


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


def example_tokens(
    inputs_length: int, targets_length: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Abstract inputs of a model, batch one."""
    shape = lambda n: jax.ShapeDtypeStruct((1, n), jnp.int32)
    return shape(inputs_length), shape(targets_length)


def make_layout(
    model: nn.Module,
    recipe: Optimizer,
    *,
    tokens: tuple[jax.ShapeDtypeStruct, ...],
    mesh: Mesh | AbstractMesh,
) -> tuple[optax.GradientTransformation, Layout]:
    """Builds the optimizer, which is told the logical axes, and plans the state.

    Args:
      model: an unbound model.
      recipe: the optimizer's configuration.
      tokens: abstract inputs, see `example_tokens`.
      mesh: the device mesh.
    """
    shapes, axes = abstract_variables(model, *tokens)
    optimizer = recipe.build(axes["params"])
    constants = shapes.get("constants", {})
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=shapes["params"],
        constants=constants,
        opt_state=jax.eval_shape(optimizer.init, shapes["params"]),
    )
    opt_axes = state_axes(state.opt_state, axes["params"], shapes["params"])
    layout = TrainState(
        step=replicated(mesh),
        params=shardings(axes["params"], shapes["params"], mesh),
        constants=shardings(axes.get("constants", {}), constants, mesh),
        opt_state=shardings(opt_axes, state.opt_state, mesh),
    )
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, layout
    )
    return optimizer, Layout(abstract=abstract, axes=axes["params"])


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    *,
    seed: int,
    tokens: tuple[jax.ShapeDtypeStruct, ...],
) -> TrainState:
    """Fresh parameters, made directly in their places on the mesh.

    The values depend on the seed alone, not on the mesh (partitionable random bits).
    """

    def make(key: jax.Array) -> TrainState:
        zeros = [jnp.zeros(t.shape, t.dtype) for t in tokens]
        variables = model.init(key, *zeros)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=variables["params"],
            constants=variables.get("constants", {}),
            opt_state=optimizer.init(variables["params"]),
        )

    return jax.jit(make, out_shardings=layout.shardings)(jax.random.key(seed))
