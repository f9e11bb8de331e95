import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.engine.place import Held, Place, assemble, dims_of
from autoshard.layout.layout import Layout
from autoshard.spec.mesh import Mesh

MESH = Mesh.parse("pp=1,edp=2,ep=1,cp=3,kv=2,rep=1 on 0-11")
BACKWARDS = Mesh.parse("pp=1,edp=2,ep=1,cp=3,kv=2,rep=1 on 11-0")
LAYOUTS = [
    "[batch/dp, seq/cp.tp, hidden]",
    "[batch, seq/tp.cp, hidden/edp]",
    "[batch, seq, hidden]",
    "[batch/kv, seq, hidden/cp]",
]


@pytest.mark.parametrize("mesh", [MESH, BACKWARDS])
@given(text=st.sampled_from(LAYOUTS), sizes=st.tuples(*[st.integers(1, 9)] * 3))
def test_blocks_of_all_ranks_make_the_whole(mesh, text, sizes):
    layout = Layout.parse(text)
    whole = np.arange(float(np.prod(sizes))).reshape(sizes)
    first = Place(mesh=mesh, rank=0, sizes=dict(zip(dims_of(layout), sizes, strict=True)))
    places = [first.at(rank) for rank in range(mesh.num_ranks)]
    held = [Held(bounds=place.bounds(layout), array=place.block(whole, layout)) for place in places]
    assert all(part.array.shape == place.shape(layout) for part, place in zip(held, places, strict=True))
    np.testing.assert_array_equal(assemble(sizes, held), whole)
    pieces = [
        Held(bounds=part.bounds, array=part.array.reshape(-1)[slice(*ends)], piece=ends)
        for part in held
        for ends in itertools.pairwise([0, part.array.size // 2, part.array.size])
    ]
    np.testing.assert_array_equal(assemble(sizes, pieces), whole)


def test_replicas_that_differ_in_the_last_bit_are_told():
    parts = [Held(bounds=((0, 1),), array=np.array([value])) for value in (1.0, np.nextafter(1.0, 2.0))]
    with pytest.raises(AssertionError, match="two ranks hold different replicas"):
        assemble((1,), parts)


def test_a_hole_is_told():
    with pytest.raises(AssertionError, match="2 of 3 elements lie on no rank"):
        assemble((3,), [Held(bounds=((1, 2),), array=np.ones(1))])


def test_a_block_of_another_size_is_told():
    with pytest.raises(AssertionError, match="3 numbers for a place of 2"):
        assemble((3,), [Held(bounds=((0, 2),), array=np.ones(3))])


def test_the_first_rank_along_atoms_has_none_before_it():
    places = [Place(mesh=MESH, rank=rank, sizes={}) for rank in range(12)]
    assert [place.rank for place in places if place.is_first(("edp", "kv"))] == [0, 2, 4]
    assert [place.rank for place in places if place.is_first(())] == list(range(12))
