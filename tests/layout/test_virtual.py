import numpy as np
import pytest

from autoshard.layout.layout import Collective, Layout
from autoshard.layout.shards import Executor
from autoshard.spec.mesh import Mesh

TWO, FOUR = Mesh.virtual(cp=2), Mesh.virtual(cp=2, kv=2)
SEQ_HIDDEN = ("seq", "hidden")


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


def test_all_reduce_adds_and_all_reduce_max_takes_the_largest():
    shards = [[1, 8], [3, 4], [5, 6], [7, 2]]
    assert _run(FOUR, "all_reduce /cp", shards, "[seq] +cp", seq=2) == [[6, 14], [10, 6], [6, 14], [10, 6]]
    assert _run(FOUR, "all_reduce_max /cp.kv", shards, "[seq]", seq=2) == [[7, 8]] * 4


def test_reduce_scatter_gives_each_rank_its_block_of_the_sum():
    shards = [[1, 2, 3], [10, 20, 30]]
    assert _run(TWO, "reduce_scatter seq/cp", shards, "[seq] +cp", seq=3) == [[11, 22], [33]]
    same = [[1, 2, 3, 4]] * 4
    assert _run(FOUR, "reduce_scatter seq/kv.cp", same, "[seq]", seq=4) == [[4], [12], [8], [16]]


def test_slice_keeps_the_ranks_own_block():
    assert _run(TWO, "slice seq/cp", [[1, 2, 3], [1, 2, 3]], "[seq]", seq=3) == [[1, 2], [3]]


def test_all_to_all_takes_a_cut_from_one_dim_to_another():
    shards = [[[1, 2, 3]], [[4, 5, 6]]]
    moved = _run(TWO, "all_to_all seq>hidden/cp", shards, "[seq/cp, hidden]", seq=2, hidden=3)
    assert moved == [[[1, 2], [4, 5]], [[3], [6]]]
    back = _run(TWO, "all_to_all hidden>seq/cp", moved, "[seq, hidden/cp]", seq=2, hidden=3)
    assert back == shards


def test_a_send_is_not_between_the_ranks_of_a_group():
    with pytest.raises(AssertionError, match="send /cp is not between the ranks of a group"):
        _run(TWO, "send /cp", [[1], [1]], "[seq]", seq=1)


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
