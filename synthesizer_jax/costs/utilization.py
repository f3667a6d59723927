"""Utilization of devices, relative to their published peak (MFU) or a measured matrix product."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp

from synthesizer_jax.costs.chips import peak_flops
from synthesizer_jax.costs.summary import forward_flops
from synthesizer_jax.models.token_model import TokenModel

SIDE = {"cpu": 1024, "accelerator": 8192}
"""The number of rows and columns of the matrices in the measured product."""


def step_flops(model: TokenModel, *, batch_size: int, inputs: int, targets: int) -> float:
    """Returns the floating-point operations of a training step.

    A training step has three times the operations of the forward pass, because the backward pass
    has twice as many operations as the forward pass. Rematerialization is not counted (Chowdhery et
    al. 2022, PaLM, appendix B).

    Args:
      model: the model.
      batch_size: the number of rows in a batch.
      inputs: the number of input tokens in a row, including padding.
      targets: the number of target tokens in a row, including padding.
    """
    forward = forward_flops(model, inputs_length=inputs, targets_length=targets)
    return 3.0 * forward * batch_size


def utilizations(flops: float, mesh: jax.sharding.Mesh, dtype: str) -> dict[str, float]:
    """Returns the utilization of the devices at a speed of one step per second.

    Multiply the result by the steps per second to get the utilization of a run.

    Args:
      flops: floating-point operations of a step on all devices together.
      mesh: the devices, which must all be of the same kind.
      dtype: the dtype of the computation, such as ``bfloat16``.

    Returns:
      A dictionary with the entries ``mfu`` and ``product_utilization``. ``mfu`` is the model FLOPs
      utilization, relative to the published peak of the devices (`peak_flops`; Chowdhery et al.
      2022, PaLM, appendix B). If the peak is unknown, ``mfu`` is missing. ``product_utilization``
      is relative to the rate of a large matrix product on one of the devices (`product_rate`).
    """
    device = mesh.devices.flat[0]
    rates = {
        "mfu": peak_flops(device.device_kind, dtype),
        "product_utilization": product_rate(device.platform, jnp.dtype(dtype)),
    }
    return {name: flops / (rate * mesh.size) for name, rate in rates.items() if rate is not None}


@functools.cache
def product_rate(platform: str, dtype: jnp.dtype) -> float:
    """Returns the FLOP/s of a large product of square matrices, measured on one local device.

    The product runs twenty times, and the fastest run counts.

    Args:
      platform: the platform of the device, such as ``cpu``.
      dtype: the dtype of the matrices.
    """
    n = SIDE["cpu" if platform == "cpu" else "accelerator"]
    device = jax.local_devices(backend=platform)[0]
    x = jax.device_put(jnp.ones((n, n), dtype), device)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()  # compile before measuring
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2.0 * n**3 / min(seconds)
