"""What a rank's parameters hold of our weights, there and back, in the order of each platform."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.engine.nxd.shards import TpRank, local_of, local_shape, ours_of
from autoshard.engine.place import assemble
from autoshard.plan.nxd.form import FormParameter, Piece

SIZES = {"kv_heads": 4, "q_group": 4, "head_dim": 2, "hidden": 3, "ffn": 16, "vocab": 32}
HEADS, KEYS = ("kv_heads", "q_group", "head_dim"), ("kv_heads", "head_dim")


def pieces(copies: int) -> list[FormParameter]:
    """A weight of every form."""
    tp = ("kv", "rep")
    query = Piece(tensor="q", axes=(HEADS, ("hidden",)), cuts={"kv_heads": ("kv",), "q_group": ("rep",)})
    key = Piece(tensor="k", axes=(KEYS, ("hidden",)), cuts={"kv_heads": ("kv",)})
    out = Piece(tensor="o", axes=(("hidden",), HEADS), cuts={"kv_heads": ("kv",), "q_group": ("rep",)})
    up, gate = (Piece(tensor=name, axes=(("ffn",), ("hidden",)), cuts={"ffn": tp}) for name in ("up", "gate"))
    norm = Piece(tensor="norm", axes=(("hidden",),), cuts={})
    return [
        FormParameter(name="qkv", pieces=(query, key), split=0),
        FormParameter(name="k", pieces=(key,), split=0, copies=copies),
        FormParameter(name="o", pieces=(out,), split=1),
        FormParameter(name="up_gate", pieces=(up, gate), split=0),
        FormParameter(name="norm", pieces=(norm,), summed=True),
    ]


@given(
    atoms=st.sampled_from(
        [(("rep", 2), ("kv", 4)), (("kv", 4), ("rep", 2)), (("kv", 4), ("rep", 1)), (("rep", 4), ("kv", 1))]
    ),
    number=st.integers(0, 4),
)
def test_all_ranks_together_hold_the_whole(atoms: tuple[tuple[str, int], ...], number: int) -> None:
    generator, parameter = np.random.default_rng(number), pieces(dict(atoms)["rep"])[number]
    whole = {
        piece.tensor: generator.random([SIZES[dim] for group in piece.axes for dim in group])
        for piece in parameter.pieces
    }
    ranks = [TpRank(atoms=atoms, index=index) for index in range(math.prod(size for _, size in atoms))]
    found: dict[str, list] = {name: [] for name in whole}
    for rank in ranks:
        local = local_of(parameter, rank, SIZES, whole)
        assert local.shape == local_shape(parameter, rank, SIZES)
        for name, held in ours_of(parameter, rank, SIZES, local):
            found[name].append(held)
    for name, array in whole.items():
        np.testing.assert_array_equal(assemble(array.shape, found[name]), array)


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


def test_padding_is_zero() -> None:
    piece = Piece(tensor="embed", axes=(("vocab",), ("hidden",)), cuts={"vocab": ("kv", "rep")})
    parameter = FormParameter(name="weight", pieces=(piece,), split=0)
    rank = TpRank(atoms=(("kv", 2), ("rep", 1)), index=1)
    local = local_of(parameter, rank, SIZES, {"embed": np.ones((31, 3))})
    assert local.shape == (16, 3) and local[:-1].all() and not local[-1].any()
