import math

from hypothesis import given, strategies as st

from autoshard.layout.shards import block_bounds, rank_bounds
from autoshard.spec.mesh import Mesh


@given(st.integers(0, 40), st.integers(1, 9))
def test_the_blocks_of_a_cut_follow_one_another_and_cover_all(size, count):
    blocks = [block_bounds(size, [(count, index)]) for index in range(count)]
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == size
    assert max(stop - start for start, stop in blocks) == math.ceil(size / count)


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=3, max_size=3), st.permutations(("edp", "cp", "kv")), st.data())
def test_a_group_holds_a_whole_dim_in_the_order_of_its_members(sizes, names, data):
    mesh = Mesh.virtual(**dict(zip(("edp", "cp", "kv"), sizes, strict=True)))
    atoms, size = tuple(names[: data.draw(st.integers(0, 3))]), data.draw(st.integers(1, 13))
    for group in mesh.groups(atoms):
        held = [element for rank in group for element in range(*rank_bounds(mesh, size, atoms)[rank])]
        assert held == list(range(size))


def test_an_atom_that_a_mesh_does_not_have_cuts_nothing():
    assert rank_bounds(Mesh.virtual(cp=2), 8, ("kv", "cp"))[1] == (4, 8)
    assert [block_bounds(5, [(4, index)]) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
