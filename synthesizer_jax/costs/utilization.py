"""Utilization of the devices, relative to their published peak (MFU) or to a measured matrix product."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp

from synthesizer_jax.costs.chips import peak_flops
from synthesizer_jax.costs.summary import forward_flops
from synthesizer_jax.models.token_model import TokenModel

SIDE = {"cpu": 1024, "accelerator": 8192}
"""Number of rows and columns of the matrices of the measured product."""


def step_flops(model: TokenModel, *, batch_size: int, inputs: int, targets: int) -> float:
    """Returns the floating-point operations of a training step: three times those of its forward pass.

    Rematerialization is not counted (Chowdhery et al. 2022, PaLM, appendix B). `inputs` and `targets` are
    the numbers of tokens of a row, including padding; see `forward_flops`.
    """
    forward = forward_flops(model, inputs_length=inputs, targets_length=targets)
    return 3.0 * forward * batch_size


def utilizations(flops: float, mesh: jax.sharding.Mesh, dtype: str) -> dict[str, float]:
    """Returns the utilization of the devices at one step per second.

    Args:
      flops: floating-point operations of a step on all devices.
      mesh: the devices, all of the same kind.
      dtype: that of the computation, such as ``bfloat16``.

    Returns:
      ``mfu``, the model FLOPs utilization relative to the published peak of the devices (`peak_flops`;
      Chowdhery et al. 2022, PaLM, appendix B), if that is known; and ``product_utilization``, relative to
      the rate of a large matrix product on one of them (`product_rate`).
    """
    device = mesh.devices.flat[0]
    rates = {
        "mfu": peak_flops(device.device_kind, dtype),
        "product_utilization": product_rate(device.platform, jnp.dtype(dtype)),
    }
    return {name: flops / (rate * mesh.size) for name, rate in rates.items() if rate is not None}


@functools.cache
def product_rate(platform: str, dtype: jnp.dtype) -> float:
    """Returns the FLOP/s of the fastest of twenty products of square matrices on one local device."""
    n = SIDE["cpu" if platform == "cpu" else "accelerator"]
    device = jax.local_devices(backend=platform)[0]
    x = jax.device_put(jnp.ones((n, n), dtype), device)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2.0 * n**3 / min(seconds)
