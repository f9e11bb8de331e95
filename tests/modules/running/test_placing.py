"""Where parameters rest: what DTensor's placements cannot say is a cut of another dim."""

import pytest
from torch.distributed.tensor import Replicate, Shard

from autoshard.layout.layout import Layout
from autoshard.modules.running.placing import placements, resting

_POSITIONS = (("experts",), ("halves", "ffn"), ("hidden",))


@pytest.mark.parametrize(
    ("experts", "hidden", "cut", "over", "rests"),
    [
        (8, 6, ("tp",), (), "[experts/tp, halves, ffn, hidden]"),
        (3, 8, ("tp",), (), "[experts, halves, ffn, hidden/tp]"),
        (3, 6, ("tp",), (), "[experts, halves, ffn, hidden]"),
        (8, 4, ("dp", "tp"), (), "[experts/dp.tp, halves, ffn, hidden]"),
        (8, 4, ("tp",), ("dp",), "[experts/dp, halves, ffn, hidden/tp]"),
        (8, 4, (), ("dp",), "[experts/dp, halves, ffn, hidden]"),
    ],
)
def test_ranks_that_cut_an_inner_dim_hold_pieces_of_another_position(
    experts: int, hidden: int, cut: tuple[str, ...], over: tuple[str, ...], rests: str
):
    sizes, atoms = {"experts": experts, "halves": 2, "ffn": 16, "hidden": hidden}, {"dp": 2, "tp": 4}
    used = Layout(dims=(("experts", ()), ("halves", ()), ("ffn", cut), ("hidden", ())))
    rest = resting({"weight": _POSITIONS}, sizes, atoms, "weight", used, over)
    assert str(rest) == rests
    assert all(isinstance(placed, Shard | Replicate) for placed in placements(rest, _POSITIONS, sizes, atoms))
