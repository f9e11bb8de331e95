"""Plans of small models, a batch for each, one process as the reference, and what ranks run."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from autoshard.engine.base import Run
from autoshard.engine.placement import sequence_order
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.world import World
from autoshard.graph.block import OpGraph
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.op import Array
from autoshard.layout.interpret import queueing_apart
from autoshard.layout.pin import pins_of
from autoshard.layout.shards import VirtualMesh
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs, table_setting
from autoshard.search.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import AdamWConstants, Training
from autoshard.spec.workload import Precision, Workload
from tests.ranks.shares import Held, assemble, gradients_of, weights_of
from tests.reference_step import StepResult, evaluate_step, random_weights

Arrays = Mapping[str, Array]
CLIP_NORM = 0.05  # far below the norm of every case, so that clipping matters
LEARNING_RATE = 1e-2
USUAL = AdamWConstants()
NOTHING: Mapping[str, str] = MappingProxyType({})
# With sizes so small a search would rather leave ranks without keys than hold them twice.
COPIED = {
    "layer.q.weight": "[kv_heads/kv, q_group/rep, head_dim, hidden]",
    "layer.k.weight": "[kv_heads/kv, head_dim, hidden]",
    "layer.v.weight": "[kv_heads/kv, head_dim, hidden]",
    "layer.attend": "[batch/dp, seq/cp, kv_heads/kv, q_group/rep, head_dim]",
}
CALLS = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "isend", "recv")


@functools.cache
def llama(**changes: Any) -> ModelSpec:
    """The shape of tiny-llama, reduced."""
    small: dict[str, Any] = {"num_layers": 2, "hidden": 16, "ffn": 24, "head_dim": 4, "vocab": 30}
    return replace(load_model("tiny-llama"), **(small | changes))


def gpt(**changes: Any) -> ModelSpec:
    """Everything that llama has not: learned positions, biases, tied embeddings, a vocabulary that nothing divides."""
    options: dict[str, Any] = {"norm": "layer", "positions": "learned", "gated_mlp": False, "activation": "gelu_tanh"}
    options |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied_embeddings": True, "vocab": 31}
    return llama(**(options | changes))


def request_of(candidate: Candidate, model: ModelSpec, **changes: Any) -> Request:
    """The question whose answer is this candidate on this machine; ``changes`` are those of the workload."""
    usual: dict[str, Any] = {"seq_len": 8, "global_batch": 4, "precision": Precision.named("bf16")}
    usual["clip_norm"] = CLIP_NORM
    workload = Workload(**(usual | changes))
    cluster = load_cluster("local", ranks=candidate.num_ranks)
    return Request(model=model, cluster=cluster, workload=workload, engines=("torch",))


def plan_of(text: str, model: ModelSpec, pins: Mapping[str, str] = NOTHING, **changes: Any) -> Plan:
    """The plan of exactly this candidate on this machine; ``changes`` are those of the workload."""
    candidate = Candidate.parse(text)
    request = replace(request_of(candidate, model, **changes), layouts=pins_of(pins, "tests"))
    return plan_at(request, candidate)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A plan, weights to start from, and the micro-batches of every step."""

    plan: Plan
    weights: Arrays
    steps: tuple[tuple[Arrays, ...], ...]
    learning_rate: float = LEARNING_RATE
    training: Training = field(default_factory=Training)

    @classmethod
    def of(cls, plan: Plan, num_steps: int = 1, *, masked: bool = True) -> "Task":
        generator, graph = np.random.default_rng(0), graph_of(plan)
        weights = random_weights(graph, generator, scale=0.3)
        steps = tuple(_micro_batches(plan, generator, masked=masked) for _ in range(num_steps))
        return cls(plan=plan, weights=weights, steps=steps)

    def reference(self, weights: Arrays | None = None, step: int = 0) -> StepResult:
        """One process, nothing sharded; sequences in the plan's order, tokens in the plan's queues."""
        graph, order = reference_graph(self.plan), sequence_order(self.plan)
        batches = [{name: array[..., order] for name, array in batch.items()} for batch in self.steps[step]]
        return evaluate_step(graph, weights or self.weights, batches, learning_rate=self.learning_rate)

    def after(self, step: StepResult) -> Arrays:
        """The weights after a step of one process; tied ones are as the one that was updated."""
        updated = {id(self.weights[name]): array for name, array in step.weights.items()}
        return {name: updated[id(array)] for name, array in self.weights.items()}


def reference_graph(plan: Plan) -> OpGraph:
    """The step that the ranks of a plan must equal: which tokens experts drop, its table says."""
    graph = graph_of(plan)
    if plan.workload.expert_capacity is None:
        return graph
    mesh = VirtualMesh(atoms=tuple(table_setting(plan).atoms.items()))
    layer = queueing_apart(graph.block("layer"), plan_programs(plan)["layer"], mesh, graph.sizes)
    return replace(graph, blocks=tuple(layer if one.kind == "layer" else one for one in graph.blocks))


def _micro_batches(plan: Plan, generator: np.random.Generator, *, masked: bool) -> tuple[Arrays, ...]:
    """Random tokens, of which a third does not count if masked; weights add up to one over the whole step."""
    sizes = graph_of(plan).sizes
    shape = (sizes["batch"], sizes["seq"])
    counts = [(generator.random(shape) < 2 / 3) | (not masked) for _ in range(plan.schedule.num_micro_batches)]
    total = sum(int(count.sum()) for count in counts)
    along, separate = np.arange(sizes["seq"]), plan.workload.documents == "separate"
    return tuple(
        {
            "tokens": generator.integers(0, sizes["vocab"], shape),
            "labels": generator.integers(0, sizes["vocab"], shape),
            "positions": along,
            "key_positions": along,
            "token_weight": count / total,
            **({"document_starts": random_document_starts(generator, shape)} if separate else {}),
        }
        for count in counts
    )


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """What one rank knows after a step: loss and norm as all know them, its parts of gradients and weights by name."""

    loss: float
    norm: float
    gradients: Mapping[str, Held]
    weights: Mapping[str, Held]


EXACT, AS_PLANNED = Formats(exact=True), Formats()


def engine_of(task: Task, formats: Formats = EXACT) -> TorchEngine:
    """One rank of a task, computed in double or in the formats of its plan."""
    return TorchEngine(task.plan, task.weights.__getitem__, formats, Run(folder=Path(), training=task.training))


def share_of(engine: TorchEngine, task: Task, step: int = 0) -> StepShare:
    """Run a step, and take what this rank has of it."""
    report = engine.step(task.steps[step], task.learning_rate)
    return StepShare(loss=report.loss, norm=report.norm, gradients=gradients_of(engine), weights=weights_of(engine))


def run_steps(task: Task, formats: Formats = EXACT) -> list[StepShare]:
    """What every rank runs."""
    engine = engine_of(task, formats)
    return [share_of(engine, task, step) for step in range(len(task.steps))]


def run_counted(task: Task) -> Counter[str]:
    """Run, and count the calls of torch.distributed that this rank made."""
    engine = engine_of(task)
    calls: Counter[str] = Counter()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*args: Any, **options: Any) -> Any:
            kind = f"{name}_max" if options.get("op") == dist.ReduceOp.MAX else name
            calls[kind] += 1
            return call(*args, **options)

        return wrapped

    def message(of_torch: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(op: Any, *args: Any) -> Any:
            calls[op.__name__] += 1
            return of_torch(getattr(op, "__wrapped__", op), *args)  # torch takes no other function than its own

        return wrapped

    replaced = {name: counted(name, getattr(dist, name)) for name in CALLS}
    with patched({**replaced, "P2POp": message(dist.P2POp)}):
        engine.step(task.steps[0], task.learning_rate)
    return calls


def run_most_under_way(task: Task) -> int:
    """Run, and return how many messages this rank has sent at most that it does not know to be taken."""
    engine, most = engine_of(task), 0
    send = World.send

    def sending(world: World, *args: Any) -> None:
        nonlocal most
        send(world, *args)
        most = max(most, len(world.under_way))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "send", sending)
        engine.step(task.steps[0], task.learning_rate)
    return most


def run_dropping(task: Task, name: str, num_calls: int) -> list[StepShare]:
    """Run the step once for each call of a collective, which then does nothing to what this rank has."""
    shares: list[StepShare] = []
    for dropped in range(num_calls):
        engine = engine_of(task)
        with patched({name: _without_call(name, dropped)}):
            shares.append(share_of(engine, task))
    return shares


def _without_call(name: str, dropped: int) -> Callable[..., Any]:
    call, calls = getattr(dist, name), iter(range(10**6))

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(calls) != dropped:
            return call(*args, **options)
        if name == "reduce_scatter_single":  # keep one's own part of what should have been summed
            mine, given = args
            mine.copy_(given.chunk(given.numel() // mine.numel())[dist.get_rank(options["group"])])
        return None

    return wrapped


@contextmanager
def patched(calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of torch.distributed for a while."""
    before = {name: getattr(dist, name) for name in calls}
    try:
        for name, call in calls.items():
            setattr(dist, name, call)
        yield
    finally:
        for name, call in before.items():
            setattr(dist, name, call)


def compare(expected: StepResult, shares: Sequence[StepShare], *, weights: Arrays | None = None) -> None:
    """Hold what ranks found against one process: loss, norm, every gradient, every new weight.

    Gradients are compared relative to the largest of the model. AdamW divides a gradient by itself, so noise in one
    that should be zero shows in the weight: up to 1e-16 / eps x learning rate = 1e-10.
    """
    for share in shares:
        np.testing.assert_allclose([share.loss, share.norm], [expected.loss, expected.norm], rtol=1e-12)
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    assert {name for share in shares for name in share.gradients} == set(expected.gradients)
    for name, gradient in expected.gradients.items():
        found = assemble(gradient.shape, [share.gradients[name] for share in shares if name in share.gradients])
        np.testing.assert_allclose(found, gradient, rtol=0, atol=1e-12 * largest, err_msg=name)
    compare_weights(weights or expected.weights, shares, 1e-9)


def compare_weights(expected: Arrays, shares: Sequence[StepShare], most: float) -> None:
    """Hold the new weights of ranks against those of one process."""
    for name, weight in expected.items():
        found = assemble(weight.shape, [share.weights[name] for share in shares if name in share.weights])
        np.testing.assert_allclose(found, weight, rtol=0, atol=most, err_msg=name)


def torch_adamw(
    weights: Arrays, constants: AdamWConstants = USUAL
) -> tuple[Mapping[str, torch.Tensor], torch.optim.Optimizer]:
    """PyTorch's own optimizer with these constants; tied weights are one tensor, norms and biases do not decay."""
    distinct = {id(array): torch.from_numpy(array.copy()) for array in weights.values()}
    tensors = {name: distinct[id(array)] for name, array in weights.items()}
    still = {id(array) for name, array in weights.items() if name.endswith(("norm.weight", ".bias"))}
    kinds = [
        {"params": [distinct[one] for one in distinct if (one in still) == decays_not], "weight_decay": decay}
        for decays_not, decay in ((False, constants.weight_decay), (True, 0.0))
    ]
    return tensors, torch.optim.AdamW(kinds, LEARNING_RATE, (constants.beta1, constants.beta2), constants.eps)
