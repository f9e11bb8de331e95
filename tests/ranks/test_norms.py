"""Norms by group of weights: those of one process, in every kind of layout, and none where they are not due."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from autoshard.engine.programs import graph_of, tied_instances
from autoshard.engine.torch.states.norms import GroupNorms, norm_group
from autoshard.graph.op import Array
from autoshard.run.protocol import EngineMode
from autoshard.run.reports import NormsReport
from autoshard.spec.training import Tracking, Training
from tests.ranks.cases import MIXTRAL, Task, by_one_process, engine_of, gpt, llama, plan_of
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

CASES = {
    "tied stages and tensors": ("tp=2,pp=2,dp=1", gpt(), "literal"),
    "whole weights in pieces": ("tp=1,pp=1,dp=2,zero=3", llama(), "generated"),
    "experts apart, states in pieces": ("tp=1,pp=1,dp=2,ep=2,zero=1", llama(**MIXTRAL), "literal"),
    "parts of sequences": ("tp=1,pp=1,cp=2,dp=1,zero=1", llama(), "generated"),
    "a pipeline that is folded, tied on a rank": ("tp=1,pp=2,dp=1,vp=2,schedule=zb_v", gpt(num_layers=4), "literal"),
    "no pieces": ("tp=1,pp=1,dp=2,zero=0", llama(), "literal"),
    "pieces of a copy": ("tp=1,pp=1,dp=4,zero=3,zero_group=2,recompute=full", llama(), "generated"),
    "weights over fewer ranks": ("tp=1,pp=1,dp=4,zero=3,weight_group=2", llama(), "generated"),
}


def noted(task: Task, mode: EngineMode) -> list[tuple[float, NormsReport | None]]:
    """Return the norm and the norms by group of every step."""
    engine = engine_of(task, mode=mode)
    reports = [engine.step(batches, task.learning_rate) for batches in task.steps]
    return [(report.norm, report.norms) for report in reports]


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


@pytest.mark.parametrize(("text", "model", "mode"), rest_is_slow(CASES.values(), 2))
def test_norms_of_groups_are_those_of_one_process(text, model, mode):
    every_other = Training(track=Tracking(norms=2))
    task = replace(Task.of(plan_of(text, model), num_steps=2), training=every_other)
    (_, weights), (second, _) = by_one_process(task)
    for (_, skipped), (norm, norms) in on_ranks(task.plan.mesh.num_ranks, noted, task, mode):
        assert skipped is None and norms
        assert norms.gradient == pytest.approx(norms_of(task, second.gradients), rel=1e-9)
        assert norms.weights == pytest.approx(norms_of(task, weights), rel=1e-9)
        assert sum(value**2 for value in norms.gradient.values()) == pytest.approx(norm**2, rel=1e-9)


def test_groups_that_are_never_due_cost_nothing():
    groups = GroupNorms.of(graph_of(plan_of("tp=1,pp=1,dp=1", gpt())), None)
    assert not any(map(groups.due, range(8))) and groups.report([]) is None
    assert "head.unembed.weight" not in groups.groups, "it is the embedding"
