"""Imports of optional libraries: without their messages, and with an error if they are not installed."""

from __future__ import annotations

import os

from synthesizer_jax.import_noise import filter_import_noise

EXTRAS = {
    "train": (
        "array_record",
        "msgpack",
        "rouge_score",
        "sacrebleu",
        "sklearn",
        "scipy",
        "tensorboardX",
    ),
    "data": (
        *("tensorflow", "tensorflow_text", "tensorflow_datasets", "seqio", "matplotlib", "pyarrow"),
    ),
}
"""The extras of this package, and the modules that they install."""


def load_data_libraries() -> None:
    """Imports TensorFlow and SeqIO without their messages, and hides the GPUs from TensorFlow.

    C++ code prints the messages before their level can be set, so standard error is captured during the
    import, and everything but `import_noise.NOISE` is then printed.

    Raises:
      ModuleNotFoundError: TensorFlow or SeqIO is not installed.
    """
    load_tensorflow()
    with filter_import_noise():
        import seqio  # noqa: F401 - imports TensorFlow Text, which prints the messages again


def load_tensorflow() -> None:
    """Imports TensorFlow as `load_data_libraries` does; `files` reads buckets with it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with filter_import_noise():
        import tensorflow as tf

        # TensorFlow would reserve all memory of the GPUs, which JAX needs.
        tf.config.set_visible_devices([], "GPU")


def missing_extra_message(error: BaseException) -> str | None:
    """Returns the message for an import that needs an extra; None for other errors."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{module} is not installed; run pip install 'synthesizer_jax[{extra}]'"
    return None
