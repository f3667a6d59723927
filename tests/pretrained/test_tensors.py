"""Parts of parameters, read from the arrays of other libraries."""

import itertools
import math

import numpy as np
import pytest

from synthesizer_jax.pretrained.tensors import SAME, Correspondence, Layout, Tensor, read_parameter

SHAPE = (6, 4, 8)
PARTS = [(slice(None), slice(0, 2), slice(5, None)), (slice(2, 6), slice(1, 4), slice(None))]
LAYOUTS = [SAME, *itertools.starmap(Layout, itertools.product((0, 1, 2, 3), (False, True)))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_part_of_a_parameter_equals_the_part_of_the_whole(layout: Layout, dtype: str) -> None:
    ours = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE).astype(dtype)
    theirs = np.array(layout.from_ours(ours))
    parameter = Correspondence((), SHAPE, "kernel", layout)
    for part in [(), *PARTS]:
        found = read_parameter(Tensor.of(theirs), parameter, part)
        assert found.dtype == ours.dtype
        np.testing.assert_array_equal(found, ours[part])


@pytest.mark.parametrize("layout", [Layout(1, True), Layout(2, True), Layout(2)], ids=str)
def test_a_shard_along_one_axis_reads_no_more_than_the_shard(layout: Layout) -> None:
    """The shard is a part of the first of the axes that the other library merges."""
    axis = layout.rows if layout.rows == 1 else 0
    part = tuple(slice(2, 4) if i == axis else slice(None) for i in range(3))
    theirs = np.zeros(layout.shape(SHAPE), np.float32)
    sizes = []

    def read(index):
        """Reads a part, and notes its size."""
        x = theirs[index]
        sizes.append(x.size)
        return x

    tensor = Tensor(theirs.shape, "float32", read)
    x = read_parameter(tensor, Correspondence((), SHAPE, "kernel", layout), part)
    assert sizes == [x.size]
