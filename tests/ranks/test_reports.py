"""What steps report and evaluations judge, in every kind of layout: norms by group, and losses, of one process."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from autoshard.engine.programs import graph_of, tied_instances
from autoshard.engine.torch.states.norms import GroupNorms, norm_group
from autoshard.graph.op import Array
from autoshard.run.protocol import EngineMode
from autoshard.run.reports import NormsReport
from autoshard.spec.training import Tracking, Training
from tests.ranks.cases import MIXTRAL, Task, by_one_process, engine_of, gpt, llama, plan_of
from tests.ranks.shares import weights_of
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

CASES = {
    "tied stages and tensors": ("tp=2,pp=2,dp=1", gpt(), "literal"),
    "whole weights in pieces": ("tp=1,pp=1,dp=2,zero=3", llama(), "generated"),
    "experts apart, states in pieces": ("tp=1,pp=1,dp=2,ep=2,zero=1", llama(**MIXTRAL), "literal"),
    "experts apart": ("tp=1,pp=1,dp=2,ep=2", llama(**MIXTRAL), "generated"),
    "parts of sequences": ("tp=1,pp=1,cp=2,dp=1,zero=1", llama(), "generated"),
    "stages that interleave": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", llama(num_layers=4), "generated"),
    "a pipeline that is folded, tied on a rank": ("tp=1,pp=2,dp=1,vp=2,schedule=zb_v", gpt(num_layers=4), "literal"),
    "no pieces": ("tp=1,pp=1,dp=2,zero=0", llama(), "literal"),
    "pieces of a copy": ("tp=1,pp=1,dp=4,zero=3,zero_group=2,recompute=full", llama(), "generated"),
    "weights over fewer ranks": ("tp=1,pp=1,dp=4,zero=3,weight_group=2", llama(), "generated"),
}


def judge(task: Task, mode: EngineMode) -> tuple[list[float], list[tuple[float, NormsReport | None]]]:
    """Judge the weights, take a step, judge again, and take another; return all losses in this order, and the norms."""
    engine, norms = engine_of(task, mode=mode), list[tuple[float, NormsReport | None]]()
    before = {name: held.array.copy() for name, held in weights_of(engine).items()}
    losses = [engine.evaluate(task.steps[0])]
    after = weights_of(engine)
    assert all((after[name].array == array).all() for name, array in before.items()), "a look changes no weight"
    for step in range(2):
        report = engine.step(task.steps[step], task.learning_rate)
        losses.append(report.loss)
        norms.append((report.norm, report.norms))
        sent = dict(engine.measured().sent_bytes)
        losses.append(engine.evaluate(task.steps[1]))
        assert engine.measured().sent_bytes == sent, "what a step sends is measured, and no look"
    dist.barrier()
    assert not engine.world.under_way and torch.isfinite(torch.tensor(losses)).all()
    return losses, norms


def norms_of(task: Task, arrays: Mapping[str, Array]) -> dict[str, float]:
    """Return the norm of each group of whole arrays, tied ones once."""
    graph, squares = graph_of(task.plan), defaultdict[str, float](float)
    copies = tied_instances(graph)
    for name, block in graph.instances():
        for tensor in block.parameters:
            instance = f"{name}.{tensor.name}"
            if block.trains(tensor.name) and instance not in copies:
                squares[norm_group(instance)] += float(np.square(arrays[instance], dtype=np.float64).sum())
    return {group: square**0.5 for group, square in squares.items()}


@pytest.mark.ranks
@pytest.mark.parametrize(("text", "model", "mode"), rest_is_slow(CASES.values(), 2, 4))
def test_what_is_judged_and_the_norms_of_groups_are_those_of_one_process(text, model, mode):
    """A step reports the loss before its update: that of its batch under the weights that were judged."""
    every_other = Training(track=Tracking(norms=2))
    task = replace(Task.of(plan_of(text, model), num_steps=2), training=every_other)
    answers = on_ranks(task.plan.mesh.num_ranks, judge, task, mode)
    (losses, _), *others = answers
    assert all(of_rank == losses for of_rank, _ in others), "all ranks know the same"
    first, first_step, between, second_step, last = losses
    (expected, weights), (second, _) = by_one_process(task)
    assert first == pytest.approx(expected.loss, rel=1e-9)
    assert first_step == pytest.approx(first, rel=1e-12)
    assert second_step == pytest.approx(between, rel=1e-12), "the second step begins where the first one ended"
    assert last != pytest.approx(between, rel=1e-6), "it was judged after another update"
    for _, ((_, skipped), (norm, norms)) in answers:
        assert skipped is None and norms
        assert norms.gradient == pytest.approx(norms_of(task, second.gradients), rel=1e-9)
        assert norms.weights == pytest.approx(norms_of(task, weights), rel=1e-9)
        assert sum(value**2 for value in norms.gradient.values()) == pytest.approx(norm**2, rel=1e-9)


def test_groups_that_are_never_due_cost_nothing():
    groups = GroupNorms.of(graph_of(plan_of("tp=1,pp=1,dp=1", gpt())), None)
    assert not any(map(groups.due, range(8))) and groups.report([]) is None
    assert "head.unembed.weight" not in groups.groups, "it is the embedding"
