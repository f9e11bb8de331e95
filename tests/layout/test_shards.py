import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.layout.layout import Collective, Layout
from autoshard.layout.shards import Executor, block_bounds, rank_bounds
from autoshard.spec.mesh import Mesh

TWO, FOUR = Mesh.virtual(cp=2), Mesh.virtual(cp=2, kv=2)


def _run(mesh, text, shards, before, **sizes):
    executor = Executor(mesh=mesh, sizes=sizes)
    dims = tuple(dim for dim, _ in Layout.parse(before).dims)
    arrays = tuple(np.array(shard, dtype=float) for shard in shards)
    result = executor.run(Collective.parse(text), arrays, dims)
    return [shard.tolist() for shard in result]


def test_all_gather_joins_what_the_group_holds_in_the_groups_order():
    assert _run(TWO, "all_gather seq/cp", [[1, 2], [3]], "[seq/cp]", seq=3) == [[1, 2, 3]] * 2
    four = [[1], [2], [3], [4]]
    assert _run(FOUR, "all_gather seq/cp.kv", four, "[seq/cp.kv]", seq=4) == [[1, 2, 3, 4]] * 4
    assert _run(FOUR, "all_gather seq/kv.cp", four, "[seq/kv.cp]", seq=4) == [[1, 3, 2, 4]] * 4
    assert _run(FOUR, "all_gather seq/kv", four, "[seq/cp.kv]", seq=4) == [[1, 2], [1, 2], [3, 4], [3, 4]]


def _gather(shards, text, **sizes):
    layout = Layout.parse(text)
    dims = tuple(dim for dim, _ in layout.dims)
    return Executor(mesh=TWO, sizes=sizes).gather(tuple(np.array(shard, dtype=float) for shard in shards), dims, layout)


def test_replicas_that_differ_are_found():
    assert _gather([[1, 2], [1, 2]], "[seq]", seq=2).tolist() == [1, 2]
    for wrong in ([1, 3], [1, np.nan], [np.nan, 2]):
        with pytest.raises(AssertionError, match="rank 1 differs"):
            _gather([[1, 2], wrong], "[seq]", seq=2)
    with pytest.raises(AssertionError, match="rank 1 differs"):
        _gather([[1, np.nan], [1, 2]], "[seq]", seq=2)


def test_a_pending_maximum_is_taken_when_gathered():
    assert _gather([[1, 5], [4, 2]], "[seq] ^cp", seq=2).tolist() == [4, 5]


def test_a_rank_that_holds_too_much_or_too_little_is_found():
    with pytest.raises(AssertionError, match=r"rank 0 holds \(2,\), its block is \(1,\)"):
        _gather([[1, 2], [3, 4]], "[seq/cp]", seq=2)
    executor = Executor(mesh=TWO, sizes={"seq": 3})
    with pytest.raises(AssertionError, match=r"rank 1 holds \(2,\), \[seq/cp\] says \(1,\)"):
        executor.check((np.zeros(2), np.zeros(2)), Layout.parse("[seq/cp]"))


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
