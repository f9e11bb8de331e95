"""One whole training step computed with numpy, straight from the graph: what engines must agree with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from autoshard.graph.block import Block, OpGraph
from autoshard.graph.kinds.dropout import DROPOUT_KEYS, dropout_keys
from autoshard.graph.op import Array
from autoshard.graph.router import RouterLoss

NO_LOSSES: Mapping[str, RouterLoss] = MappingProxyType({})
Arrays = Mapping[str, Array]
COUNTED = {"columns": "hidden", "kv_numbers": "kv_heads", "group_numbers": "q_group"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gives; weights and gradients are named ``<block>.<number>.<parameter>``."""

    loss: float
    norm: float
    gradients: Arrays
    weights: Arrays
    router: Mapping[str, float] = field(default_factory=dict[str, float])  # losses, means of layers and micro-batches


def random_weights(graph: OpGraph, generator: np.random.Generator, scale: float = 0.5) -> Arrays:
    """Return random weights for every instance; tied ones are the same array."""
    weights: dict[str, Array] = {}
    for name, block in graph.instances():
        for tensor in block.parameters:
            owner = graph.tied.get(f"{block.kind}.{tensor.name}")
            shape = [graph.sizes[dim] for dim in tensor.dims]
            drawn = generator.normal(size=shape) * scale
            weights[f"{name}.{tensor.name}"] = weights[owner.replace(".", ".0.", 1)] if owner else drawn
    return weights


def evaluate_step(
    graph: OpGraph, weights: Arrays, micro_batches: Sequence[Arrays], *, learning_rate: float = 1e-2, seed: int = 0,
    losses: Mapping[str, RouterLoss] = NO_LOSSES,
) -> StepResult:  # fmt: skip
    """Run forward and backward over all micro-batches, then reduce, clip and update (the first step of AdamW).

    A micro-batch holds ``tokens``, ``labels``, ``positions``, ``key_positions``, ``token_weight``, where documents are
    separate ``document_starts``, and, of models with dropout, ``samples``. Experts drop what does not fit their slots,
    so a dropless model needs sizes in which ``slots`` is the number of tokens.
    """
    sums: dict[str, Array] = {}
    loss, weight = 0.0, {name: part.weight(graph.sizes, len(micro_batches)) for name, part in losses.items()}
    router = dict.fromkeys(losses, 0.0)
    gradients = {f"d.{name}": np.asarray(part.coefficient * weight[name]) for name, part in losses.items()}
    for batch in micro_batches:
        environments = _run_forward(graph, weights, batch, seed)
        loss += float(environments[-1]["loss"])
        for name in losses:
            values = [float(environment[name]) for environment in environments if name in environment]
            router[name] += weight[name] * sum(values) / len(values)
        _run_backward(graph, environments, sums, gradients)
    return replace(_run_update(graph, weights, sums, loss, learning_rate), router=router)


def _run_forward(graph: OpGraph, weights: Arrays, batch: Arrays, seed: int) -> list[dict[str, Array]]:
    environments: list[dict[str, Array]] = []
    hidden: Array | None = None
    for name, block in graph.instances():
        drawn = {} if "samples" not in batch else {DROPOUT_KEYS: dropout_keys(seed, batch["samples"], name)}
        drawn |= {number: np.arange(graph.sizes[dim]) for number, dim in COUNTED.items()}
        batch = {**batch, **drawn}
        environment = {
            tensor.name: batch[tensor.name].astype(np.int64 if tensor.dtype == "int64" else np.float64)
            for tensor in block.tensors.values()
            if tensor.role == "input" and tensor.name in batch
        }
        environment |= {tensor.name: weights[f"{name}.{tensor.name}"] for tensor in block.parameters}
        if block.carry_in:
            assert hidden is not None
            environment[block.carry_in] = hidden
        block.run(block.select("micro_batch", "F"), graph.sizes, environment)
        hidden = environment[block.carry_out] if block.carry_out else None
        environments.append(environment)
    return environments


def _run_backward(
    graph: OpGraph, environments: list[dict[str, Array]], sums: dict[str, Array], gradients: Arrays
) -> None:
    upstream = np.float64(1.0)
    for (name, block), environment in reversed(list(zip(graph.instances(), environments, strict=True))):
        environment |= {**gradients, f"d.{block.gives[0]}": np.asarray(upstream)}
        for tensor in block.parameters:
            zeros = np.zeros([graph.sizes[dim] for dim in tensor.dims])
            environment[f"{tensor.name}.grad"] = sums.get(f"{name}.{tensor.name}", zeros)
        block.run(block.select("micro_batch", "IW"), graph.sizes, environment)
        for tensor in block.parameters:
            sums[f"{name}.{tensor.name}"] = environment[f"{tensor.name}.sum"]
        if block.carry_in:
            upstream = environment[block.given_back(block.takes[0])]


def _run_update(graph: OpGraph, weights: Arrays, sums: Arrays, loss: float, learning_rate: float) -> StepResult:
    gradients: dict[str, Array] = {}
    environments: dict[str, dict[str, Array]] = {}
    for name, block in graph.instances():
        environment = _step_environment(graph, name, block, weights, sums)
        before = [op for op in block.select("step") if op.name.rsplit(".", 1)[1] in ("tie", "reduce", "square")]
        block.run(before, graph.sizes, environment)
        gradients |= {f"{name}.{op.source}": environment[op.outputs[0]] for op in before if op.name.endswith(".reduce")}
        environments[name] = environment
    clip, norm = _clip(graph, environments)
    updated: dict[str, Array] = {}
    for name, block in graph.instances():
        environment = environments[name]
        environment |= {
            "clip": clip,
            "learning_rate": np.asarray(learning_rate),
            "step_number": np.asarray(1),
        }
        after = [op for op in block.select("step") if op.name.rsplit(".", 1)[1] in ("update", "cast", "gather")]
        block.run(after, graph.sizes, environment)
        updated |= {f"{name}.{op.source}": environment[op.outputs[0]] for op in after if op.name.endswith(".gather")}
    return StepResult(loss=loss, norm=float(norm), gradients=gradients, weights=updated)


def _step_environment(graph: OpGraph, name: str, block: Block, weights: Arrays, sums: Arrays) -> dict[str, Array]:
    """Return what the step phase starts from: masters equal to the weights, moments zero, tied gradients."""
    environment: dict[str, Array] = {}
    for tensor in block.parameters:
        weight = weights[f"{name}.{tensor.name}"]
        environment[tensor.name] = environment[f"{tensor.name}.master"] = weight
        environment[f"{tensor.name}.moment1"] = environment[f"{tensor.name}.moment2"] = np.zeros_like(weight)
        environment[f"{tensor.name}.sum"] = sums[f"{name}.{tensor.name}"]
    for other in graph.tied:
        kind, parameter = other.split(".", 1)
        environment[f"{other}.sum"] = sums[f"{kind}.0.{parameter}"]
    return environment


def _clip(graph: OpGraph, environments: Mapping[str, Arrays]) -> tuple[Array, Array]:
    squares: dict[str, Array] = {}
    kinds = {name: block.kind for name, block in graph.instances()}
    for tensor in graph.update.tensors.values():
        if tensor.role == "input":
            kind, square = tensor.name.split(".", 1)
            parts = [values[square] for name, values in environments.items() if kinds[name] == kind]
            squares[tensor.name] = np.asarray(sum(parts))
    graph.update.run(graph.update.ops, graph.sizes, squares)
    return squares["clip"], squares[graph.update.op("clip").outputs[1]]
