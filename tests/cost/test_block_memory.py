"""What is alive while a kernel runs: compared with a walk that makes and frees tensors one after the other."""

from collections import Counter
from typing import Any

import pytest

from autoshard.cost.block_memory import rank_sizes, saved_bytes
from autoshard.graph.kinds.linear import Collect, Deliver
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.spec.kernels import load_kernels
from tests.cost.cases import ask, lowered, priced, setting

TABLES = ("nxd", "te", "torch_cuda")
MODELS = ("llama3-8b", "mixtral-8x7b")


def memory_of(block):
    """Under which name each tensor's memory is known: others are handed on, or added into the first of a sum."""
    names = {name: name for name in block.tensors}
    for op in block.ops:
        if isinstance(op.kind, Deliver | Collect):
            target = names[op.inputs[0]]
            for name in (*op.inputs, *op.outputs):
                old = names[name]
                names = {key: target if value == old else value for key, value in names.items()}
    return names


def in_order(sharded):
    """The kernels as autograd runs them: a sum of gradients as soon as its weight gradient is there."""
    sums = {run.ops[0].inputs[1]: run for run in sharded.runs if isinstance(run.ops[0].kind, Accumulate)}
    for run in sharded.runs:
        if run not in sums.values():
            yield run
            yield from (sums[name] for op in run.ops for name in op.outputs if name in sums)


def walked(sharded, here, unmade):
    """Make what each kernel makes, free what nobody reads later, and write down the most that was there at a time."""
    block, names = sharded.block, memory_of(sharded.block)
    sizes_of = rank_sizes(here.sizes, here.atoms)
    kept = saved_bytes(block, sharded.sharding, sizes_of, here.atoms)
    over = {entry.over: entry.storage for entry in block.saved if entry.over}
    over |= {f"{name.removesuffix('.copy0')}.d0": name for name in over.values()}
    runs = list(in_order(sharded))
    where: list[dict[str, Any]] = []
    for run in runs:
        known = [(names.get(tensor.name, tensor.name), op, tensor) for op, tensor, _ in run.fresh]
        where.append({over.get(name, name): (op, tensor) for name, op, tensor in known})
    reads = Counter(name for touched in where for name in touched)
    handed_back = names.get(f"d.{block.carry_out}")
    alive: dict[str, float] = {}
    most, freed, backward = 0.0, 0.0, False
    for run, touched in zip(runs, where, strict=True):
        if run.pass_ != "F" and not backward:
            backward = True
            if handed_back:
                size = next(one[handed_back] for one in where if handed_back in one)
                alive[handed_back] = sizes_of(sharded.sharding.op_cuts[size[0]]).num_bytes(size[1])
        for name, (op, tensor) in touched.items():
            if name not in kept and name not in unmade:
                alive[name] = sizes_of(sharded.sharding.op_cuts[op]).num_bytes(tensor)
        most = max(most, sum(alive.values()) - freed)
        reads.subtract(list(touched))
        for name in touched:
            if not reads[name] and name != handed_back:
                alive.pop(name, None)
                freed += kept.get(name, 0) if backward else 0
    return most


@pytest.mark.parametrize("kernels", TABLES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["embed", "layer", "head"])
def test_the_fullest_moment_is_that_of_a_walk(model, kernels, kind):
    question, text = ask(model, "h100-80", 1, kernels=kernels, seq_len=1024), "tp=1,dp=8"
    unmade = {f"{name}.d1" for names in load_kernels(kernels).placeholders for name in names}
    expected = walked(lowered(question, text, kind), setting(question, text), unmade)
    assert float(priced(question, text, kind=kind).memory.working_bytes) == expected
