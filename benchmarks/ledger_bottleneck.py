"""How well one head of dot products can express any attention: Bhojanapalli et al. 2020, theorem 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

LENGTH, WIDTH, STEPS = 32, 64, 4000


def fit_divergence(head_dim: int, seed: int) -> float:
    """Returns the divergence, in nats per query, of random attention from the nearest that was found.

    Queries and keys of `head_dim` are fitted by Adam to ``[32, 32]`` positive weights, whose logits are
    normal with a standard deviation of 2, of random tokens with 64 features. The theorem: a head as wide as
    there are tokens, which have no fewer features, expresses all of them; a narrower one does not.
    """
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (LENGTH, WIDTH))
    wanted = jax.nn.log_softmax(2.0 * jax.random.normal(keys[1], (LENGTH, LENGTH)))
    start = tuple(
        jax.random.normal(key, (WIDTH, head_dim)) * WIDTH**-0.5 for key in (keys[2], keys[3])
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(0.03, STEPS))

    def divergence(kernels: tuple[jax.Array, jax.Array]) -> jax.Array:
        query, key = (x @ kernel for kernel in kernels)
        found = jax.nn.log_softmax(query @ key.T * head_dim**-0.5)
        return jnp.mean(jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1))

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        kernels, state = carry
        updates, state = optimizer.update(jax.grad(divergence)(kernels), state)
        return (optax.apply_updates(kernels, updates), state), None

    (kernels, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), length=STEPS)
    return float(divergence(kernels))
