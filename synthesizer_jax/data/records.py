"""Chunks of a task's tokens as bytes.

A record holds the tokens of up to `task_streams.CHUNK` examples. In little-endian order it consists of two
uint32, the number of examples and the bytes per token; the lengths of all inputs and of all targets
(uint32); and the tokens of all inputs and of all targets, as uint16 where they fit and else as uint32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synthesizer_jax.data.task_streams import CHUNK, Example
from synthesizer_jax.data.vocabularies import EOS

_COUNT = np.dtype("<u4")
_TOKENS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class RaggedTokens(NamedTuple):
    """Sequences of token ids, one after another: sequence i is ``ids[ends[i]:ends[i + 1]]``."""

    ids: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> RaggedTokens:
        """Returns sequences one after another."""
        ends = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, np.int32), *sequences]).astype(np.int32), ends)

    def truncate(self, limit: int, *, keep_last: int) -> RaggedTokens:
        """Returns the sequences with at most `limit` tokens, the last `keep_last` of them kept."""
        before, after = self._places()
        keep_last = min(keep_last, limit)
        return self._select((before < limit - keep_last) | (after < keep_last))

    def without_eos(self) -> RaggedTokens:
        """Returns the sequences without the EOS at their ends."""
        _, after = self._places()
        return self._select((after > 0) | (self.ids != EOS))

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many tokens of its sequence are before and after every token."""
        starts, stops = (np.repeat(x, np.diff(self.ends)) for x in (self.ends[:-1], self.ends[1:]))
        places = np.arange(len(self.ids))
        return places - starts, stops - 1 - places

    def _select(self, kept: np.ndarray) -> RaggedTokens:
        """Returns the sequences of some of the tokens."""
        return RaggedTokens(self.ids[kept], np.concatenate([[0], np.cumsum(kept)])[self.ends])


class Chunk:
    """The inputs and the targets of at most `CHUNK` consecutive examples of a task."""

    def __init__(self, inputs: RaggedTokens, targets: RaggedTokens):
        self.inputs, self.targets = inputs, targets
        # Slicing with Python's integers takes a third of the time that it takes with NumPy's.
        self._input_ends, self._target_ends = inputs.ends.tolist(), targets.ends.tolist()

    def __len__(self) -> int:
        return len(self._input_ends) - 1

    def __getitem__(self, index: int) -> Example:
        starts, ends = self._input_ends, self._target_ends
        return (
            self.inputs.ids[starts[index] : starts[index + 1]],
            self.targets.ids[ends[index] : ends[index + 1]],
        )

    def truncate(self, lengths: Mapping[str, int], *, keep_last: Mapping[str, int]) -> Chunk:
        """Returns the examples with at most so many ``inputs`` and ``targets``, their last ones kept."""
        return Chunk(
            self.inputs.truncate(lengths["inputs"], keep_last=keep_last["inputs"]),
            self.targets.truncate(lengths["targets"], keep_last=keep_last["targets"]),
        )

    def documents(self) -> Chunk:
        """Returns the examples as documents for an objective: targets without EOS alone."""
        return Chunk(RaggedTokens.of([np.zeros(0)] * len(self)), self.targets.without_eos())

    def to_bytes(self) -> bytes:
        """Returns the examples as a record."""
        sides = (self.inputs, self.targets)
        largest = max(int(side.ids.max(initial=0)) for side in sides)
        width = 2 if largest < 2**16 else 4
        parts = [np.array([len(self), width], _COUNT)]
        parts += [np.diff(side.ends).astype(_COUNT) for side in sides]
        parts += [side.ids.astype(_TOKENS[width]) for side in sides]
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, record: bytes, *, vocab_size: int) -> Chunk:
        """Returns the examples that a record holds; raises a `ValueError` if it is damaged."""
        count, width = np.frombuffer(record, _COUNT, 2).tolist()
        if not 1 <= count <= CHUNK or width not in _TOKENS:
            raise ValueError(f"it says that it holds {count} examples of {width} bytes per token")
        lengths = np.frombuffer(record, _COUNT, 2 * count, offset=2 * _COUNT.itemsize)
        tokens = np.frombuffer(record[(2 + 2 * count) * _COUNT.itemsize :], _TOKENS[width])
        ends = [np.cumsum([0, *part], dtype=np.int64) for part in np.split(lengths, 2)]
        if ends[0][-1] + ends[1][-1] != len(tokens):
            raise ValueError(f"it holds {len(tokens)} tokens, not {ends[0][-1] + ends[1][-1]}")
        if len(tokens) and tokens.max() >= vocab_size:
            raise ValueError(f"it holds the token {tokens.max()} of a vocabulary of {vocab_size}")
        ids = np.split(tokens.astype(np.int32), [ends[0][-1]])
        return cls(*map(RaggedTokens, ids, ends))
