"""Defines an example, which is a pair of token sequences, and the number of examples in a chunk."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

SIDES = ("inputs", "targets")
"""The names of the features of a task that training reads."""

CHUNK = 1024
"""The number of examples in a record. The first epoch shuffles only the examples of each record."""

Example: TypeAlias = tuple[np.ndarray, np.ndarray]
"""A pair of the token ids of the inputs and the token ids of the targets, both including EOS.

The inputs are empty if the task has no inputs.
"""


class DrawnExample(NamedTuple):
    """An example that was drawn from a mixture.

    Attributes:
      inputs: the token ids of the inputs, with EOS. The inputs are empty if the task has no inputs.
      targets: the token ids of the targets, with EOS.
      member: the index of the example's task in the mixture.
      epoch: the epoch of the task to which the example belongs, counted from 0. The epoch is the
        first number in the position of the task's stream.
    """

    inputs: np.ndarray
    targets: np.ndarray
    member: int
    epoch: int
