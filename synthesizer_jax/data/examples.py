"""An example of a task, which is a pair of token sequences, and the chunks that files store."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

SIDES = ("inputs", "targets")
"""The features of a task that are read."""

CHUNK = 1024
"""The number of examples in a record. The first epoch shuffles examples within such chunks."""

Example: TypeAlias = tuple[np.ndarray, np.ndarray]
"""The token ids of the inputs and of the targets, both including EOS.

The inputs are empty if the task has no inputs.
"""


class DrawnExample(NamedTuple):
    """An example that was drawn from a mixture.

    Attributes:
      inputs: the token ids of the inputs, with EOS. They are empty if the task has no inputs.
      targets: the token ids of the targets, with EOS.
      member: the index of the example's task in the mixture.
      epoch: the epoch of the task, which is the first number of its stream's position.
    """

    inputs: np.ndarray
    targets: np.ndarray
    member: int
    epoch: int
