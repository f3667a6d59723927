"""The variables that a run trains, which are all variables of a model without adapters."""

from __future__ import annotations

from typing import Generic, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.primitives.parameters import Variables, abstract_variables, without_sown

Model = TypeVar("Model", bound=nn.Module)


class Trainable(Generic[Model]):
    """Describes the variables that a run trains and saves, which are all variables of a model.

    The subclass `adapters.Adapted` describes variables that modify a base instead. Training, plans
    and checkpoints only use the methods of this class, so the same code works with and without
    adapters::

        shapes, axes = trainable.abstract()
        variables = trainable.init(key, base)
        y = model.apply(trainable.merge(variables, base), x)

    Args:
      model: the unbound model.
      example: the shapes and dtypes of the arguments of the model's `__call__`.
    """

    has_base = False
    """Whether the variables modify a base, which is a complete set of the model's variables.

    If there is no base, all arguments named `base` are empty dictionaries.
    """

    def __init__(self, model: Model, example: tuple[jax.ShapeDtypeStruct, ...]):
        self.model = model
        self.example = example

    def abstract(self) -> tuple[Variables, PyTree]:
        """Returns the shapes and the logical axes of the variables that are trained and saved.

        The variables include constants, which are saved but never optimized.
        """
        return self.abstract_model()

    def abstract_base(self) -> tuple[Variables, PyTree]:
        """Returns the shapes and the logical axes of the variables of the base."""
        return {}, {}

    def abstract_model(self) -> tuple[Variables, PyTree]:
        """Returns the shapes and the logical axes of all variables of the model."""
        return abstract_variables(self.model, *self.example)

    def init(self, key: jax.Array, base: Variables) -> Variables:
        """Returns the initial variables. The method can be traced.

        Args:
          key: a random key.
          base: the variables of the base.
        """
        del base
        example = (jnp.zeros(x.shape, x.dtype) for x in self.example)
        return without_sown(self.model.init(key, *example))

    def merge(self, variables: Variables, base: Variables) -> Variables:
        """Returns the variables for the model's `apply`. The method can be traced.

        Args:
          variables: the variables that are trained and saved.
          base: the variables of the base.
        """
        del base
        return variables

    def merge_for_evaluation(self, variables: Variables, base: Variables) -> Variables:
        """Returns the variables for an evaluation during training.

        An evaluation reads each variable many times, so the variables are merged once, before the
        evaluation. The arguments are the same as those of `merge`.
        """
        return self.merge_arrays(variables, base)

    def merge_arrays(self, variables: Variables, base: Variables) -> Variables:
        """Returns the result of `merge`. Subclasses may compile the computation."""
        return self.merge(variables, base)
