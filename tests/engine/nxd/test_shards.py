"""What a rank's parameters hold of our weights, there and back, in the order of each platform."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.engine.nxd.shards import TpRank, local_of, local_patches
from autoshard.graph.op import Dims
from autoshard.layout.layout import Cuts
from autoshard.plan.nxd.match import FormParameter, FormPiece

SIZES = {"kv_heads": 4, "q_group": 4, "head_dim": 2, "hidden": 3, "ffn": 16, "vocab": 32, "experts": 2}
HEADS, KEYS = ("kv_heads", "q_group", "head_dim"), ("kv_heads", "head_dim")


def pieces(copies: int) -> list[FormParameter]:
    """A weight of every form."""
    tp = ("kv", "rep")
    query = piece("q", (HEADS, ("hidden",)), {"kv_heads": ("kv",), "q_group": ("rep",)})
    key = piece("k", (KEYS, ("hidden",)), {"kv_heads": ("kv",)})
    out = piece("o", (("hidden",), HEADS), {"kv_heads": ("kv",), "q_group": ("rep",)})
    up, gate = (piece(name, (("ffn",), ("hidden",)), {"ffn": tp}) for name in ("up", "gate"))
    norm = piece("norm", (("hidden",),), {})
    expert = ("experts", "ffn", "hidden")
    halves = tuple(piece(name, (("experts",), ("hidden",), ("ffn",)), {"ffn": tp}, expert) for name in ("gate", "up"))
    turned = piece("q", (("hidden",), HEADS), {"kv_heads": ("kv",), "q_group": ("rep",)}, (*HEADS, "hidden"))
    return [
        FormParameter(name="qkv", pieces=(query, key), split=0),
        FormParameter(name="k", pieces=(key,), split=0, copies=copies),
        FormParameter(name="o", pieces=(out,), split=1),
        FormParameter(name="up_gate", pieces=(up, gate), split=0),
        FormParameter(name="norm", pieces=(norm,), summed=True),
        FormParameter(name="experts", pieces=halves, axis=2, split=2),
        FormParameter(name="turned", pieces=(turned,), split=1),
        FormParameter(name="table", pieces=(piece("table", (("vocab",), ("hidden",)), {"vocab": tp}),), split=0),
    ]


def piece(tensor: str, axes: tuple[Dims, ...], cuts: Cuts, dims: Dims = ()) -> FormPiece:
    """A piece of a tensor; its dims stand as in the axes, if nothing else is said."""
    return FormPiece(tensor=tensor, dims=dims or tuple(dim for group in axes for dim in group), axes=axes, cuts=cuts)


@given(
    atoms=st.sampled_from(
        [(("rep", 2), ("kv", 4)), (("kv", 4), ("rep", 2)), (("kv", 4), ("rep", 1)), (("rep", 4), ("kv", 1))]
    ),
    number=st.integers(0, 7),
    num_shards=st.integers(1, 7),
    padding=st.integers(0, 9),
)
def test_shards_of_all_ranks_together_hold_the_whole_each_element_as_often_as_it_is_copied(
    atoms: tuple[tuple[str, int], ...], number: int, num_shards: int, padding: int
) -> None:
    generator, parameter = np.random.default_rng(number), pieces(dict(atoms)["rep"])[number]
    own = {**SIZES, "vocab": SIZES["vocab"] - padding}
    whole = {piece.tensor: generator.random([own[dim] for dim in piece.dims]) + 1 for piece in parameter.pieces}
    ranks = [TpRank(atoms=atoms, index=index) for index in range(math.prod(size for _, size in atoms))]
    counts = {name: np.zeros(array.shape, dtype=int) for name, array in whole.items()}
    for rank in ranks:
        local = local_of(parameter, rank, SIZES, whole)
        shape, patches = local_patches(parameter, rank, SIZES, own)
        assert local.shape == shape
        held = sum(whole[one.tensor][one.place].size for one in patches)
        assert np.count_nonzero(local) == held, "what is padded is zero"
        num_rows = -(-len(local) // num_shards)  # as ZeRO-1 pads and cuts
        padded = np.pad(local, [(0, num_rows * num_shards - len(local)), *[(0, 0)] * (local.ndim - 1)])
        for first in range(0, len(padded), num_rows):
            rows = (first, first + num_rows)
            for patch in (part for one in patches for part in one.rows(*rows)):
                view = patch.view(padded[slice(*rows)])
                assert np.shares_memory(view, padded)
                np.testing.assert_array_equal(view, whole[patch.tensor][patch.place])
                counts[patch.tensor][patch.place] += 1
    for piece in parameter.pieces:
        cut = {atom for cuts in piece.cuts.values() for atom in cuts}
        assert (counts[piece.tensor] == math.prod(size for atom, size in atoms if atom not in cut)).all()


@pytest.mark.parametrize(
    ("atoms", "heads"),
    [
        ((("rep", 4), ("kv", 8)), [index % 8 for index in range(32)]),  # trn1: K0..K7, K0..K7, ...
        ((("kv", 8), ("rep", 4)), [index // 4 for index in range(32)]),  # trn2: K0, K0, K0, K0, K1, ...
    ],
)
def test_keys_lie_on_ranks_as_nxd_arranges_them(atoms: tuple[tuple[str, int], ...], heads: list[int]) -> None:
    ranks = [TpRank(atoms=atoms, index=index) for index in range(32)]
    assert [rank.coordinate(("kv",)) for rank in ranks] == heads
    assert [rank.coordinate(("kv", "rep")) for rank in ranks] == list(range(32))  # a vocabulary in the order of ranks


def test_the_weights_of_experts_are_turned() -> None:
    # NxD holds [experts, in, gate and up], we [experts, ffn, in].
    parameter = pieces(1)[5]
    rank = TpRank(atoms=(("kv", 2), ("rep", 1)), index=1)
    gate, up = np.random.default_rng(0).random((2, 2, 16, 3))
    local = local_of(parameter, rank, SIZES, {"gate": gate, "up": up})
    assert local.shape == (2, 3, 16)
    np.testing.assert_array_equal(local[1, :, :8], gate[1, 8:].T)
    np.testing.assert_array_equal(local[1, :, 8:], up[1, 8:].T)
