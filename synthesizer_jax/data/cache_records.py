"""Chunks of a task's tokens as bytes, and the steps that follow SeqIO's cache point, in NumPy.

A record holds the tokens of up to `members.CHUNK` examples before EOS, sentinels and truncation, so
that one cache serves all lengths. In little-endian order it consists of two uint32, the number of
examples and the bytes per token; the lengths of all inputs and of all targets (uint32); and the
tokens of all inputs and of all targets, as uint16 where they fit and else as uint32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from synthesizer_jax.data.members import CHUNK, Chunk, Ragged
from synthesizer_jax.data.vocabularies import EOS

_COUNT = np.dtype("<u4")
_TOKENS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def encode_chunk(chunk: Chunk) -> bytes:
    """Returns a chunk of examples as a record."""
    sides = (chunk.inputs, chunk.targets)
    largest = max(int(side.ids.max(initial=0)) for side in sides)
    width = 2 if largest < 2**16 else 4
    parts = [np.array([len(chunk), width], _COUNT)]
    parts += [np.diff(side.ends).astype(_COUNT) for side in sides]
    parts += [side.ids.astype(_TOKENS[width]) for side in sides]
    return b"".join(part.tobytes() for part in parts)


def decode_chunk(record: bytes, *, vocab_size: int) -> Chunk:
    """Returns the chunk of examples that a record holds.

    Args:
      record: from `encode_chunk`; it is not trusted.
      vocab_size: number of ids of the vocabulary.

    Raises:
      ValueError: it is not such a record.
    """
    count, width = np.frombuffer(record, _COUNT, 2).tolist()
    if not 1 <= count <= CHUNK or width not in _TOKENS:
        raise ValueError(f"it says that it holds {count} examples of {width} bytes per token")
    lengths = np.frombuffer(record, _COUNT, 2 * count, offset=2 * _COUNT.itemsize)
    tokens = np.frombuffer(record[(2 + 2 * count) * _COUNT.itemsize :], _TOKENS[width])
    ends = [np.concatenate([[0], np.cumsum(part, dtype=np.int64)]) for part in np.split(lengths, 2)]
    if ends[0][-1] + ends[1][-1] != len(tokens):
        raise ValueError(f"it holds {len(tokens)} tokens, not {ends[0][-1] + ends[1][-1]}")
    if len(tokens) and tokens.max() >= vocab_size:
        raise ValueError(f"it holds the token {tokens.max()} of a vocabulary of {vocab_size}")
    ids = np.split(tokens.astype(np.int32), [ends[0][-1]])
    return Chunk(*map(Ragged, ids, ends))


def finish_chunk(
    chunk: Chunk, lengths: Mapping[str, int], *, sentinel: int | None, has_inputs: bool = True
) -> Chunk:
    """Truncates examples and adds what follows the cache point, as SeqIO's steps do.

    These steps are `preprocessors.append_sentinel` (for sentinel tasks) and SeqIO's
    ``append_eos_after_trim``.

    Args:
      chunk: from `decode_chunk`.
      lengths: the maximum numbers of ``inputs`` and ``targets``, including EOS.
      sentinel: id of the sentinel; None: the task has none.
      has_inputs: whether the task has inputs; otherwise they remain empty.
    """
    inputs, targets = chunk.inputs, chunk.targets
    if sentinel is not None:
        inputs = _truncate(_insert(inputs, inputs.ends[1:], sentinel), lengths["inputs"] - 1)
        targets = _truncate(_insert(targets, targets.ends[:-1], sentinel), lengths["targets"] - 1)
    else:
        if has_inputs:
            inputs = _truncate(inputs, lengths["inputs"] - 1, keep_last=False)
        targets = _truncate(targets, lengths["targets"] - 1, keep_last=False)
    targets = _insert(targets, targets.ends[1:], EOS)
    return Chunk(_insert(inputs, inputs.ends[1:], EOS) if has_inputs else inputs, targets)


def _insert(sequences: Ragged, places: np.ndarray, token: int) -> Ragged:
    """Inserts a token into every sequence, at its beginning or at its end."""
    ids = np.insert(sequences.ids, places, token)
    return Ragged(ids, sequences.ends + np.arange(len(sequences.ends)))


def _truncate(sequences: Ragged, limit: int, *, keep_last: bool = True) -> Ragged:
    """Truncates sequences to a number of tokens: at their ends, or before their last token."""
    lengths = np.diff(sequences.ends)
    if lengths.max(initial=0) <= limit:
        return sequences
    position = np.arange(len(sequences.ids)) - np.repeat(sequences.ends[:-1], lengths)
    if keep_last and limit > 0:
        kept = (position < limit - 1) | (position == np.repeat(lengths - 1, lengths))
    else:
        kept = position < limit
    ends = np.concatenate([[0], np.cumsum(np.minimum(lengths, limit))])
    return Ragged(sequences.ids[kept], ends)
