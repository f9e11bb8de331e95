"""Plans of the nxd engine for small models and few ranks, and what ranks of the real NxD find."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.engine.base import Run
from autoshard.engine.place import Held, assemble
from autoshard.graph.op import Array
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.neuron import blocks, standins
from tests.neuron.gloo_xla import group_of
from tests.neuron.ring import ring_attention
from tests.ranks.cases import CLIP_NORM, Arrays, Task
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
        engine = NxdEngine(task.plan, task.weights.__getitem__, task.learning_rate, NOTING, KERNELS)
        reports, gradients = [], []
        for batches in task.steps:
            reports.append(engine.step(batches))
            gradients.append(tuple(_gradients(engine, reports[-1].norm)))
        weights = tuple(_ours(engine, [one.detach().float().numpy() for _, one in engine.parameters]))
    return RankFound(
        losses=tuple(one.loss for one in reports),
        norms=tuple(one.norm for one in reports),
        gradients=tuple(gradients),
        weights=weights,
        num_wrapped=sum(type(one).__name__ == "NxDCheckpointWrapper" for _, one in engine.model.named_modules()),
        memory_bytes=engine.measured().memory_bytes,
    )


def run_train(plan: Plan) -> Any:
    """What every rank runs: the loop of ``autoshard run``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LOCAL_WORLD_SIZE"] = str(plan.mesh.size("tp"))
        from autoshard.runtime.engines import builder
        from autoshard.runtime.train import train

        run = Run(folder=Path(), num_steps=4, learning_rate=3e-3)
        return train(plan, run, builder("nxd"), lambda _: None)


def run_saving(task: Task, folder: Path, again: bool) -> Mapping[str, bytes]:
    """What every rank runs: a step, a checkpoint and a step; or, ``again``, the checkpoint and the last step only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LOCAL_WORLD_SIZE"] = str(task.plan.mesh.size("tp"))
        from autoshard.engine.nxd.engine import NxdEngine

        whole = (lambda name: task.weights[name] + 1) if again else task.weights.__getitem__
        engine = NxdEngine(task.plan, whole, task.learning_rate, kernels=KERNELS)
        first, second = task.steps
        if not again:
            engine.step(first)
            engine.save(folder, 1)
        else:
            engine.load(folder, 1)
        engine.step(second)
        return {name: one.detach().float().numpy().tobytes() for name, one in engine.parameters}


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
    optimizer = engine.optimizer.optimizer
    clip = min(1.0, engine.plan.workload.clip_norm / (norm + 1e-6))
    noted = getattr(optimizer, "base_optimizer", optimizer).noted
    found: list[Array] = []
    for (_, parameter), gradient in zip(engine.parameters, noted, strict=True):
        whole = gradient
        if engine.plan.zero == 1:
            from neuronx_distributed.parallel_layers import parallel_state  # pyright: ignore

            group = group_of(parallel_state.get_zero1_sharding_groups())
            parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, gradient.contiguous(), group=group)
            whole = torch.cat(parts)[: parameter.shape[0]]
        found.append(whole.numpy() / clip)
    return _ours(engine, found)


def _ours(engine: Any, arrays: Sequence[Array]) -> list[tuple[str, Held]]:
    from autoshard.engine.nxd.shards import ours_of

    built, found = engine.built, list[tuple[str, Held]]()
    for (name, _), array in zip(engine.parameters, arrays, strict=True):
        placed = built.placed[name]
        for tensor, held in ours_of(placed.holds, built.rank, built.sizes, array):
            found.append((f"{placed.instance}.{tensor}", held))
    return found


def whole(like: Mapping[str, Array], parts: Sequence[Sequence[tuple[str, Held]]]) -> Arrays:
    """Put tensors together from what all ranks have; padding of the vocabulary is cut off, copies must be equal."""
    found: dict[str, Array] = {}
    for name, array in like.items():
        held = [one for rank in parts for other, one in rank if other == name]
        if not held:
            continue  # tied to another
        shape = tuple(max(part.bounds[axis][1] for part in held) for axis in range(array.ndim))
        found[name] = assemble(shape, held)[tuple(slice(size) for size in array.shape)]
    return found
