"""Boxes of ranges: they tile the range, in order, and are as few as they can be."""

import math

import numpy as np
from hypothesis import given, strategies as st

from autoshard.engine.pieces import boxes_of, placed_boxes

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_range_in_storage_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    low = data.draw(st.integers(0, size))
    high = data.draw(st.integers(low, size))
    numbers = np.arange(size).reshape(shape)
    boxes = list(boxes_of(shape, low, high))
    found = [numbers[tuple(slice(at, at + length) for at, length in zip(*box, strict=True))].ravel() for box in boxes]
    assert np.concatenate([*found, []]).tolist() == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_range_of_a_block_lies_where_the_block_does() -> None:
    found = list(placed_boxes(((2, 4), (3, 6)), 1, 5))
    assert found == [((2, 4), (1, 2), slice(0, 2)), ((3, 3), (1, 2), slice(2, 4))]
