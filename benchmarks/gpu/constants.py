"""The constants of a GPU: products by shape, attention by length, memory, starts of kernels, copies of the host."""

# pyright: basic
# torch's own signatures are only partly typed.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import attention, functional

from autoshard.engine.torch.kernels.matrices import add_product, adds_wide
from autoshard.runtime.machine import CUDA
from benchmarks.gpu.device import Device, Item, first_line, measured, result, rounded, seconds_of
from benchmarks.result import Extra, Result

Matrices = tuple[int, int, int]  # rows, columns, and what is summed over
_SECONDS = 80.0
_LAUNCHES = 1000
_FP8 = torch.float8_e4m3fn

# Of Llama-3 8B's layer at 8,192 tokens and its head, whole and an eighth as tp 8 has it; of few tokens; of gradients of
# weights, which sum over tokens.
PRODUCTS: Mapping[str, Matrices] = {
    "qkv": (8192, 6144, 4096),
    "out": (8192, 4096, 4096),
    "gate_up": (8192, 28672, 4096),
    "down": (8192, 4096, 14336),
    "head": (8192, 128256, 4096),
    "qkv_tp8": (8192, 768, 4096),
    "out_tp8": (8192, 4096, 512),
    "gate_up_tp8": (8192, 3584, 4096),
    "down_tp8": (8192, 4096, 1792),
    "gate_up_1k": (1024, 28672, 4096),
    "down_1k": (1024, 4096, 14336),
    "square_2k": (2048, 2048, 2048),
    "gradient_gate_up": (28672, 4096, 8192),
    "gradient_out": (4096, 4096, 8192),
}
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 32768  # of every measurement of attention, so that all have as many rows
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
GROUPS = 8  # experts of a grouped product


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """A kernel for attention, and how torch is told to use it."""

    name: str
    chosen: Callable[[], AbstractContextManager[Any]]


@contextmanager
def _flash_3() -> Iterator[None]:
    attention.activate_flash_attention_impl("FA3")  # an error where the package is missing
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        attention.restore_flash_attention_impl()


ATTENTION = (
    AttentionChoice(
        name="flash", chosen=lambda: attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION)
    ),
    AttentionChoice(
        name="cudnn", chosen=lambda: attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION)
    ),
    AttentionChoice(name="flash_3", chosen=_flash_3),
)  # fmt: skip


def run(device: Device) -> Iterator[Result]:
    """Measure all constants of one GPU."""
    yield from measured(items_of(device), device, _SECONDS)


def items_of(device: Device) -> Sequence[Item]:
    """Return all measurements."""
    formats = [("bf16", torch.bfloat16, _product), ("fp8", _FP8, _product_fp8)]
    found = [
        Item(
            name=f"product_{name}_{dtype}",
            what=f"a product of {rows} x {inner} and {inner} x {columns} in {dtype}",
            measure=partial(product_rate, f"product_{name}_{dtype}", (rows, columns, inner), make, device),
        )
        for dtype, _, make in formats
        for name, (rows, columns, inner) in PRODUCTS.items()
        if dtype != "fp8" or has_fp8(device)
    ]
    found += [
        Item(
            name=f"product_adding_{name}",
            what=f"the product {name} in bf16, added to a sum in fp32",
            measure=partial(product_rate, f"product_adding_{name}", PRODUCTS[name], _adding, device),
        )
        for name in ("gradient_gate_up", "gradient_out")
    ]
    found.append(
        Item(
            name="product_grouped",
            what=f"8192 rows of {GROUPS} experts, 4096 to 14336, in one call",
            measure=partial(product_rate, "product_grouped", (16384, 14336, 4096), _grouped, device),
        )
    )
    names = ", ".join(one.name for one in ATTENTION)
    found += [
        Item(
            name=f"attention_{length}",
            what=f"causal attention over {length} tokens, forward and backward, by {names}",
            measure=partial(attention_rates, length, device),
        )
        for length in LENGTHS
    ]
    return [*found, *_of_memory(device)]


def _of_memory(device: Device) -> Sequence[Item]:
    copies = {"to_device": (False, True), "to_host": (True, True), "to_device_unpinned": (False, False)}
    return [
        Item(name="memory_copy", what="1 GiB read and written", measure=partial(memory_rate, device)),
        Item(name="launch", what=f"{_LAUNCHES} kernels on 16 numbers", measure=partial(launch_time, device)),
        *(
            Item(name=f"copy_{name}", what="256 MiB over the host's link",
                 measure=partial(copy_rate, f"copy_{name}", device, to_host=back, pinned=pinned))
            for name, (back, pinned) in copies.items()
        ),
    ]  # fmt: skip


def has_fp8(device: Device) -> bool:
    """Whether products in FP8 are worth a try: GPUs have them since Ada and Hopper."""
    return device.dry or (torch.version.cuda is not None and torch.cuda.get_device_capability() >= (8, 9))


def _tiny(sizes: Matrices, device: Device) -> Matrices:
    return (64, 64, 64) if device.dry else sizes


def product_rate(
    name: str, sizes: Matrices, make: Callable[[Matrices, torch.device], Callable[[], object]], device: Device
) -> Iterator[Result]:
    """Return the rate of a product."""
    rows, columns, inner = tried = _tiny(sizes, device)
    time_s = seconds_of(make(tried, device.torch), device)
    rate = 2.0 * rows * columns * inner / time_s
    peak = device.peak("fp8" if name.endswith("fp8") else "bf16")
    extras: dict[str, Extra] = {"time_us": time_s * 1e6, "rows": rows, "columns": columns, "inner": inner}
    extras |= {"of_peak": rate / peak} if peak else {}
    yield result(name, rate / 1e12, "TFLOP/s", extras)


def _product(sizes: Matrices, where: torch.device) -> Callable[[], object]:
    rows, columns, inner = sizes
    left = torch.randn(rows, inner, device=where, dtype=torch.bfloat16)
    right = torch.randn(columns, inner, device=where, dtype=torch.bfloat16)
    made = torch.empty(rows, columns, device=where, dtype=torch.bfloat16)
    return lambda: torch.mm(left, right.t(), out=made)


def _product_fp8(sizes: Matrices, where: torch.device) -> Callable[[], object]:
    rows, columns, inner = sizes
    left, right = (torch.randn(one, inner, device=where).to(_FP8) for one in (rows, columns))
    scale = torch.ones((), device=where)
    multiply: Any = torch.ops.aten._scaled_mm
    return lambda: multiply(left, right.t(), scale, scale, None, None, torch.bfloat16, True)


def _adding(sizes: Matrices, where: torch.device) -> Callable[[], object]:
    """Add as the engine adds: in one kernel, or in two where the device has none."""
    rows, columns, inner = sizes
    left = torch.randn(inner, rows, device=where, dtype=torch.bfloat16)
    right = torch.randn(inner, columns, device=where, dtype=torch.bfloat16)
    total = torch.zeros(rows, columns, device=where)
    if adds_wide(where, left.dtype, total.dtype):
        return lambda: add_product(total, left.t(), right, where)
    return lambda: total.add_(torch.mm(left.t(), right))


def _grouped(sizes: Matrices, where: torch.device) -> Callable[[], object]:
    rows, columns, inner = sizes
    left = torch.randn(rows, inner, device=where, dtype=torch.bfloat16)
    right = torch.randn(GROUPS, inner, columns, device=where, dtype=torch.bfloat16)
    ends = torch.arange(1, GROUPS + 1, device=where, dtype=torch.int32) * (rows // GROUPS)
    return lambda: functional.grouped_mm(left, right, offs=ends)


def attention_rates(length: int, device: Device) -> Iterator[Result]:
    """Return the rate of every kernel that torch has here, forward and backward, and name the fastest."""
    count, heads, kv_heads = (2, 4, 2) if device.dry else (TOKENS // length, HEADS, KV_HEADS)
    tokens, head_dim = (32, 16) if device.dry else (length, HEAD_DIM)
    shapes = [(count, number, tokens, head_dim) for number in (heads, kv_heads, kv_heads)]
    given = [torch.randn(*one, device=device.torch, dtype=torch.bfloat16, requires_grad=True) for one in shapes]
    upstream = torch.randn(*shapes[0], device=device.torch, dtype=torch.bfloat16)
    flops = 2 * 2 * count * heads * tokens * tokens * head_dim / 2  # of scores and sums, below the diagonal
    extras, rates = dict[str, Extra](), dict[str, float]()
    for one in ATTENTION:
        forward_s, both_s, missing = _attention_times(one, given, upstream, device)
        if missing:
            extras[f"{one.name}_missing"] = missing[:80]
            continue
        rates[one.name] = 3.5 * flops / both_s / 1e12
        extras[one.name] = rates[one.name]
        extras[f"{one.name}_forward"] = flops / forward_s / 1e12
        extras[f"{one.name}_backward"] = 2.5 * flops / max(both_s - forward_s, 1e-9) / 1e12
    best = max(rates, key=lambda name: rates[name], default="none")
    yield result(f"attention_{length}", rates.get(best, 0.0), "TFLOP/s", {"fastest": best, **extras})


def _attention_times(
    kernel: AttentionChoice, given: Sequence[torch.Tensor], upstream: torch.Tensor, device: Device
) -> tuple[float, float, str]:
    """Return the seconds forward and both ways, or why there are none; a kernel may take repeated keys only."""
    missing = ""
    for grouped in (True, False):

        def forward(grouped: bool = grouped) -> torch.Tensor:
            query, *rest = given
            times = 1 if grouped else query.shape[1] // rest[0].shape[1]
            key, value = (one.repeat_interleave(times, 1) if times > 1 else one for one in rest)
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)

        def both(forward: Callable[[], torch.Tensor] = forward) -> None:
            torch.autograd.grad(forward(), given, upstream)

        try:
            with nullcontext() if device.dry else kernel.chosen():
                with torch.no_grad():
                    forward_s = seconds_of(forward, device)
                return forward_s, seconds_of(both, device), ""
        except Exception as error:  # torch says in many ways that it has no such kernel
            missing = missing or first_line(error)
    return 0.0, 0.0, missing


def memory_rate(device: Device) -> Iterator[Result]:
    """Return the bytes that the device's memory reads and writes in a second."""
    size = 2**12 if device.dry else 2**30
    source = torch.empty(size, dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    time_s = seconds_of(lambda: target.copy_(source), device)
    yield result("memory_copy", 2 * size / time_s / 1e9, "GB/s", {"time_us": time_s * 1e6})


def launch_time(device: Device) -> Iterator[Result]:
    """Return the time between two starts of kernels that take none, and that of replays from a graph."""
    tensor = torch.zeros(16, device=device.torch)
    count = 10 if device.dry else _LAUNCHES

    def many() -> None:
        for _ in range(count):
            tensor.add_(1.0)

    extras: dict[str, Extra] = {"kernels": count}
    each_s = seconds_of(many, device, repeats=5) / count
    if device.type == CUDA:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        extras["in_a_graph_us"] = rounded(seconds_of(graph.replay, device, repeats=5) / count * 1e6)
    yield result("launch", each_s * 1e6, "us", extras)


def copy_rate(name: str, device: Device, *, to_host: bool, pinned: bool) -> Iterator[Result]:
    """Return the bytes a second of copies between host and device."""
    size = 2**12 if device.dry else 2**28
    there = torch.empty(size, dtype=torch.uint8, device=device.torch)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=pinned and device.type == CUDA)
    source, target = (there, here) if to_host else (here, there)
    time_s = seconds_of(lambda: target.copy_(source, non_blocking=True), device)
    yield result(name, size / time_s / 1e9, "GB/s", {"pinned": pinned, "time_us": time_s * 1e6})
