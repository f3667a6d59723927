"""Tests utilization, which is the FLOP rate of a model divided by the peak rate of a chip.

The free memory of a host is tested, too.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from synthesizer_jax.costs import chips, host_memory, utilization
from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.costs.utilization import step_flops, utilizations
from synthesizer_jax.models import Size, t5
from synthesizer_jax.runs import metrics

D, F, H, E, V, Q, K, BATCH = 16, 24, 2, 4, 32, 8, 12, 3


def forward():
    """Returns the multiply-adds for one example in a model with two layers.

    The model has an encoder layer, a decoder layer and an output projection.
    """

    def attention(q, k):
        """Returns the multiply-adds of an attention layer."""
        return 2 * q * D * H * E + 2 * k * D * H * E + 2 * q * k * H * E

    def feed_forward(n):
        """Returns the multiply-adds of a feed-forward layer."""
        return 3 * n * D * F

    encoder = attention(K, K) + feed_forward(K)
    decoder = attention(Q, Q) + attention(Q, K) + feed_forward(Q)
    return encoder + decoder + Q * D * V


@pytest.mark.parametrize("remat", [None, "full"])
def test_a_step_is_six_times_the_multiply_adds(remat):
    model = t5(Size(D, 1, F, H, E), vocab_size=V, remat=remat)
    found = step_flops(model, batch_size=BATCH, inputs=K, targets=Q)
    assert found == pytest.approx(6 * BATCH * forward(), rel=1e-3)
    summary = summarize(model, inputs_length=K, targets_length=Q)
    assert summary.flops_per_token == pytest.approx(2 * forward() / (K + Q), abs=1)
    assert summary.cache_bytes_per_token == 4 * 2 * H * E  # keys and values of all heads


def test_rates_of_an_interval(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])
    throughput = metrics.Throughput()
    throughput.utilizations = {"mfu": 0.05}
    for capacity in (20, 60) * 3:  # the capacity changes between batches
        throughput.add(10.0, capacity=capacity)
    now[0] = 2.0
    speeds = {"steps_per_second": 3.0, "tokens_per_second": 30.0, "padding": 0.75}
    assert throughput.read() == speeds | {"mfu": pytest.approx(0.15)}


def test_mfu_is_a_share_of_the_published_peak_and_the_product_has_its_own_name(monkeypatch):
    def found(flops, kind):
        device = SimpleNamespace(device_kind=kind, platform="tpu")
        return utilizations(flops, SimpleNamespace(devices=np.array([device]), size=4), "bfloat16")

    monkeypatch.setattr(utilization, "product_rate", lambda platform, dtype: 100e12)
    shares = {"mfu": pytest.approx(0.25), "product_utilization": pytest.approx(0.4925)}
    assert found(197e12, "TPU v5 lite") == shares
    assert found(40e12, "A new chip") == {"product_utilization": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("TPU v2", 22.5e12, 22.5e12),  # JAX shows two devices per chip
        ("TPU v4", 275e12, 275e12),
        ("TPU v5 lite", 197e12, 197e12),
        ("TPU v5p", 459e12, 459e12),
        ("TPU7x", 1153.5e12, 1153.5e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 494.5e12),
        ("NVIDIA H100 NVL", 835.5e12, 417.5e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA H200", 989.5e12, 494.5e12),
        ("NVIDIA GH200 480GB", 989.5e12, 494.5e12),
        ("NVIDIA B200", 2250e12, 1100e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 156e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 156e12),
        ("Tesla T4", None, 8.1e12),
        ("NVIDIA L40S", None, None),  # an L40S must not be mistaken for an L4
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None, None),
        ("TPU v5 lite pod", None, None),
    ],
)
def test_peaks_are_found_by_the_names_that_jax_gives(kind, bfloat16, float32):
    assert chips.peak_flops(kind, "bfloat16") == bfloat16
    assert chips.peak_flops(kind, "float32") == float32
    assert chips.peak_flops(kind, "int8") is None


def test_memory_and_swap_that_the_host_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "meminfo")
    assert host_memory.free_memory() is None
    for text, free in (
        ("MemTotal: 900 kB\nMemAvailable:  300 kB\n\nSwapFree: 20 kB\n", 320 * 1024),
        ("MemTotal:  900 kB\nMemFree:  300 kB\n", None),
    ):
        host_memory.MEMORY.write_text(text)
        assert host_memory.free_memory() == free
