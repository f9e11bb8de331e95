"""Plans of small models, a batch for each, one process as the reference, and what ranks run."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from autoshard.engine.programs import PlanPrograms, graph_of, programs_of
from autoshard.engine.routing import moves_rows
from autoshard.engine.torch import compiled
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.formats import Formats
from autoshard.graph.block import OpGraph
from autoshard.graph.kinds.indexing import random_document_starts
from autoshard.graph.op import Array
from autoshard.graph.router import router_losses
from autoshard.layout.interpret import queueing_apart
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_programs, table_setting
from autoshard.run.placement import sequence_order
from autoshard.run.protocol import EngineMode, Run
from autoshard.run.reports import Measured, RouterReport
from autoshard.search.bound.request import Request
from autoshard.spec.mesh import Mesh, axis_of_atoms
from autoshard.spec.model import LayerKind, ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.model_parts import LatentAttention, LinearAttention, RotaryScaling, Router
from autoshard.spec.training import AdamWConstants, Training
from tests.kit import NOTHING, local_plan, local_request
from tests.ranks.shares import Held, assemble, gradients_of, weights_of
from tests.ranks.spawn import on_ranks
from tests.reference_step import StepResult, evaluate_step, random_weights

Arrays = Mapping[str, Array]
CLIP_NORM = 0.05  # far below the norm of every case, so that clipping matters
LEARNING_RATE = 1e-2
SIZES: Mapping[str, Any] = {"seq_len": 8, "global_batch": 4, "clip_norm": CLIP_NORM}
MIXTRAL = {"num_experts": 4, "experts_per_token": 2}
# With sizes so small a search would rather leave ranks without keys than hold them twice.
COPIED = {
    "layer.q.weight": "[kv_heads/kv, q_group/rep, head_dim, hidden]",
    "layer.k.weight": "[kv_heads/kv, head_dim, hidden]",
    "layer.v.weight": "[kv_heads/kv, head_dim, hidden]",
    "layer.attend": "[batch/dp, seq/cp, kv_heads/kv, q_group/rep, head_dim]",
}
CORRECTION = "correction.weight"
STATES = ("weights", "gradients", "masters", "optimizer")
FEW_RANKS = 4
STILL = ("norm.weight", ".bias", ".rate", ".shift")  # weights that do not decay, by the ends of their names
EXACT, AS_PLANNED = Formats(exact=True), Formats()


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


def gemma(**changes: Any) -> ModelSpec:
    """The shape of Gemma 3: two kinds of layers, norms before and behind, everything scaled."""
    options: dict[str, Any] = {"norm_place": "both", "norm_offset": 1.0, "qk_norm": True, "query_scalar": 3.0}
    options |= {"scaled_embeddings": True, "tied_embeddings": True, "activation": "gelu_tanh", "num_layers": 3}
    options |= {"kinds": (LayerKind(name="local", window=3, rotary_theta=50.0),), "order": "local*2/layer"}
    return llama(**(options | changes))


def olmo2(**changes: Any) -> ModelSpec:
    """The shape of OLMo 2: norms only behind, and one norm over all heads of queries or keys."""
    return llama(**({"norm_place": "after", "qk_norm": True, "qk_norm_over": "all heads"} | changes))


def glm(**changes: Any) -> ModelSpec:
    """The shape of GLM-4.5: a first layer without experts, experts in groups by corrected scores, and shared ones."""
    router = Router(scores="sigmoid", scale=1.5, groups=4, chosen_groups=2, group_score="best two", correction=True)
    options: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2, "shared_ffn": 8, "router": router}
    options |= {"qk_norm": True, "qkv_bias": True, "rotary_fraction": 0.5, "num_layers": 3, "vocab": 31}
    options |= {"kinds": (LayerKind(name="dense", dense_ffn=16),), "order": "dense/layer*2"}
    return llama(**(options | changes))


def gpt_oss(**changes: Any) -> ModelSpec:
    """The shape of GPT-OSS: sinks, every second layer in a window, biases everywhere, and gates that are clamped."""
    options: dict[str, Any] = {"sinks": True, "router_bias": True, "glu_limit": 0.5, "glu_slope": 1.702, **MIXTRAL}
    options |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "vocab": 32}
    options |= {"kinds": (LayerKind(name="local", window=3),), "order": "local/layer"}
    return llama(**(options | changes))


def qwen3_next(**changes: Any) -> ModelSpec:
    """The shape of Qwen3-Next: linear attention and gated attention by turns, and a shared expert by a share."""
    linear = LinearAttention(key_heads=4, value_heads=8, key_dim=3, value_dim=5, taps=3)
    options: dict[str, Any] = {"qk_norm": True, "norm_offset": 1.0, "gated_attention": True, "rotary_fraction": 0.5}
    options |= {**MIXTRAL, "shared_ffn": 8, "shared_gated": True, "vocab": 31}
    options |= {"kinds": (LayerKind(name="linear", linear=linear),), "order": "linear/layer"}
    return llama(**(options | changes))


def deepseek(*, query_rank: int | None = 12, value_dim: int = 3, **changes: Any) -> ModelSpec:
    """The attention of DeepSeek: queries, keys and values of narrow states, and a part of keys that heads share."""
    latent = LatentAttention(query_rank=query_rank, kv_rank=8, rotary_dim=2, value_dim=value_dim)
    scaling = RotaryScaling(
        kind="yarn", factor=4.0, low_frequency_factor=0.25, high_frequency_factor=1.5, original_positions=16, mscale=1.0
    )
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 5, "rotary_scaling": scaling}
    return llama(**(heads | {"latent": latent} | changes))


def request_of(candidate: Candidate, model: ModelSpec, **changes: Any) -> Request:
    """The question whose answer is this candidate on this machine; ``changes`` are those of the workload."""
    return local_request(candidate, model, **{**SIZES, **changes})


def plan_of(text: str, model: ModelSpec, pins: Mapping[str, str] = NOTHING, **changes: Any) -> Plan:
    """The plan of exactly this candidate on this machine; ``changes`` are those of the workload."""
    return local_plan(text, model, pins, **{**SIZES, **changes})


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
        """Draw weights, which BF16 holds, and batches; if masked, a third of the tokens does not count."""
        generator, graph = np.random.default_rng(0), graph_of(plan)
        drawn = random_weights(graph, generator, scale=0.3)
        rounded = {id(array): torch.from_numpy(array).bfloat16().double().numpy() for array in drawn.values()}
        weights = {name: rounded[id(array)] for name, array in drawn.items()}  # tied ones stay the same array
        steps = tuple(_micro_batches(plan, generator, number, masked=masked) for number in range(num_steps))
        return cls(plan=plan, weights=weights, steps=steps)

    def reference(self, weights: Arrays | None = None, step: int = 0) -> StepResult:
        """One process, nothing sharded; sequences in the plan's order, tokens in the plan's queues."""
        graph, order = reference_graph(self.plan), sequence_order(self.plan)
        batches = [
            {name: array if name == "samples" else array[..., order] for name, array in batch.items()}
            for batch in self.steps[step]
        ]
        return evaluate_step(
            graph, weights or self.weights, batches, learning_rate=self.learning_rate, seed=self.training.seed,
            losses=router_losses(self.plan.workload),
        )  # fmt: skip


def reference_graph(plan: Plan) -> OpGraph:
    """The step that the ranks of a plan must equal: which tokens experts drop, its table says."""
    graph = graph_of(plan)
    if plan.workload.expert_capacity is None:
        return graph
    mesh, programs = Mesh.virtual(**table_setting(plan).atoms), plan_programs(plan)
    blocks = (queueing_apart(block, programs[block.kind], mesh, graph.sizes) for block in graph.blocks)
    return replace(graph, blocks=tuple(blocks))


def _micro_batches(plan: Plan, generator: np.random.Generator, step: int, *, masked: bool) -> tuple[Arrays, ...]:
    """Random tokens; weights add up to one over the whole step."""
    sizes = graph_of(plan).sizes
    shape = (sizes["batch"], sizes["seq"])
    counts = [(generator.random(shape) < 2 / 3) | (not masked) for _ in range(plan.schedule.num_micro_batches)]
    total = sum(int(count.sum()) for count in counts)
    first = step * plan.workload.global_batch
    along, separate = np.arange(sizes["seq"]), plan.workload.documents == "separate"
    return tuple(
        {
            "samples": first + number * sizes["batch"] + np.arange(sizes["batch"]),
            "tokens": generator.integers(0, sizes["vocab"], shape),
            "labels": generator.integers(0, sizes["vocab"], shape),
            "positions": along,
            "key_positions": along,
            "token_weight": count / total,
            **({"document_starts": random_document_starts(generator, shape)} if separate else {}),
        }
        for number, count in enumerate(counts)
    )


# -- what ranks run ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepShare:
    """What one rank knows after a step: loss and norm as all know them, its parts of gradients and weights by name."""

    loss: float
    norm: float
    gradients: Mapping[str, Held]
    weights: Mapping[str, Held]
    router: RouterReport | None


def engine_of(
    task: Task, formats: Formats = EXACT, mode: EngineMode = "literal", programs: PlanPrograms | None = None
) -> TorchEngine:
    """One rank of a task, in double or in the formats of its plan, whose programs may have been read before."""
    run = Run(folder=Path(), training=task.training, mode=mode)
    return TorchEngine(task.plan, task.weights.__getitem__, formats, run, programs=programs)


def share_of(engine: TorchEngine, task: Task, step: int = 0) -> StepShare:
    """Run a step, and take what this rank has of it."""
    report = engine.step(task.steps[step], task.learning_rate)
    return StepShare(
        loss=report.loss,
        norm=report.norm,
        gradients=gradients_of(engine),
        weights=weights_of(engine),
        router=report.router,
    )


def run_steps(task: Task, formats: Formats = EXACT, mode: EngineMode = "literal") -> list[StepShare]:
    """Run all steps."""
    engine = engine_of(task, formats, mode)
    return [share_of(engine, task, step) for step in range(len(task.steps))]


def run_twice(task: Task, joins: bool) -> tuple[list[StepShare], StepShare, Measured]:
    """Run all steps in double; and the first as it is planned, with what is held and sent.

    Generated functions and the interpreter must agree to the last bit; on many ranks that would take long. If
    ``joins``, functions whose products are joined, as compiled ones are, agree nearly, and hold and send the same.
    """
    generated = engine_of(task, EXACT, "generated")
    programs = generated.programs
    engine = engine_of(task, AS_PLANNED, "generated", programs)
    exact = [share_of(generated, task, step) for step in range(len(task.steps))]
    if dist.get_world_size() <= FEW_RANKS:
        same(share_of(engine_of(task, programs=programs), task), exact[0])
    if joins:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "compiler_of", lambda _: lambda piece, _: piece)
            joined = engine_of(task, EXACT, "compiled", programs)
            shares = [share_of(joined, task, step) for step in range(len(task.steps))]
        nearly(exact[0], shares[0], 1e-13)
        assert joined.measured() == generated.measured()
    return exact, share_of(engine, task), engine.measured()


def same(one: StepShare, other: StepShare) -> None:
    """Hold two modes against each other, bit by bit."""
    assert (one.loss, one.norm) == (other.loss, other.norm)
    for name, held in one.gradients.items():
        np.testing.assert_array_equal(other.gradients[name].array, held.array, err_msg=name)


def nearly(one: StepShare, other: StepShare, bound: float) -> None:
    """Hold two modes against each other, within a share of the largest gradient."""
    assert other.loss == pytest.approx(one.loss, rel=bound)
    most = bound * max(np.abs(gradient.array).max(initial=0.0) for gradient in one.gradients.values())
    for name, gradient in one.gradients.items():
        np.testing.assert_allclose(other.gradients[name].array, gradient.array, rtol=0, atol=most, err_msg=name)


def run_dropping(task: Task, name: str) -> list[StepShare]:
    """Run the step once for each call of a collective, which then does nothing to what this rank has."""
    call, shares = getattr(dist, name), list[StepShare]()
    while True:
        calls = 0

        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls != len(shares) + 1:
                return call(*args, **options)
            if name == "reduce_scatter_single":  # keep one's own part of what should have been summed
                mine, given = args
                mine.copy_(given.chunk(given.numel() // mine.numel())[dist.get_rank(options["group"])])
            return None

        engine = engine_of(task)
        with patched({name: wrapped}):
            share = share_of(engine, task)
        if calls <= len(shares):
            return shares
        shares.append(share)


@contextmanager
def patched(calls: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions of torch.distributed for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, call in calls.items():
            patch.setattr(dist, name, call)
        yield


# -- what they found against one process ---------------------------------------------------------------


def compare(
    expected: StepResult, shares: Sequence[StepShare], *, weights: Arrays | None = None, most: float = 1e-12
) -> None:
    """Hold what ranks found against one process: loss, norm, every gradient, every new weight.

    AdamW divides a gradient by itself, so noise in one that should be zero shows in the weight: up to
    1e-16 / eps x learning rate = 1e-10.
    """
    near(expected, shares, most)
    for name, weight in (weights or expected.weights).items():
        np.testing.assert_allclose(whole(name, weight, shares, "weights"), weight, rtol=0, atol=1e-9, err_msg=name)


def near(expected: StepResult, shares: Sequence[StepShare], most: float) -> None:
    """Hold loss and norm, relative to themselves, and every gradient, relative to the largest of the model."""
    for share in shares:
        np.testing.assert_allclose([share.loss, share.norm], [expected.loss, expected.norm], rtol=most)
    computed = [gradient for name, gradient in expected.gradients.items() if not name.endswith(CORRECTION)]
    largest = max(np.abs(gradient).max() for gradient in computed)
    assert {name for share in shares for name in share.gradients} == set(expected.gradients)
    for name, gradient in expected.gradients.items():
        found = whole(name, gradient, shares, "gradients")
        if name.endswith(CORRECTION):  # whole numbers
            np.testing.assert_array_equal(found, gradient, err_msg=name)
        np.testing.assert_allclose(found, gradient, rtol=0, atol=most * largest, err_msg=name)


def whole(name: str, like: Array, shares: Sequence[StepShare], what: str) -> Array:
    """Put a gradient or a weight together; replicas that differ by a bit are refused."""
    return assemble(like.shape, [held[name] for share in shares if name in (held := getattr(share, what))])


def hold(task: Task, *, joins: bool = False) -> tuple[StepResult, list[StepShare]]:
    """Hold the steps of ranks against one process and PyTorch's AdamW, and what they hold and send against the plan.

    If ``joins``, functions whose products are joined are tried as well. Return the first step of one process, and that
    of the ranks in the formats of the plan.
    """
    answers = on_ranks(task.plan.mesh.num_ranks, run_twice, task, joins)
    expected = list(by_one_process(task))
    for step, (result, weights) in enumerate(expected):
        compare(result, [exact[step] for exact, _, _ in answers], weights=weights)
    hold_promises(task.plan, [measured for _, _, measured in answers])
    return expected[0][0], [planned for _, planned, _ in answers]


def by_one_process(task: Task) -> Iterator[tuple[StepResult, Arrays]]:
    """Yield what one process gives for every step, and the weights that PyTorch's AdamW makes of it.

    Corrections of routers take their own step: by a fixed length, against the sign of what stands for their gradient.
    """
    tensors, optimizer = torch_adamw(task.weights, task.training.adamw)
    for step in range(len(task.steps)):
        result = task.reference({name: tensor.numpy() for name, tensor in tensors.items()}, step)
        for name, gradient in result.gradients.items():
            if name.endswith(CORRECTION):
                tensors[name].sub_(torch.from_numpy(gradient).sign(), alpha=task.plan.workload.router_bias_speed)
            else:
                tensors[name].grad = torch.from_numpy(gradient.copy())
        clipped = [tensors[name] for name in result.gradients if not name.endswith(CORRECTION)]
        torch.nn.utils.clip_grad_norm_(clipped, task.plan.workload.clip_norm)
        optimizer.step()
        yield result, {name: tensor.numpy().copy() for name, tensor in tensors.items()}


def hold_promises(plan: Plan, found: Sequence[Measured]) -> None:
    """Hold what ranks held and sent against the prediction; to the byte where sizes divide.

    A promise is about the fullest rank.
    """
    prediction, divides = plan.prediction, plan.model.vocab % 2 == 0
    assert prediction, "a plan that was made has its prediction"
    found, routed = [without_rows(plan, one) for one in found], axes_of_rows(plan)
    for number, memory in enumerate(prediction.stage_memory):
        promised = {name: memory.parts[name] for name in STATES}
        promised |= {} if routed else {"saved": memory.parts["activations"] + memory.parts["logits"]}
        promised |= {} if routed or not memory.host_bytes else {"host": memory.host_bytes}
        alike = [one for rank, one in enumerate(found) if plan.mesh.coordinates(rank)["pp"] == number]
        held = {name: max(one.memory_bytes[name] for one in alike) for name in promised}
        assert held == (promised if divides else pytest.approx(promised, rel=0.06))
    axes = {axis for one in found for axis in one.sent_bytes}
    sent = {axis: max(one.sent_bytes.get(axis, 0) for one in found) for axis in axes}
    expected = {axis: size for axis, size in prediction.communication_bytes.items() if axis not in routed}
    assert sent == (expected if divides else pytest.approx(expected, rel=0.06))


def axes_of_rows(plan: Plan) -> set[str]:
    """The axes over which ranks send as many rows of experts as are routed."""
    programs = programs_of(plan, packs=True)
    if not programs.packed:
        return set()
    moved = (entry for parts in programs.stages for one in parts.values() for entry in one.program.collectives())
    return {axis_of_atoms(entry.collective.atoms) for entry in moved if moves_rows(entry)}


def without_rows(plan: Plan, found: Measured) -> Measured:
    """What a rank held and sent, without what depends on whom tokens choose."""
    routed = axes_of_rows(plan)
    held = {name: size for name, size in found.memory_bytes.items() if name not in ("saved", "host") or not routed}
    sent = {axis: size for axis, size in found.sent_bytes.items() if axis not in routed}
    return Measured(memory_bytes=held, sent_bytes=sent)


def torch_adamw(weights: Arrays, constants: AdamWConstants) -> tuple[Mapping[str, torch.Tensor], torch.optim.Optimizer]:
    """PyTorch's own optimizer with these constants; tied weights are one tensor, and STILL ones do not decay."""
    distinct = {id(array): torch.from_numpy(array.copy()) for array in weights.values()}
    tensors = {name: distinct[id(array)] for name, array in weights.items()}
    still = {id(array) for name, array in weights.items() if name.endswith((*STILL, CORRECTION))}
    kinds = [
        {"params": [distinct[one] for one in distinct if (one in still) == decays_not], "weight_decay": decay}
        for decays_not, decay in ((False, constants.weight_decay), (True, 0.0))
    ]
    return tensors, torch.optim.AdamW(kinds, LEARNING_RATE, (constants.beta1, constants.beta2), constants.eps)
