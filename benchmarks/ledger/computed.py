"""Computes the metrics that need no training run. docs/results.toml names these functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from benchmarks.ledger.tables import Run
from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.costs.summary import num_elements
from synthesizer_jax.primitives.parameters import abstract_variables

LENGTH = 32
"""The number of tokens for which `divergence` fits a head."""
WIDTH = 64
"""The number of features of each token in `divergence`."""
STEPS = 4000
"""The number of optimization steps for which `divergence` fits a head."""


def millions(run: Run) -> float:
    """Returns the number of parameters of a recipe's model, in millions."""
    experiment = load_recipe(run.recipe).resolved()
    shapes, _ = abstract_variables(experiment.model, *experiment.example)
    return num_elements(shapes["params"]) / 1e6


def divergence(run: Run) -> float:
    """Returns how closely one head can imitate random attention weights.

    The measure is the KL divergence from the random weights to the head's weights, in nats per
    query. The divergence is 0 if the head imitates the weights exactly.

    Adam trains the query and key projections of the head, so that its weights for 32 random tokens
    with 64 features approximate random weights ``[32, 32]``. The random weights are the softmax of
    normally distributed logits with a standard deviation of 2. The name of the system is the size
    of the head. By theorem 1 of Bhojanapalli et al. 2020, a head can express all attention weights
    if its size and the number of features are at least the number of tokens. A smaller head cannot
    express all weights.
    """
    head_dim = int(run.system)
    keys = jax.random.split(jax.random.key(run.seed), 4)
    x = jax.random.normal(keys[0], (LENGTH, WIDTH))
    wanted = jax.nn.log_softmax(2.0 * jax.random.normal(keys[1], (LENGTH, LENGTH)))
    start = tuple(jax.random.normal(key, (WIDTH, head_dim)) * WIDTH**-0.5 for key in keys[2:])

    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, STEPS))

    def loss(kernels: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns the KL divergence, averaged over all queries."""
        query, key = (x @ kernel for kernel in kernels)
        found = jax.nn.log_softmax(query @ key.T * head_dim**-0.5)
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        """Makes one optimization step with Adam."""
        kernels, state = carry
        updates, state = optimizer.update(jax.grad(loss)(kernels), state)
        return (optax.apply_updates(kernels, updates), state), None

    (kernels, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)
    return float(loss(kernels))
