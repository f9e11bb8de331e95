"""What ranks hold makes the whole: blocks by layout, and boxes of ranges of a block."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.engine.placement import MeshRank, dims_of, placed_boxes
from autoshard.layout.layout import Layout
from autoshard.spec.mesh import Mesh
from tests.ranks.shares import Held, assemble

MESH = Mesh.parse("pp=1,edp=2,ep=1,cp=3,kv=2,rep=1 on 0-11")
BACKWARDS = Mesh.parse("pp=1,edp=2,ep=1,cp=3,kv=2,rep=1 on 11-0")
LAYOUTS = ["[batch/dp, seq/cp.tp, hidden]", "[batch, seq/tp.cp, hidden/edp]", "[batch/kv, seq, hidden/cp]"]


@pytest.mark.parametrize("mesh", [MESH, BACKWARDS])
@given(text=st.sampled_from(LAYOUTS), sizes=st.tuples(*[st.integers(1, 9)] * 3))
def test_blocks_of_all_ranks_make_the_whole(mesh, text, sizes):
    layout = Layout.parse(text)
    whole = np.arange(float(np.prod(sizes))).reshape(sizes)
    first = MeshRank(mesh=mesh, rank=0, sizes=dict(zip(dims_of(layout), sizes, strict=True)))
    ranks = [first.at(rank) for rank in range(mesh.num_ranks)]
    held = [Held(bounds=rank.bounds(layout), array=rank.block(whole, layout)) for rank in ranks]
    assert all(part.array.shape == rank.shape(layout) for part, rank in zip(held, ranks, strict=True))
    np.testing.assert_array_equal(assemble(sizes, held), whole)
    pieces = [
        Held(bounds=part.bounds, array=part.array.reshape(-1)[slice(*ends)], piece=ends)
        for part in held
        for ends in itertools.pairwise([0, part.array.size // 2, part.array.size])
    ]
    np.testing.assert_array_equal(assemble(sizes, pieces), whole)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((((0, 1), [1.0]), ((0, 1), [np.nextafter(1.0, 2.0)])), "two ranks hold different replicas"),
        ((((1, 2), [1.0]),), "2 of 3 elements lie on no rank"),
        ((((0, 2), [1.0] * 3),), "3 numbers for a block of 2"),
    ],
)
def test_what_makes_no_whole_is_refused(parts, message):
    with pytest.raises(AssertionError, match=message):
        assemble((3,), [Held(bounds=(bounds,), array=np.array(array)) for bounds, array in parts])


def test_a_range_of_a_block_lies_where_the_block_does():
    found = list(placed_boxes(((2, 4), (3, 6)), 1, 5))
    assert found == [((2, 4), (1, 2), slice(0, 2)), ((3, 3), (1, 2), slice(2, 4))]
