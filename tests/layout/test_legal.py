import itertools

import pytest

from autoshard.layout.legal import cut_operations, faults, op_dims
from tests.layout.meaning import legal_cuts

ATOMS = ("a", "b")


def _whole(block):
    return {op.name: {} for op in cut_operations(block)}


def _all_cuts(dims, atoms):
    """Every way to cut dims over atoms, legal or not."""
    ways = [order for count in range(len(atoms) + 1) for order in itertools.permutations(atoms, count)]
    for cuts in itertools.product(ways, repeat=len(dims)):
        yield dict(zip(dims, cuts, strict=True))


@pytest.mark.parametrize(
    ("name", "atoms"),
    [
        *((name, ATOMS[:1]) for name in ("attend", "q", "queue")),
        *((name, ATOMS) for name in ("attn_norm", "k_rotary", "choose", "gate")),
    ],
)
def test_what_is_enumerated_is_exactly_what_has_no_fault(uncut, name, atoms):
    block = uncut("mixtral").block
    op = block.op(name)
    legal = [
        cuts
        for cuts in _all_cuts(op_dims(block, op), atoms)
        if not [fault for fault in faults(block, {**_whole(block), name: cuts}, atoms) if fault.where == name]
    ]
    listed = list(legal_cuts(block, op, atoms))
    assert sorted(listed, key=str) == sorted(legal, key=str)


def test_who_reads_numbers_of_slots_is_cut_along_tokens_as_the_queue_was(uncut):
    block = uncut("mixtral").block
    settled = {"queue": {"batch": ("a",), "seq": (), "slots": ("a",)}}
    for name in ("dispatch", "combine"):
        listed = list(legal_cuts(block, block.op(name), ATOMS, settled))
        assert {(cuts["batch"], cuts["seq"], cuts["slots"]) for cuts in listed} == {(("a",), (), ("a",))}
        assert {cuts["hidden"] for cuts in listed} == {(), ("b",)}


def test_every_fault_says_what_is_wrong_and_what_to_type(uncut):
    block = uncut("mixtral").block
    cuts = {
        **_whole(block),
        "nobody": {},
        "q": {"vocab": ("a",), "hidden": ("z",)},
        "attn_norm": {"hidden": ("a",)},
        "attend": {"seq": ("a",)},
        "dispatch": {"batch": ("a",), "slots": ("a",)},
        "up": {"ffn": ("a",), "hidden": ("a",)},
        "queue": {"batch": ("b",), "slots": ("b",)},
    }
    del cuts["o"]
    found = [str(fault) for fault in faults(block, cuts, ATOMS)]
    assert found[0].startswith("nobody: layer has no operation of this name to cut.")
    assert set(found[1:]) == {
        "attn_norm: rms_norm needs all of hidden on every rank; take a from it",
        "q: has no dim 'vocab'. Known: batch, head_dim, hidden, kv_heads, q_group, seq.",
        "q: hidden is cut over 'z', which the mesh does not have. Known: a, b.",
        "attend: kv_seq is cut as seq together; write kv_seq/a",
        "o: nothing says how it is cut; write {} to leave it whole",
        "dispatch: its numbers of slots count within each part of the tokens of queue; write batch/b as there",
        "combine: its numbers of slots count within each part of the tokens of queue; write batch/b as there",
        "up: a cuts ffn and hidden; an atom cuts once in an operation. Take it from one of them",
    }
