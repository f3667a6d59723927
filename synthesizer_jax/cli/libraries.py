"""The libraries of the optional parts: whether they are there, and what they say when they are loaded."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

EXTRAS = {
    "data": (
        *("tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "matplotlib"),
        *("sacrebleu", "sklearn", "scipy", "tensorboardX"),
    ),
    "hf": ("transformers", "safetensors", "torch"),
}
"""The extras of this package, and the modules that come with each."""

NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called"
    r"|[IW]\d{4} \d\d:\d\d:"
    r"|To enable the following instructions:"
    r"|E\d{4} \d\d:\d\d:.* (failed call to cuInit|Unable to register cu\w+ (factory|plugin))"
)
"""How the lines begin that TensorFlow writes when it is loaded, on machines without GPUs and with them."""


def load_data_libraries() -> None:
    """Loads TensorFlow and SeqIO without their start-up notes, and keeps TensorFlow off the GPUs.

    The notes come from C++ before any level can be set, so standard error is held back meanwhile; all but
    `NOISE` is passed on.

    Raises:
      ModuleNotFoundError: they are not installed.
    """
    load_tensorflow()
    with quietly():
        import seqio  # noqa: F401 - with TensorFlow Text, which says it all again


def load_tensorflow() -> None:
    """The same for TensorFlow alone, which also reads and writes buckets."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with quietly():
        import tensorflow as tf

        # Devices belong to JAX; TensorFlow would take all of their memory.
        tf.config.set_visible_devices([], "GPU")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Holds standard error back and passes on what is no `NOISE`."""
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(keepends=True):
                if not NOISE.match(line):
                    sys.stderr.write(line)


def missing(error: BaseException) -> str | None:
    """What to install where an import failed for want of an extra; None: it is something else."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed, which this needs: pip install 'synthesizer_jax[{extra}]'"
    return None
