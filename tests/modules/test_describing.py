"""What the print of a sharded module says, against layouts that pins fix and bytes counted by hand."""

import torch

from autoshard.modules.describing import parameter_lines, sent_lines
from autoshard.modules.shard import shard_module
from autoshard.modules.sharded import shard
from tests.ranks.spawn import on_ranks

ROWS, HIDDEN, WIDE = 32, 64, 256


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(HIDDEN, WIDE, bias=False), torch.nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def stack(count: int, rows: int = ROWS) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    return torch.nn.Sequential(*(Layer() for _ in range(count))), [torch.randn(rows, HIDDEN, requires_grad=True)]


PINS = {"*.up.weight": "[/tp, _]", "*.down.weight": "[_, /tp]"}


def test_layers_that_are_alike_stand_in_one_line_with_what_they_send() -> None:
    module, inputs = stack(3)
    text = str(shard_module(module, inputs, "h100-80", "tp=8", pins=PINS, precision="fp32"))
    first, *lines = text.splitlines()
    assert first.startswith("Sequential on 8 ranks (tp=8): ")
    assert "  *.up.weight    [/tp, _]" in lines and "  *.down.weight  [_, /tp]" in lines
    sent = [line for line in lines if "all_reduce over tp" in line]
    sizes = f"{3 * ROWS * HIDDEN * 4 / 1024:.2f} KiB"
    assert sent == [
        f"  *.down: 3 x all_reduce over tp, forward, {sizes}",
        f"  *.up: 3 x all_reduce over tp, backward, {sizes}",
    ]
    assert not any(line.startswith("  gradients") for line in lines), "no weight has copies"


def test_a_layer_that_differs_has_a_line_and_copies_have_sums() -> None:
    module, inputs = stack(4, 8192)
    pins = {f"{layer}.up.weight": "[/tp, _]" if layer else "[_, _]" for layer in range(4)}
    pins |= {f"{layer}.down.weight": "[_, /tp]" if layer else "[_, _]" for layer in range(4)}
    text = str(shard_module(module, inputs, "h100-80", "dp=2,tp=4", pins=pins, batch="dp", precision="fp32"))
    assert "  1-3.up.weight" in text and "  1-3.down.weight" in text and "  0.{up,down}.weight" in text
    size = (2 + 6 / 4) * HIDDEN * WIDE * 4 / 1024
    assert f"  gradients: 8 x sums over dp, {size:.2f} KiB" in text


def test_weights_that_rest_in_pieces_are_said_to_be_gathered() -> None:
    module, inputs = stack(2)
    found = shard_module(module, inputs, "h100-80", "dp=8", batch="dp", precision="fp32")
    parameters = {name: path for name, path in found.captured.parameters.items() if path.endswith("up.weight")}
    rests = dict.fromkeys(parameters, "flat/dp")
    (word,) = parameter_lines(parameters, found.traced, found.program, rests)
    assert word == "*.up.weight  [_, _], in pieces over dp between uses"
    size = 2 * HIDDEN * WIDE * 4 / 1024
    lines = [*sent_lines(found.traced, found.program, found.mesh, rests)]
    assert f"weights: 2 x gathered from pieces over dp, {size:.2f} KiB" in lines


def printed() -> str:
    module, inputs = stack(2)
    return repr(shard(module, inputs, "tp=2", pins=PINS))


def test_a_module_that_runs_on_ranks_prints_the_same_beside_its_parts() -> None:
    texts = on_ranks(2, printed)
    assert texts[0] == texts[1]
    lines = texts[0].splitlines()
    assert lines[0] == "ShardedSequential(" and "  (0): Layer(" in lines
    assert "    *.up.weight    [/tp, _]" in lines
