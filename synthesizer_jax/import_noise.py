"""Hiding what TensorFlow and TensorFlow Text print when they are imported."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

NOISE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called"
    r"|[IW]\d{4} \d\d:\d\d:"
    r"|To enable the following instructions:"
    r"|E\d{4} \d\d:\d\d:.* (failed call to cuInit|Unable to register cu\w+ (factory|plugin))"
)
"""Beginnings of the lines that TensorFlow prints when it is imported, with and without GPUs."""


@contextlib.contextmanager
def filter_import_noise() -> Iterator[None]:
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
