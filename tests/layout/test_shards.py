import math

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.layout.shards import VirtualMesh, block_bounds

meshes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).map(
    lambda sizes: VirtualMesh(atoms=tuple(zip("abc", sizes, strict=False)))
)


@st.composite
def meshes_with_atoms(draw):
    """A mesh and some of its atoms in some order."""
    mesh = draw(meshes)
    names = draw(st.permutations([name for name, _ in mesh.atoms]))
    return mesh, tuple(names[: draw(st.integers(0, len(names)))])


@given(st.integers(0, 40), st.integers(1, 9))
def test_the_blocks_of_a_cut_follow_one_another_and_cover_all(size, count):
    blocks = [block_bounds(size, [(count, index)]) for index in range(count)]
    assert [start for start, _ in blocks] == [0, *(stop for _, stop in blocks[:-1])]
    assert blocks[-1][1] == size
    assert max(stop - start for start, stop in blocks) == math.ceil(size / count)


def test_the_last_blocks_are_smaller_where_a_size_does_not_divide():
    assert [block_bounds(5, [(4, index)]) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


@given(meshes_with_atoms())
def test_every_rank_is_in_one_group_whose_members_differ_only_along_the_atoms(mesh_and_atoms):
    mesh, atoms = mesh_and_atoms
    groups = list(mesh.groups(atoms))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
    for group in groups:
        assert len(group) == mesh.size(atoms)
        places = [mesh.coordinates(rank) for rank in group]
        assert all(len({place[name] for place in places}) == 1 for name, _ in mesh.atoms if name not in atoms)
        along = [tuple(place[atom] for atom in atoms) for place in places]
        assert along == sorted(along) and len(set(along)) == len(along)


@given(meshes_with_atoms(), st.integers(1, 13))
def test_a_group_holds_a_whole_dim_in_the_order_of_its_members(mesh_and_atoms, size):
    mesh, atoms = mesh_and_atoms
    for group in mesh.groups(atoms):
        held = [element for rank in group for element in range(*mesh.bounds(rank, size, atoms))]
        assert held == list(range(size))


def test_an_atom_that_a_mesh_does_not_have_cuts_nothing():
    mesh = VirtualMesh(atoms=(("a", 2),))
    assert mesh.size(("b",)) == 1
    assert mesh.bounds(1, 8, ("b", "a")) == (4, 8)
    assert list(mesh.groups(("b",))) == [(0,), (1,)]


def test_the_last_atom_counts_fastest():
    mesh = VirtualMesh(atoms=(("a", 2), ("b", 3)))
    assert mesh.coordinates(4) == {"a": 1, "b": 1}
    assert list(mesh.groups(("b", "a"))) == [(0, 3, 1, 4, 2, 5)]


def test_impossible_meshes_are_refused_all_at_once():
    with pytest.raises(InputError) as caught:
        VirtualMesh(atoms=(("a", 2), ("a", 0)))
    assert [fault.where for fault in caught.value.faults] == ["atoms", "atoms.a"]
