"""Tests that the code of docs/migration.md runs, and that its conversion gives T5's attention."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.conftest import run_page


def t5_attention(state: dict, x: np.ndarray, heads: int, lengths: list[int]) -> np.ndarray:
    """Computes bidirectional T5 attention for short rows (Raffel et al. 2020, section 2.1).

    The relative bias has 32 buckets up to distance 128.
    """

    def split(name):
        """Projects tokens, and divides the result into heads."""
        return (x @ state[f"{name}.weight"].T).reshape(*x.shape[:2], heads, -1)

    logits = np.einsum("bqhe,bkhe->bhqk", split("q"), split("k"))
    q, k = np.indices(logits.shape[-2:])
    near = abs(k - q)
    far = 8 + np.log(np.maximum(abs(k - q), 1) / 8) / np.log(128 / 8) * 8
    buckets = np.where(near < 8, near, far).astype(int) + 16 * (k > q)
    logits += state["relative_attention_bias.weight"][buckets].transpose(2, 0, 1)
    real = np.arange(x.shape[1]) < np.array(lengths)[:, None]
    weights = np.exp(logits) * real[:, None, None]
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("bhqk,bkhe->bqhe", weights, split("v"))
    return mixed.reshape(*x.shape[:2], -1) @ state["o.weight"].T


def test_the_pages_snippets_run_in_order():
    scope = run_page("docs/migration.md")
    state = {name: np.asarray(x, np.float64) for name, x in scope["state"].items()}
    expected = t5_attention(state, np.asarray(scope["x"], np.float64), 4, [16, 9])
    for i, length in enumerate([16, 9]):
        np.testing.assert_allclose(scope["y"][i, :length], expected[i, :length], atol=1e-5)
    assert not jnp.any(scope["y"][1, 9:])
    assert jax.tree.structure(scope["params"]) == jax.tree.structure(
        scope["t5_attention"].init(jax.random.key(0), scope["x"])
    )
