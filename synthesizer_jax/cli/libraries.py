"""Imports of optional libraries: without their messages, and with an error if they are not installed."""

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
        *("sacrebleu", "sklearn", "scipy", "tensorboardX", "grain", "array_record"),
    ),
}
"""The extras of this package, and the modules that they install."""

NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called"
    r"|[IW]\d{4} \d\d:\d\d:"
    r"|To enable the following instructions:"
    r"|E\d{4} \d\d:\d\d:.* (failed call to cuInit|Unable to register cu\w+ (factory|plugin))"
)
"""Beginnings of the lines that TensorFlow prints when it is imported, with and without GPUs."""


def load_data_libraries() -> None:
    """Imports TensorFlow and SeqIO without their messages, and hides the GPUs from TensorFlow.

    C++ code prints the messages before their level can be set, so standard error is captured during the
    import, and everything but `NOISE` is then printed.

    Raises:
      ModuleNotFoundError: TensorFlow or SeqIO is not installed.
    """
    load_tensorflow()
    with _filter_noise():
        import seqio  # noqa: F401 - imports TensorFlow Text, which prints the messages again


def load_tensorflow() -> None:
    """Imports TensorFlow as `load_data_libraries` does; `files` reads buckets with it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with _filter_noise():
        import tensorflow as tf

        # TensorFlow would reserve all memory of the GPUs, which JAX needs.
        tf.config.set_visible_devices([], "GPU")


@contextlib.contextmanager
def _filter_noise() -> Iterator[None]:
    """Captures standard error, and prints the lines that do not match `NOISE` when the context ends."""
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


def missing_extra_message(error: BaseException) -> str | None:
    """Returns the message for an import that needs an extra; None for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed; run pip install 'synthesizer_jax[{extra}]'"
    return None
