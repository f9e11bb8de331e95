"""The layouts of a decoder's own blocks, executed on virtual ranks and compared with the blocks that nobody cut."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from autoshard.engine.torch.formats import Formats
from autoshard.graph.block import Block
from autoshard.graph.op import Array
from autoshard.layout.interpret import Interpreter
from autoshard.modules.training.graph import BATCH, CodeGraph
from autoshard.modules.training.layouts import code_programs
from autoshard.modules.training.planning import made_code, traced_source
from autoshard.modules.training.reading import TracedCode
from autoshard.modules.verifying import BAR
from autoshard.plan.code import data_key
from autoshard.plan.plan import Plan
from autoshard.plan.proof import BlockProof, Proof
from autoshard.spec.mesh import Mesh

_MOST = 2**27  # numbers of a block's tensors, eight bytes each, for all virtual ranks
_SEQUENCES = 2  # of each rank
_RANKS = 2  # along each axis: layouts do not depend on how many


def prove_code(plan: Plan) -> Proof | str:
    """Execute the lines of a plan's code in FP64, on two ranks along each axis; say so if it is too large here."""
    assert plan.code, "a plan of code says where it is"
    sizes = {atom: min(size, _RANKS) for atom, size in plan.mesh.axes if atom != "pp"}
    if reason := _too_large(made_code(plan, None).graph, math.prod(sizes.values())):
        return reason
    small = replace(plan, mesh=Mesh.virtual(pp=1, **sizes), micro_batch=_SEQUENCES)
    code = traced_source(small, plan.code.source, on_meta=False, doubles=True)
    programs, generator = code_programs(code.graph, small, plan.code.strategies), np.random.default_rng(0)
    proofs: list[BlockProof] = []
    mesh = Mesh.virtual(**{atom: size for atom, size in sizes.items() if size > 1} or {"kv": 1})
    for name, block in code.graph.table_blocks([drop for _, drop in plan.layers]).items():
        arrays = _arrays(code, block, generator)
        whole = dict(arrays)
        block.run(block.select("micro_batch"), code.graph.graph.sizes, whole)
        sharded = Interpreter(block=block, mesh=mesh, sizes=code.graph.graph.sizes).run(programs[name], arrays)
        largest = max(float(np.abs(whole[result]).max()) for result in sharded)
        error = max(float(np.abs(values - whole[result]).max()) for result, values in sharded.items()) / largest
        kinds = Counter(change.collective.kind for change in programs[name].collectives())
        counts = dict(sorted(kinds.items()))
        proofs.append(BlockProof(name=name, error=error, num_results=len(sharded), collectives=counts, bar=BAR))
    ranks = ",".join(f"{atom}={size}" for atom, size in mesh.axes)
    return Proof(candidate=f"{ranks}, the code of {plan.code.source}", lost=(), blocks=tuple(proofs))


def _too_large(code: CodeGraph, num_ranks: int) -> str:
    """Say that a block has too many numbers for one process; "" if none has."""
    sizes = {**code.graph.sizes, BATCH: _SEQUENCES * num_ranks}
    counts = {
        name: sum(tensor.num_elements(sizes) for tensor in block.tensors.values())
        for name, block in code.blocks.items()
    }
    name = max(counts, key=lambda kind: counts[kind])
    if counts[name] * (1 + num_ranks) <= _MOST:
        return ""
    return f"{name} has {counts[name]:,} numbers, too many for one process. Plan a small module of the same code"


def _arrays(code: TracedCode, block: Block, generator: np.random.Generator) -> Mapping[str, Array]:
    """Return the module's weights, inputs as the code makes them of random tokens, and random numbers for all else."""
    sizes, inputs = code.graph.graph.sizes, code.inputs(0)
    instance = next(name for name, its in code.graph.graph.instances() if its.kind == block.kind)
    words, shape = sizes.get("vocab", 1), (sizes["batch"], sizes["seq"])
    tokens, labels = (generator.integers(0, words, shape) for _ in range(2))
    batch = {"tokens": tokens, "labels": labels, "samples": np.arange(shape[0])}
    for argument in code.data:
        batch[data_key(argument.name)] = np.stack([argument.drawn(generator) for _ in range(shape[0])])
    outputs = {name for op in block.ops for name in op.outputs}
    arrays: dict[str, Array] = {}
    for tensor in block.tensors.values():
        bounds = tuple((0, sizes[dim]) for dim in tensor.dims)
        if tensor.name in outputs:
            continue
        if tensor.role == "parameter":
            arrays[tensor.name] = code.weight(f"{instance}.{tensor.name}").astype(np.float64)
        elif inputs.has(instance, tensor.name):
            arrays[tensor.name] = _wide(inputs.part((instance, tensor.name), batch, bounds, Formats().device))
        elif tensor.dtype == "int64":
            arrays[tensor.name] = generator.integers(0, words, shape)
        else:
            size = [stop for _, stop in bounds]
            arrays[tensor.name] = np.zeros(size) if tensor.role == "state" else np.asarray(generator.normal(size=size))
    return arrays


def _wide(tensor: torch.Tensor) -> Array:
    """Return numbers in double, and all else as it is."""
    return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())
