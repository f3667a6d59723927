"""The metrics that need no training run, by their names in docs/results.toml."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from benchmarks.ledger.tables import Run
from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.costs.summary import num_elements
from synthesizer_jax.primitives.parameters import abstract_variables

LENGTH, WIDTH, STEPS = 32, 64, 4000


def millions(run: Run) -> float:
    """Returns the number of parameters of a recipe's model, in millions."""
    experiment = load_recipe(run.recipe).resolved()
    shapes, _ = abstract_variables(experiment.model, *experiment.example)
    return num_elements(shapes["params"]) / 1e6


def divergence(run: Run) -> float:
    """Returns the divergence, in nats per query, of random attention from the nearest that was found.

    Queries and keys of one head, of the size that the system is named after, are fitted by Adam to
    ``[32, 32]`` positive weights, whose logits are normal with a standard deviation of 2, of random tokens
    with 64 features. Bhojanapalli et al. 2020, theorem 1: a head as wide as there are tokens, which have no
    fewer features, expresses all of them; a narrower one does not.
    """
    head_dim = int(run.system)
    keys = jax.random.split(jax.random.key(run.seed), 4)
    x = jax.random.normal(keys[0], (LENGTH, WIDTH))
    wanted = jax.nn.log_softmax(2.0 * jax.random.normal(keys[1], (LENGTH, LENGTH)))
    start = tuple(jax.random.normal(key, (WIDTH, head_dim)) * WIDTH**-0.5 for key in keys[2:])
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, STEPS))

    def loss(kernels: tuple[jax.Array, jax.Array]) -> jax.Array:
        query, key = (x @ kernel for kernel in kernels)
        found = jax.nn.log_softmax(query @ key.T * head_dim**-0.5)
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        kernels, state = carry
        updates, state = optimizer.update(jax.grad(loss)(kernels), state)
        return (optax.apply_updates(kernels, updates), state), None

    (kernels, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)
    return float(loss(kernels))
