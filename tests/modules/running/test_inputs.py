"""What a call hands to the program: masks and positions are computed once, what a call brings is computed anew."""

import pytest
import torch
from torch import nn

from autoshard.modules.export import ExportedModule
from autoshard.modules.running import inputs
from autoshard.modules.running.functions import FunctionWriter
from autoshard.modules.running.inputs import FixedInputs, InputPart, VaryingInputs


class Masked(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(4)
        mask = positions[None, :] <= positions[:, None]
        drawn = torch.randn(4)
        return torch.where(mask, input * self.scale.cos(), 0.0) + positions + drawn


EXPORTED = ExportedModule.of(Masked(), [torch.ones(4, 4)])
NODES = {node.name: node for node in EXPORTED.nodes if node.op == "call_function"}


def whole(name: str) -> InputPart:
    shape = tuple(NODES[name].meta["val"].shape)
    axes = tuple(range(len(shape)))
    return InputPart(
        value=name, sizes=shape, order=axes, bounds=tuple((0, size) for size in shape), cuts=(), draw=None
    )  # fmt: skip


def test_only_what_follows_from_no_placeholder_and_no_draw_is_fixed():
    fixed = FixedInputs(EXPORTED, NODES).names
    assert {"arange", "le"} <= fixed
    assert not fixed & {name for name in NODES if name.startswith(("mul", "where", "add", "cos"))}


def test_fixed_values_are_computed_again_once_somebody_changed_them(monkeypatch: pytest.MonkeyPatch):
    fixed = FixedInputs(EXPORTED, {"le": NODES["le"]})
    parts = {"le": [whole("le")]}
    before = fixed.values(parts)["le"]
    assert torch.equal(before, torch.ones(4, 4, dtype=torch.bool).tril())
    assert fixed.values(parts)["le"] is before
    before.view(-1)[0] = False
    assert torch.equal(fixed.values(parts)["le"], torch.ones(4, 4, dtype=torch.bool).tril())
    monkeypatch.setattr(inputs, "_MOST_KEPT_BYTES", 15)
    assert not FixedInputs(EXPORTED, {"le": NODES["le"]}).names


@pytest.mark.parametrize("writes", [False, True])
def test_buffers_are_read_anew_by_functions_too(writes: bool):
    names = [name for name in NODES if name.startswith("cos")]
    writer = FunctionWriter(device=torch.device("cpu")) if writes else None
    varying = VaryingInputs(EXPORTED, {name: NODES[name] for name in names}, writer)
    assert names
    for number in (2.0, 3.0):
        brought = {"input": torch.ones(4, 4)}, {"scale": torch.tensor(number)}
        handed = varying.values(*brought, torch.tensor(1))
        assert [handed[name].item() for name in names] == [torch.tensor(number).cos().item()] * len(names)
        passed_on = {node.name: node for node in EXPORTED.nodes if node.name == "input"}
        assert (
            VaryingInputs(EXPORTED, passed_on, writer).values(*brought, torch.tensor(1))["input"] is brought[0]["input"]
        )
    assert bool(writer and writer.functions) == writes
