"""Plans of the nxd engine for small models and few ranks, and what ranks of the real NxD find."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoshard.engine.base import Run, StepReport, whenever_finite
from autoshard.graph.op import Array
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.training import AdamWConstants, Checkpointing, Training
from autoshard.spec.workload import Precision, Workload
from tests.neuron import blocks, standins
from tests.neuron.ring import ring_attention
from tests.ranks.cases import CLIP_NORM, Arrays, Task
from tests.ranks.shares import Held, assemble
from tests.tabled import tabled


def few_ranks(platform: str, num_ranks: int) -> Cluster:
    """A node of just so many ranks, otherwise like the platform's."""
    whole = load_cluster({"trn1": "trn1.32xlarge", "trn2": "trn2.48xlarge"}[platform])
    links = tuple(replace(link, ranks_per_port=1) for link in whole.links if link.domain in ("chip", "node"))
    return replace(whole, chips_per_node=num_ranks, ranks_per_chip=1, links=links, placements=())


def nxd_plan(text: str, model: ModelSpec, platform: str = "trn1", **changes: Any) -> Plan:
    """The plan of a candidate, with the best table for it; Rules about real nodes are not asked."""
    candidate = Candidate.parse(text)
    usual: dict[str, Any] = {"seq_len": 8, "global_batch": 8, "precision": Precision.named("fp32")}
    workload = Workload(**({**usual, "clip_norm": CLIP_NORM} | changes))
    return tabled(build_plan(candidate, model, few_ranks(platform, candidate.num_ranks), workload, "nxd"))


@dataclass(frozen=True, kw_only=True)
class RankFound:
    """What one rank has of every step: loss, norm, its parts of the gradients, and of the weights in the end."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: tuple[tuple[tuple[str, Held], ...], ...]
    weights: tuple[tuple[str, Held], ...]
    num_wrapped: int  # modules that are computed again
    memory_bytes: Mapping[str, int]


class Noting(torch.optim.Optimizer):
    """An optimizer that notes the gradients it is given."""

    def step(self, closure: Any = None) -> Any:
        self.noted = [one.grad.clone() for group in self.param_groups for one in group["params"]]
        return super().step(closure)


class NotingAdamW(Noting, torch.optim.AdamW):
    """The same with the name that torch gives it."""


class NotingSgd(Noting, torch.optim.SGD):
    """The same without moments."""


KERNELS = {"nki_ring_attn_func": ring_attention}
NOTING = {"AdamW": NotingAdamW, "SGD": NotingSgd}


def run_nxd(task: Task, platform: str, changes: Mapping[str, str]) -> RankFound:
    """What every rank runs: the steps of a task with the real NxD, perhaps without a measure against its defects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[standins.PLATFORM] = platform
        os.environ["LOCAL_WORLD_SIZE"] = str(task.plan.mesh.size("tp"))  # else tp 4 on trn1 takes every second rank
        from autoshard.engine.nxd.engine import NxdEngine

        blocks.put_in_place()
        _leave_out(changes.get("without", ""))
        engine = NxdEngine(task.plan, task.weights.__getitem__, updates=NOTING, kernels=KERNELS)
        reports, gradients = [], []
        for batches in task.steps:
            reports.append(engine.step(batches, task.learning_rate, lambda _: True))
            gradients.append(tuple(_gradients(engine, reports[-1].norm)))
        weights = tuple(_weights(engine))
    return RankFound(
        losses=tuple(one.loss for one in reports),
        norms=tuple(one.norm for one in reports),
        gradients=tuple(gradients),
        weights=weights,
        num_wrapped=sum(type(one).__name__ == "NxDCheckpointWrapper" for _, one in engine.model.named_modules()),
        memory_bytes=engine.measured().memory_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A piece as a rank hands it to the test."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    array: Array
    saves: bool
    reads: bool


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a rank has: its pieces before the last step, and after it these, its weights, loss and norm."""

    before: tuple[Saved, ...]
    after: tuple[Saved, ...]
    weights: tuple[tuple[str, bytes], ...]
    loss: float
    norm: float


def run_going_on(task: Task, state: Arrays | None, how: Mapping[str, Any]) -> Resumed:
    """What every rank runs: all steps of a task, or only the last, from a state after the others.

    ``how`` names the platform and the engine; ``apart`` lets that of NxD believe that views share no memory.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[standins.PLATFORM] = how["platform"]
        os.environ["LOCAL_WORLD_SIZE"] = str(task.plan.mesh.size("tp"))
        engine = how.get("engine", "nxd")
        made = _engine(engine, task, (lambda name: task.weights[name] + 1) if state else task.weights.__getitem__)
        if how.get("apart"):
            made.state.apart = True
        if state:
            for piece in made.pieces():
                box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.memory.shape, strict=True))
                assert piece.whole == state[piece.name].shape
                if piece.reads:
                    piece.memory.copy_(torch.from_numpy(state[piece.name][box]))
            made.restored(len(task.steps) - 1)
        else:
            for step in task.steps[:-1]:
                made.step(step, task.learning_rate)
        before = saved(made)
        report = made.step(task.steps[-1], task.learning_rate)
        weights = [(name, _bytes(one.detach())) for name, one in made.parameters] if engine == "nxd" else []
        return Resumed(before=before, after=saved(made), weights=tuple(weights), loss=report.loss, norm=report.norm)


def run_groups(task: Task, constants: AdamWConstants) -> tuple[tuple[str, float, tuple[float, float], float], ...]:
    """What every rank runs: of each tensor its decay and the other constants, as torch's optimizer has them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LOCAL_WORLD_SIZE"] = str(task.plan.mesh.size("tp"))
        from autoshard.engine.nxd.engine import NxdEngine

        engine = NxdEngine(task.plan, task.weights.__getitem__, constants)
        groups = {part: group for group in engine.state.stepping.param_groups for part in group["params"]}
        return tuple(
            (f"{one.contents.instance}.{piece.tensor}", group["weight_decay"], group["betas"], group["eps"])
            for one in engine.state.optimized
            for piece in one.contents.holds.pieces
            for group in [groups[one.updated]]
        )


@dataclass(frozen=True, kw_only=True)
class Declined:
    """What a rank has of a step that was not to be taken, and of the next, which was."""

    asked: tuple[StepReport, ...]
    report: StepReport
    same: bool  # what it held when it was asked, and after, as before the step
    learning_rates: frozenset[float]
    after: tuple[bytes, ...]


def run_declined(task: Task, how: Mapping[str, str]) -> Declined:
    """What every rank runs: a step, one that is declined (unless ``how`` says not to try), and another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LOCAL_WORLD_SIZE"] = str(task.plan.mesh.size("tp"))
        engine = _engine("nxd", task, task.weights.__getitem__)
        first, wrong, last = task.steps
        engine.step(first, task.learning_rate)
        for piece in engine.pieces() if "poison" in how else ():
            if piece.name == how["poison"]:
                piece.memory.fill_(torch.nan)
        if "poison" in how:
            engine.restored(1)
        asked: list[StepReport] = []
        seen = [_held(engine)]

        def refuses(report: StepReport) -> bool:
            asked.append(report)
            seen.append(_held(engine))
            return False

        report = StepReport(loss=0.0, norm=0.0)
        if "only" not in how:
            allows = whenever_finite if "poison" in how else refuses
            report = engine.step(wrong, 1.0, allows)
            seen.append(_held(engine))
        rates = frozenset(float(group["lr"]) for group in engine.state.stepping.param_groups)
        if "poison" not in how:
            assert engine.step(last, task.learning_rate).updated
        same = all(one == seen[0] for one in seen)
        return Declined(asked=tuple(asked), report=report, same=same, learning_rates=rates, after=_held(engine))


def _held(engine: Any) -> tuple[bytes, ...]:
    steps = [_bytes(one["step"]) for one in engine.state.stepping.state.values() if "step" in one]
    pieces = [one.array.tobytes() for one in saved(engine)]
    return (*pieces, *steps, *(_bytes(one.detach()) for _, one in engine.parameters))


def _engine(name: str, task: Task, weights: Callable[[str], Array]) -> Any:
    if name == "nxd":
        from autoshard.engine.nxd.engine import NxdEngine

        blocks.put_in_place()
        return NxdEngine(task.plan, weights, kernels=KERNELS)
    from autoshard.engine.torch.engine import TorchEngine

    return TorchEngine(task.plan, weights)


def saved(engine: Any) -> tuple[Saved, ...]:
    """The pieces of an engine as they are now."""
    return tuple(
        Saved(
            name=piece.name, whole=piece.whole, offsets=piece.offsets, array=piece.memory.float().numpy().copy(),
            saves=piece.saves, reads=piece.reads,
        )
        for piece in engine.pieces()
    )  # fmt: skip


def together(parts: Sequence[Sequence[Saved]]) -> Arrays:
    """Put the tensors of a state together from what ranks save: every element exactly once."""
    found: dict[str, Array] = {}
    counts: dict[str, Array] = {}
    for one in (one for rank in parts for one in rank if one.saves):
        box = tuple(slice(at, at + size) for at, size in zip(one.offsets, one.array.shape, strict=True))
        found.setdefault(one.name, np.zeros(one.whole, dtype=np.float32))[box] = one.array
        counts.setdefault(one.name, np.zeros(one.whole, dtype=int))[box] += 1
    wrong = [name for name, count in counts.items() if not (count == 1).all()]
    assert not wrong, f"not saved exactly once: {wrong}"
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.float().numpy().tobytes()


def run_train(plan: Plan, folder: Path) -> Any:
    """What every rank runs: the loop of ``autoshard run``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LOCAL_WORLD_SIZE"] = str(plan.mesh.size("tp"))
        from autoshard.runtime.machine import builder
        from autoshard.runtime.train import train

        training = Training(steps=4, learning_rate=3e-3, checkpoint=Checkpointing(to="none"))
        run = Run(folder=folder, training=training)
        return train(plan, run, builder("nxd"), lambda _: None)


def _leave_out(measure: str) -> None:
    """Forget, in this process, what the engine does about a defect of NxD."""
    from autoshard.engine.nxd import engine, lowering, model

    def nothing(*_: Any) -> None:
        """Do not."""

    if measure == "marks":
        model.Built.mark = nothing  # pyright: ignore[reportAttributeAccessIssue]
    elif measure == "weights":
        model.Built.fill = nothing  # pyright: ignore[reportAttributeAccessIssue]
    elif measure == "shares":
        made = model.named
        usual = {"RouterTopK": {"apply_act_fn_over_topk": False}, "ExpertMLPs": {"normalize_top_k_affinities": True}}

        def as_usual(name: str) -> Any:
            real = made(name)
            return (lambda **given: real(**(given | usual[name]))) if name in usual else real

        model.named = as_usual
    elif measure == "max_norm":
        real = lowering.lowering_of

        def without(plan: Plan) -> Any:
            found = real(plan)
            return replace(found, optimizer={name: one for name, one in found.optimizer.items() if name != "max_norm"})

        engine.lowering_of = without


def _gradients(engine: Any, norm: float) -> list[tuple[str, Held]]:
    """The whole gradients of this rank's parameters, as they were before they were clipped."""
    clip = min(1.0, engine.plan.workload.clip_norm / (norm + 1e-6))
    noted, found = engine.state.stepping.noted, list[tuple[str, Held]]()
    for one, gradient in zip(engine.state.optimized, noted, strict=True):
        found += _ours(engine, one.contents, gradient / clip, one.rows)
    return found


def _weights(engine: Any) -> list[tuple[str, Held]]:
    """The weights that the model computes with, which are not those that the optimizer updates."""
    found: list[tuple[str, Held]] = []
    for one in engine.state.optimized:
        found += _ours(engine, one.contents, one.parameter.detach().float(), (0, len(one.parameter)))
    return found


def _ours(engine: Any, contents: Any, rows: torch.Tensor, which: tuple[int, int]) -> Iterator[tuple[str, Held]]:
    from autoshard.engine.nxd.shards import patches_of

    built = engine.built
    for whole in patches_of(contents.holds, built.rank, built.sizes, built.whole):
        for patch in whole.rows(*which):
            bounds = tuple((part.start, part.stop) for part in patch.place)
            yield f"{contents.instance}.{patch.tensor}", Held(bounds=bounds, array=patch.view(rows).numpy())


def whole(like: Mapping[str, Array], parts: Sequence[Sequence[tuple[str, Held]]]) -> Arrays:
    """Put tensors together from what all ranks have; copies must be equal."""
    found: dict[str, Array] = {}
    for name, array in like.items():
        held = [one for rank in parts for other, one in rank if other == name]
        if held:  # else it is tied to another
            found[name] = assemble(array.shape, held)
    return found
