"""What a step computes over what the devices could: by their data sheet (MFU), or by a measured product."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp

from synthesizer_jax.models import TextToText, forward_flops
from synthesizer_jax.sharding.chips import peak_flops

SIDE = {"cpu": 1024, "accelerator": 8192}
"""Side of the measured product's square matrices."""


def step_flops(model: TextToText, *, batch_size: int, inputs: int, targets: int) -> float:
    """Floating-point operations of a training step: three times its forward pass.

    Every multiply-add of a matrix product counts as two, attention and output projection included;
    what is computed twice to save memory counts once (Chowdhery et al. 2022, PaLM, appendix B).

    Args:
      model: an unbound model.
      batch_size: rows of a batch.
      inputs: encoder tokens of a row, padding included.
      targets: decoder tokens of a row.
    """
    forward = forward_flops(model, inputs_length=inputs, targets_length=targets)
    return 3.0 * forward * batch_size


def utilisations(flops: float, mesh: jax.sharding.Mesh, dtype: str) -> dict[str, float]:
    """Utilisation of the devices by a run of one step a second.

    Args:
      flops: of a step, over all devices.
      mesh: the devices, all of one kind.
      dtype: that the model computes in, such as ``bfloat16``.

    Returns:
      ``mfu``, model FLOP/s utilisation, over the published peak of the devices (`peak_flops`; Chowdhery
      et al. 2022, PaLM, appendix B), where that is known; and ``product_utilisation``, over the rate of a
      large matrix product on one of them (`product_rate`).
    """
    device = mesh.devices.flat[0]
    rates = {
        "mfu": peak_flops(device.device_kind, dtype),
        "product_utilisation": product_rate(device.platform, jnp.dtype(dtype)),
    }
    return {name: flops / (rate * mesh.size) for name, rate in rates.items() if rate is not None}


@functools.cache
def product_rate(platform: str, dtype: jnp.dtype) -> float:
    """FLOP/s of a square matrix product on one device of that platform, the best of twenty.

    Args:
      platform: such as ``cpu`` or ``tpu``.
      dtype: of the factors.
    """
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
