"""Model FLOP/s utilisation counts what the model needs, not what was done."""

import jax.numpy as jnp
import pytest

from synthesizer_jax.models import Size, t5
from synthesizer_jax.training import metrics
from synthesizer_jax.training.utilisation import product_rate, step_flops

D, F, H, E, V, Q, K, BATCH = 16, 24, 2, 4, 32, 8, 12, 3


def forward():
    """Multiply-adds of an encoder and a decoder layer and the output projection, one example."""
    attention = lambda q, k: 2 * q * D * H * E + 2 * k * D * H * E + 2 * q * k * H * E
    feed_forward = lambda n: 3 * n * D * F
    encoder = attention(K, K) + feed_forward(K)
    decoder = attention(Q, Q) + attention(Q, K) + feed_forward(Q)
    return encoder + decoder + Q * D * V


@pytest.mark.parametrize("remat", [None, "full"])
def test_a_step_is_six_times_the_multiply_adds(remat):
    model = t5(Size(D, 1, F, H, E), vocab_size=V, remat=remat)
    found = step_flops(model, batch_size=BATCH, inputs=K, targets=Q)
    # Counts are kept per token, rounded.
    assert found == pytest.approx(6 * BATCH * forward(), rel=1e-3)


def test_rates_of_an_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    throughput = metrics.Throughput(utilisation=0.05)
    for _ in range(6):
        throughput.add(10.0)
    now[0] = 2.0
    rates = throughput.read()
    assert rates == {"steps_per_second": 3.0, "tokens_per_second": 30.0, "mfu": pytest.approx(0.15)}


def test_a_product_takes_time():
    rate = product_rate("cpu", jnp.dtype("float32"))
    assert 1e8 < rate < 1e16
    assert product_rate("cpu", jnp.dtype("float32")) == rate
