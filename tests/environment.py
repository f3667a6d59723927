"""The environment of processes that tests start."""

import os


def without_devices() -> dict[str, str]:
    """The tests' own, without the number of devices that they run on."""
    own = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    flags = own["XLA_FLAGS"].split()
    return {**own, "XLA_FLAGS": " ".join(f for f in flags if "device_count" not in f)}
