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
    assert "  *: up by columns and down by rows over tp, as in Megatron-LM" in lines
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
    assert (
        "  0: tokens over dp\n  1-3: up by columns and down by rows over tp, as in Megatron-LM; tokens over dp\n"
        in text
    )
    assert "  1-3.up.weight" in text and "  1-3.down.weight" in text and "  0.{up,down}.weight" in text
    size = (2 + 6 / 4) * HIDDEN * WIDE * 4 / 1024
    assert f"  gradients: 8 x sums over dp, {size:.2f} KiB" in text


class Mixed(torch.nn.Module):
    """Attention, then a product for each of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192, bias=False), torch.nn.Linear(64, 64, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(2, 64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.bmm(self.out(attended.transpose(1, 2).flatten(2)).reshape(2, -1, 64), self.experts)


def test_heads_are_named_and_products_of_many_weights_have_columns_and_rows_too() -> None:
    pins = {"qkv.weight": "[/tp, _]", "out.weight": "[_, /tp]", "experts": "[_, /tp, _]"}
    found = shard_module(Mixed(), [torch.randn(2, 512, 64)], "h100-80", "tp=4,rest=2", pins=pins)
    line = next(line for line in str(found).splitlines() if line.startswith("  the module: "))
    assert "heads over tp; " in line and "qkv by columns and out, experts by rows over tp, as in Megatron-LM" in line


class Pair(torch.nn.Module):
    """Two sequences, a table of places, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.conv = torch.nn.Parameter(torch.zeros(1, 6, 8)), torch.nn.Conv1d(8, 8, 3, padding=1)
        self.out_proj = torch.nn.Linear(8, 5)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        both = torch.einsum("bsh,bth->bts", src, tgt + self.places).softmax(-1) @ src
        return self.out_proj(self.conv(both.transpose(1, 2)).transpose(1, 2))


def test_dims_have_names_of_arguments_and_attributes() -> None:
    found = shard_module(Pair(), [torch.randn(4, 7, 8), torch.randn(4, 6, 8)], "h100-80", "tp=8")
    assert found.dims["places"] == ("1", "places_dim1", "conv_dim1") and found.dims["out_proj.weight"][0] == "out_proj"
    assert {"tgt_dim0", "src_dim1", "conv_dim2"} <= {*found.traced.sizes}
    assert not [name for name in found.traced.sizes if name.startswith("dim")]


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
