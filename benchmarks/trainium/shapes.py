"""Products and attention by shape on one core, as a rank of Llama-3 70B has them, beside what the model predicts."""

# pyright: basic
# torch's own signatures are only partly typed.

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from autoshard.units import format_seconds
from benchmarks.result import Extra, Result
from benchmarks.trainium.cores import Core, core_of
from benchmarks.trainium.machine import Machine, told

TOKENS = 8192
Matrices = tuple[int, int, int]  # rows, columns, and what is summed over
# A layer of Llama-3 70B (hidden 8,192, ffn 28,672, 64 heads of 128, 8 of keys) at 8,192 tokens, as a rank has it.
SIZES: Mapping[int, Mapping[str, Matrices]] = {
    tp: {
        "query": (TOKENS, 8192 // tp, 8192),
        "key": (TOKENS, max(128, 1024 // tp), 8192),
        "out": (TOKENS, 8192, 8192 // tp),
        "gate_up": (TOKENS, 2 * 28672 // tp, 8192),
        "down": (TOKENS, 8192, 28672 // tp),
        "gradient_of_down": (28672 // tp, 8192, TOKENS),
    }
    for tp in (8, 32)
}
SQUARES: Mapping[str, Matrices] = {f"square_{side}": (side, side, side) for side in (512, 1024, 2048, 4096)}
ATTENTION: Mapping[str, tuple[int, int, int]] = {  # heads, tokens, head_dim
    "tp8": (8, 8192, 128), "tp32": (2, 8192, 128), "short": (8, 2048, 128), "heads_of_64": (8, 4096, 64),
}  # fmt: skip
_CAUSAL = 0.5  # of all pairs


def products(machine: Machine) -> Iterator[Result]:
    """Time products in BF16, and the squares in FP32 as well."""
    core = core_of(machine)
    cut = {f"{name}_tp{tp}": one for tp, sizes in SIZES.items() for name, one in sizes.items()}
    named: dict[str, Matrices] = {**cut, **SQUARES}
    for name, (rows, columns, inner) in named.items():
        for dtype in (torch.bfloat16, *([torch.float32] if name in SQUARES else [])):
            left, right = core.make(rows, inner, dtype=dtype), core.make(inner, columns, dtype=dtype)
            taken_s = core.seconds(torch.matmul, (left, right))
            short = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
            shape = f"{rows} x {inner} x {columns}"
            yield _rate(f"product_{name}_{short}", machine, 2.0 * rows * columns * inner, taken_s, short, shape)


def kernels(machine: Machine) -> Iterator[Result]:
    """Time attention, forward and with its backward pass."""
    core = core_of(machine)
    for name, (heads, tokens, width) in ATTENTION.items():
        query = core.make(1, tokens, heads, 1, width, learns=True)
        key, value = (core.make(1, tokens, heads, width, learns=True) for _ in range(2))
        flops = 4.0 * tokens * tokens * heads * width * _CAUSAL
        shape = f"{heads} heads of {width}, {tokens} tokens"
        forward_s = core.seconds(torch.no_grad()(core.attend), (query, key, value))  # nothing is kept for backward
        yield _rate(f"attention_{name}_forward", machine, flops, forward_s, "bf16", shape)
        both_s = core.seconds(_both(core), (query, key, value))
        yield _rate(f"attention_{name}_both", machine, 3.5 * flops, both_s, "bf16", shape)


def _both(core: Core) -> Callable[..., tuple[Tensor, ...]]:
    def work(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        mixed = core.attend(query, key, value)
        return torch.autograd.grad(mixed, (query, key, value), torch.ones_like(mixed))

    return work


def _rate(name: str, machine: Machine, flops: float, taken_s: float | None, dtype: str, shape: str) -> Result:
    """Return seconds beside those that the constants of the machine predict, and the share of the peak."""
    peak, calibration = machine.node().rank_matrix_flops_per_s(dtype), machine.calibration()
    attends = name.startswith("attention")
    predicted_s = flops / peak / (calibration.attention_efficiency if attends else calibration.matrix_efficiency)
    share = None if taken_s is None else flops / taken_s / peak
    more: dict[str, Extra] = {"shape": shape, "flops": flops, "at_peak": format_seconds(flops / peak), "of_peak": share}
    return told(name, predicted_s, taken_s, more)
