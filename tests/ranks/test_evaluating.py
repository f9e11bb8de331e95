"""Judging weights on ranks: the loss of one process, in every kind of layout, before and after a step, and no trace."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from autoshard.run.protocol import EngineMode
from tests.ranks.cases import MIXTRAL, Task, engine_of, gpt, llama, plan_of
from tests.ranks.shares import weights_of
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

CASES = {
    "stages that interleave": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", llama(num_layers=4), "generated"),
    "whole weights in pieces": ("tp=1,pp=1,dp=2,zero=3", llama(), "literal"),
    "experts apart": ("tp=1,pp=1,dp=2,ep=2", llama(**MIXTRAL), "generated"),
    "tied stages and tensors": ("tp=2,pp=2,dp=1", gpt(), "literal"),
    "a pipeline that is folded": ("tp=1,pp=2,dp=1,vp=2,schedule=zb_v", llama(num_layers=4), "literal"),
    "parts of sequences": ("tp=1,pp=1,cp=2,dp=1,zero=1", llama(), "generated"),
    "pieces of a copy, recomputed": ("tp=1,pp=1,dp=4,zero=3,zero_group=2,recompute=full", llama(), "generated"),
    "weights over fewer ranks": ("tp=1,pp=1,dp=4,zero=3,weight_group=2", llama(), "generated"),
}


def judge(task: Task, mode: EngineMode) -> list[float]:
    """Judge the weights, take a step, judge again, and take another; a rank returns all losses in this order."""
    engine = engine_of(task, mode=mode)
    before = {name: held.array.copy() for name, held in weights_of(engine).items()}
    losses = [engine.evaluate(task.steps[0])]
    after = weights_of(engine)
    assert all((after[name].array == array).all() for name, array in before.items()), "a look changes no weight"
    for step in range(2):
        losses.append(engine.step(task.steps[step], task.learning_rate).loss)
        sent = dict(engine.measured().sent_bytes)
        losses.append(engine.evaluate(task.steps[1]))
        assert engine.measured().sent_bytes == sent, "what a step sends is measured, and no look"
    dist.barrier()
    assert not engine.world.under_way and torch.isfinite(torch.tensor(losses)).all()
    return losses


@pytest.mark.parametrize(("text", "model", "mode"), rest_is_slow(CASES.values(), 1, 4))
def test_what_is_judged_is_the_loss_of_one_process(text, model, mode):
    """A step reports the loss before its update: that of its batch under the weights that were judged."""
    task = replace(Task.of(plan_of(text, model), num_steps=2))
    every = on_ranks(task.plan.mesh.num_ranks, judge, task, mode)
    assert all(losses == every[0] for losses in every), "all ranks know the same"
    first, first_step, between, second_step, last = every[0]
    assert first == pytest.approx(task.reference().loss, rel=1e-9)
    assert first_step == pytest.approx(first, rel=1e-12)
    assert second_step == pytest.approx(between, rel=1e-12), "the second step begins where the first one ended"
    assert last != pytest.approx(between, rel=1e-6), "it was judged after another update"
