"""Random numbers for tests."""

from collections.abc import Iterator

import numpy as np

from synthesizer_jax.data.objectives import CounterDraws


def counted(seed: int = 0) -> CounterDraws:
    return CounterDraws(np.random.SeedSequence(seed))


class Given:
    """Returns what it is given, call by call, whatever the part."""

    def __init__(self, *values: list):
        self._values: Iterator[np.ndarray] = iter([np.asarray(v) for v in values])

    def uniform(self, count: int) -> np.ndarray:
        return self._next(count).astype(np.float32)

    def integers(self, count: int, *, low: int, high: int) -> np.ndarray:
        values = self._next(count)
        assert (low <= values).all() and (values < high).all()
        return values

    def permutation(self, count: int) -> np.ndarray:
        values = self._next(count)
        assert sorted(values) == list(range(count))
        return values

    def fork(self, part: int) -> "Given":
        del part
        return self

    def _next(self, count: int) -> np.ndarray:
        values = next(self._values)
        assert len(values) == count
        return values
