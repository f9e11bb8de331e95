"""Problems for the search of cuts: real models on H100-like ranks, and random blocks small enough to try every cut."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from autoshard.blocks.choices import op_cuts
from autoshard.blocks.operators import solve
from autoshard.blocks.problem import OperatorProblem, reduction_s, ring_of_s, roofline_s
from autoshard.cost.collective import Ring
from autoshard.cost.compute import Rates
from autoshard.graph.block import Block
from autoshard.graph.builder import BlockBuilder, add_backward
from autoshard.graph.decoder import decoder_graph
from autoshard.graph.fusing import Flow, fuse, saved_tensors
from autoshard.graph.kinds.linear import Einsum
from autoshard.graph.kinds.norm import Norm, Softmax
from autoshard.graph.kinds.pointwise import Add, Multiply, Unary
from autoshard.layout.layout import Collective, Cuts
from autoshard.layout.legal import cut_operations
from autoshard.layout.lower import lower
from autoshard.layout.program import Communicate, Compute, Program
from autoshard.layout.redistribute import Change
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload

# Rates like those that dense models reach on one H100: 600 of 989 TFLOP/s, 2 of 3.35 TB/s; NVLink 200 of 450 GB/s.
RATES = Rates(matrix_flops_per_s=600e12, vector_flops_per_s=30e12, memory_bytes_per_s=2e12)
BANDWIDTH = 200e9
SMALL_SIZES = {"batch": 4, "seq": 6, "hidden": 8, "ffn": 12}
TWO = {"a": 2, "b": 3}
UNLIKE = {"a": 100e9, "b": 300e9}
BOUNDARIES = st.sampled_from([{}, {"batch": ("a",)}, {"seq": ("b",)}, {"batch": ("b",), "seq": ("a",)}])
SEEDS = st.integers(0, 2**32 - 1)


def seconds_of(
    atoms: Mapping[str, int], bandwidths: Mapping[str, float] | None = None, latency_s: float = 0.0
) -> Callable[[Collective, float], float]:
    """Price collectives as rings over the slowest of their atoms' links."""
    speeds = bandwidths or dict.fromkeys(atoms, BANDWIDTH)

    def seconds(collective: Collective, message_bytes: float) -> float:
        size = int(np.prod([atoms[atom] for atom in collective.atoms]))
        speed = min(speeds[atom] for atom in collective.atoms)
        ring = Ring(size=size, bandwidth_bytes_per_s=speed, latency_s=latency_s * (size - 1))
        return ring.time_s(collective, message_bytes)

    return seconds


def model_problems(
    model: str, atoms: Mapping[str, int], boundary: Cuts, *, batch: int = 8, seq: int = 8192, **more: Any
) -> dict[str, OperatorProblem]:
    """The blocks of a model, by kind; pins are meant for the layer."""
    common = {"rates": RATES, "seconds": seconds_of(atoms), "num_micro_batches": 8, **more}
    capacity, platform, pins = (
        common.pop(name, usual) for name, usual in (("capacity", None), ("platform", "torch_cuda"), ("pins", {}))
    )
    workload = Workload(seq_len=seq, global_batch=64, precision=Precision.named("bf16"), expert_capacity=capacity)
    graph = decoder_graph(load_model(model), workload, load_kernels(platform), micro_batch=batch)
    problems = {
        block.kind: OperatorProblem(block=block, sizes=graph.sizes, atoms=atoms, boundary=boundary, **common)
        for block in graph.blocks
    }
    return {**problems, "layer": pinned(problems["layer"], pins)}


def pinned(problem: OperatorProblem, pins: Mapping[str, Cuts]) -> OperatorProblem:
    """The same with these cuts of some operations; dims that are tied to others follow."""
    allowed: dict[str, tuple[Cuts, ...]] = {}
    for name, wanted in pins.items():
        op = problem.block.op(name)
        tied = dict(op.kind.tied_dims())
        free = {dim: cut for dim, cut in wanted.items() if cut and dim not in tied}
        every = op_cuts(problem.block, op, problem.real_atoms)
        allowed[name] = tuple(
            cuts for cuts in every if {dim: cut for dim, cut in cuts.items() if dim not in tied} == free
        )
        assert allowed[name], f"{name} cannot be cut so"
    return replace(problem, allowed=allowed)


def assess(problem: OperatorProblem, program: Program) -> float:
    """Price a lowered program: every operation, every collective, every ring, and the reduction of weight gradients.

    The batch is there in any cut. The solver's cost is the same, but that the program is cheaper where the two delivers
    of an addition need its gradient in one and the same other layout: it changes it once, and the solver counts both.
    """
    block = problem.block
    total = 0.0
    for entry in program.instructions:
        if isinstance(entry, Compute):
            total += float(np.max(roofline_s(problem, entry.op, [entry.cuts])))
            total += ring_of_s(problem, entry.op, entry.cuts)
        elif isinstance(entry, Communicate) and block.tensors[entry.reads.tensor].role != "input":
            change = Change(collective=entry.collective, before=entry.reads.layout, after=entry.writes.layout)
            total += problem.price(block.tensors[entry.reads.tensor].dtype)(change)
    for tensor in block.parameters:
        layout = program.results[f"{tensor.name}.sum"].layout
        real = [atom for atom in layout.sums if problem.atoms[atom] > 1]
        total += reduction_s(problem, tensor.name, dict(layout.dims), real)
    return total


def lowered(problem: OperatorProblem, cuts: Mapping[str, Cuts]) -> Program:
    """The program of these cuts; its paths between layouts are priced as the problem prices them."""
    price = problem.price("bf16")
    boundary, gathered = problem.boundary, problem.keeps_gathered
    return lower(problem.block, cuts, problem.atoms, price, boundary=boundary, keeps_gathered=gathered)


def collectives(problem: OperatorProblem, cuts: Mapping[str, Cuts]) -> list[str]:
    """What a program of these cuts sends, but for the batch: pass, entry, collective."""
    block = problem.block
    return [
        f"{entry.pass_} {entry.entry} {entry.collective}"
        for entry in lowered(problem, cuts).collectives()
        if block.tensors[entry.reads.tensor].role != "input" and entry.collective.kind != "slice"
    ]


def kept_bytes(problem: OperatorProblem, program: Program) -> float:
    """What backward reads of what forward made, in each layout in which it reads it; and what weights need."""
    kept: dict[str, int] = {}
    storages = {entry.storage for entry in problem.block.saved}
    for entry in program.instructions:
        if isinstance(entry, Compute) and entry.op.pass_ != "F":
            for value in entry.reads:
                if value.tensor in storages:
                    dtype = problem.block.tensors[value.tensor].dtype
                    kept[f"{value.tensor} {value.layout}"] = problem.local_bytes(value.layout, dtype)
    weights = (program.results[f"{tensor.name}.sum"].layout for tensor in problem.block.parameters)
    return sum(kept.values()) + problem.state_bytes_per_weight * sum(problem.local_bytes(one, "fp8") for one in weights)


def random_block(
    seed: int, *, adds: bool = False, dims: Sequence[str] = tuple(SMALL_SIZES), prefix: str = "op"
) -> Block:
    """Two or three random operations on a residual stream, with their gradients and what is kept for them."""
    rng = np.random.default_rng(seed)
    b = BlockBuilder(Precision.named("bf16"))
    x = y = b.add("x", tuple(dims[:3]))
    for number in range(int(rng.integers(2, 4))):
        before, y = y, _random_op(b, rng, f"{prefix}{number}", y, dims)
        if adds and b.tensors[y].dims == b.tensors[before].dims and rng.integers(2):
            y = b.emit(f"{prefix}{number}_sum", Add(), before, y)
    return closed_block(b, x, y)


def branched_block(seed: int, branches: int, *, adds: bool = False) -> Block:
    """Random operations that all read one tensor, and whose results are multiplied, or added."""
    rng = np.random.default_rng(seed)
    b = BlockBuilder(Precision.named("bf16"))
    dims = tuple(SMALL_SIZES)
    x = b.add("x", dims[:3])
    stem = _random_op(b, rng, "stem", x, dims) if rng.integers(3) else x
    y = _random_op(b, rng, "branch0", stem, dims)
    for number in range(1, branches):
        other = _random_op(b, rng, f"branch{number}", stem, dims)
        if b.tensors[other].dims != b.tensors[y].dims:
            other = _projected(b, f"branch{number}_more", other, dims)
        y = b.emit(f"join{number}", Add() if adds else Multiply(), y, other)
    return closed_block(b, x, y)


def _projected(b: BlockBuilder, name: str, x: str, dims: Sequence[str]) -> str:
    batch, seq, hidden, ffn = dims
    last = b.tensors[x].dims[-1]
    other = ffn if last == hidden else hidden
    return b.emit(name, Einsum(dims=(batch, seq, other)), x, b.weight(f"{name}.weight", other, last))


def closed_block(b: BlockBuilder, x: str, y: str) -> Block:
    """The block from ``x`` to ``y``, with all gradients."""
    seed_tensor = b.add(f"d.{y}", b.tensors[y].dims, "bf16", "gradient")
    add_backward(b, (x,), {y: seed_tensor})
    flow = Flow(b.tensors, b.ops)
    fused = fuse(flow, load_kernels("torch_cuda"))  # which knows none of these operations
    return Block(
        kind="random", repeat=1, tensors=b.tensors, ops=tuple(b.ops), fused=fused,
        saved=saved_tensors(flow, fused), takes=(x,), gives=(y,),
    )  # fmt: skip


def _random_op(b: BlockBuilder, rng: np.random.Generator, name: str, x: str, dims: Sequence[str]) -> str:
    last = b.tensors[x].dims[-1]
    match rng.integers(5):
        case 0:
            return b.emit(name, Unary(function="silu"), x)
        case 1:
            return b.emit(name, Norm(function="rms", over=last, eps=1e-5), x, b.weight(f"{name}.weight", last))
        case 2:
            return b.emit(name, Softmax(over=last), x)
        case 3:
            return b.emit(name, Multiply(), x, x)
        case _:
            return _projected(b, name, x, dims)


def small_problem(block: Block, atoms: Mapping[str, int], boundary: Cuts, **more: Any) -> OperatorProblem:
    common = {"sizes": SMALL_SIZES, "rates": RATES, "seconds": seconds_of(atoms, UNLIKE), **more}
    return OperatorProblem(block=block, atoms=atoms, boundary=boundary, **common)


def every_cut(problem: OperatorProblem) -> list[dict[str, Cuts]]:
    ops = cut_operations(problem.block)
    ways = itertools.product(*(op_cuts(problem.block, op, tuple(problem.atoms)) for op in ops))
    return [dict(zip((op.name for op in ops), way, strict=True)) for way in ways]


def compare_limited(problem: OperatorProblem, ways: Sequence[Mapping[str, Cuts]], share: float) -> None:
    """Hold the solver against all ways, without a limit, and with one between the least memory and the cheapest's.

    What is gathered again is not counted here, so that the limit is left out then.
    """
    programs = [lowered(problem, cuts) for cuts in ways]
    known = [(assess(problem, program), kept_bytes(problem, program)) for program in programs]
    least, cheapest = min(kept for _, kept in known), min(known)[1]
    assert solve(problem).cost_s == pytest.approx(min(known)[0], rel=1e-9)
    if not problem.keeps_gathered:
        return
    limited = replace(problem, memory_limit_bytes=least + share * (cheapest - least))
    found = solve(limited)
    best = min(cost for cost, kept in known if kept <= limited.memory_limit_bytes * (1 + 1e-9))
    assert found.fits and found.gap == 0
    assert found.cost_s == pytest.approx(best, rel=1e-9)
    assert kept_bytes(problem, lowered(problem, found.cuts)) == pytest.approx(found.kept_bytes)
