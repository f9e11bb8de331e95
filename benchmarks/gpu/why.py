"""Why a step takes what it takes: the device's seconds beside the predicted ones, and the largest differences."""

# pyright: basic
# torch's own signatures are only partly typed.

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

from torch.profiler import record_function

from autoshard.blocks.explain import Explanation, explain
from autoshard.engine.programs import BlockProgram, graph_of
from autoshard.engine.torch import block as block_module
from autoshard.engine.torch.execution import RankStep
from autoshard.engine.torch.steps import RankContext
from autoshard.graph.block import Block
from autoshard.graph.kinds.attention import Attend
from autoshard.graph.kinds.linear import Einsum
from autoshard.layout.program import Compute
from autoshard.plan.plan import Plan
from benchmarks.gpu.device import Device, Item, measured, result, world_of_one
from benchmarks.gpu.profiled import RANGE, Profiled, is_product, marking_blocks, profiled, warm
from benchmarks.gpu.subjects import fitting, ours
from benchmarks.result import Result

LARGEST = 10  # differences, and kernels, that are named
_SECONDS = 100.0
_REST = "all but products and attention"
_PASSES: Mapping[str, str] = {"F": "F", "B": "IW"}  # of the engine: those of the prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What one part of a step was predicted to take, and takes, all layers and micro-batches together."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def more_s(self) -> float:
        """How much longer it takes than predicted."""
        return self.measured_s - self.predicted_s


def run(device: Device) -> Iterator[Result]:
    """Profile two layers of Llama-3 8B, and its embedding and head."""
    what = f"a profile by kernel beside the prediction of every operation, the {LARGEST} largest differences by name"
    item = Item(name="why_llama", what=what, measure=partial(explained, "why_llama", device))
    with world_of_one(device):
        yield from measured([item], device, _SECONDS)


def explained(name: str, device: Device) -> Iterator[Result]:
    """Return the largest differences from the prediction, and the kernels that take longest."""
    plan = fitting("llama3-8b", device, most_layers=2)
    compiled = profile_of(plan, "compiled", device)
    literal = profile_of(plan, "literal", device)
    assert plan.prediction, "a plan that was made has its prediction"
    predicted_s = plan.prediction.step_time_s
    told = {"predicted_s": predicted_s, "busy_s": compiled.busy_s, "gaps": compiled.gaps}
    yield result(name, compiled.span_s, "s a step", told)
    every = sorted(differences(plan, literal, compiled), key=lambda one: -abs(one.more_s))
    for number, one in enumerate(every[:LARGEST], 1):
        times = {"predicted_ms": one.predicted_s * 1e3, "measured_ms": one.measured_s * 1e3}
        yield result(f"{name}_difference_{number}", one.more_s * 1e3, "ms a step more", {"what": one.name, **times})
    for number, (kernel, time_s, count) in enumerate(compiled.by_name()[:LARGEST], 1):
        yield result(f"{name}_kernel_{number}", time_s * 1e3, "ms a step", {"kernel": kernel[:120], "count": count})


def profile_of(plan: Plan, mode: str, device: Device) -> Profiled:
    """Profile a step: marked by blocks where it is compiled, by operations where instructions run one by one."""
    assert mode in ("literal", "compiled")
    with marking_operations():  # compiled functions have none
        subject = ours(plan, mode, device)
    with subject.there(device):
        warm(subject.step, device, 2)
        if mode == "literal":
            return profiled(subject.step, device)
        with marking_blocks():
            return profiled(subject.step, device)


@contextmanager
def marking_operations() -> Iterator[None]:
    """Mark while engines are built what each of their instructions does, as ``layer.I.up``."""
    steps_of = block_module.steps_of

    def marked(context: RankContext, parts: BlockProgram, kind: str, kept: set[str]) -> Iterator[RankStep]:
        for step in steps_of(context, parts, kind, kept):
            run, entry = step.run, step.entry
            single = isinstance(entry, Compute) and not step.few
            place = f"{entry.op.pass_}.{entry.op.source}" if single and isinstance(entry, Compute) else f"{kind}.other"
            yield replace(step, run=_marked(run, f"{RANGE}{parts.block.kind}.{place}")) if run else step

    with mock.patch.object(block_module, "steps_of", marked):
        yield


def _marked(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def marked(*given: Any) -> Any:
        with record_function(name):
            return run(*given)

    return marked


def differences(plan: Plan, literal: Profiled, compiled: Profiled) -> Iterator[Difference]:
    """Yield products and attention of layers one by one, the rest of their passes, other blocks, and the update.

    Products are the same kernels in all modes; what else there is a compiler fuses, so that only sums can be compared.
    """
    graph, predicted = graph_of(plan), explain(plan)
    times = plan.schedule.num_micro_batches
    runs = {block.kind: block.repeat * times for block in graph.blocks} | {"layer": plan.model.num_layers * times}
    alone = dict(_products(graph.block("layer"), predicted, literal, runs["layer"]))
    yield from alone.values()
    found = compiled.by_range()
    for kind in ("embed", "layer", "head"):
        for pass_, passes in _PASSES.items():
            whole_s = sum(
                seconds
                for block in predicted.blocks
                if block.name.split(".")[0] == kind
                for step in block.steps
                for one, seconds in step.seconds.items()
                if one in passes and (kind, one, step.name) not in alone
            )
            name = f"{kind}, {pass_}" + (f": {_REST}" if kind == "layer" else "")
            measured_s = found.get(f"{kind}.{pass_}", (0.0, 0))[0]
            if kind == "layer":
                measured_s = _without_products(compiled, f"layer.{pass_}")
            yield Difference(name=name, predicted_s=whole_s * runs[kind], measured_s=measured_s)
    assert plan.prediction, "a plan that was made has its prediction"
    update_s = plan.prediction.time_parts.get("update", 0.0)
    yield Difference(name="update", predicted_s=update_s, measured_s=found.get("", (0.0, 0))[0])


def _products(
    block: Block, predicted: Explanation, literal: Profiled, runs: int
) -> Iterator[tuple[tuple[str, str, str], Difference]]:
    """Yield a block's products and attention by block, pass and operation, as the prediction groups them."""
    first = {own: group.ops[0] for group in block.fused for own in group.ops}
    multiplies = {
        first.get(op.name, op.name)
        for op in block.select("micro_batch", "F")
        if isinstance(op.kind, Einsum | Attend)
    }  # fmt: skip
    took: dict[tuple[str, str], float] = defaultdict(float)
    for place, (time_s, _) in literal.by_range().items():
        kind, pass_, name = (*place.split(".", 2), "", "")[:3]
        if kind == block.kind:
            took[pass_, first.get(name, name)] += time_s
    steps = (step for one in predicted.blocks if one.name.split(".")[0] == block.kind for step in one.steps)
    for step in steps:
        for pass_, seconds in step.seconds.items() if step.name in multiplies else ():
            yield (
                (block.kind, pass_, step.name),
                Difference(
                    name=f"{block.kind}, {pass_}: {step.name}",
                    predicted_s=seconds * runs,
                    measured_s=took.get((pass_, step.name), 0.0),
                ),
            )


def _without_products(found: Profiled, place: str) -> float:
    return sum(one.time_s for one in found.kernels if one.range == place and not is_product(one.name))
