"""Documents in one sequence that do not see each other: ranks give what each gives as a sequence of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import autoshard.engine.torch.kernels.attention as attention_kernels
import autoshard.engine.torch.kernels.indexing as indexing_kernels
from autoshard.graph.decoder import decoder_graph
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from tests.ranks.cases import COPIED, StepShare, Task, compare, gpt, llama, plan_of, run_steps
from tests.ranks.spawn import on_ranks
from tests.reference_step import StepResult, evaluate_step
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

CASES: Mapping[str, tuple[str, ModelSpec, Mapping[str, Any]]] = {
    "a window in a zig-zag ring": ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", llama(window=5, sinks=True), {}),
    "learned positions, tied, cut by heads, ZeRO-3": ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all,zero=3", gpt(), {}),
    "learned positions, tied, tp and pp": ("tp=2,pp=2,dp=1", gpt(), {}),
    "zig-zag ring over four ranks": ("tp=1,pp=1,cp=4,dp=1,cp_order=zigzag", llama(), {}),
    "copied keys": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32, sinks=True), {"pins": COPIED}),
    "sizes that nothing divides": ("tp=1,pp=1,cp=3,dp=1", llama(hidden=13, vocab=31), {"seq_len": 13}),
}


def task_of(text: str, model: ModelSpec, changes: Mapping[str, Any]) -> Task:
    return Task.of(plan_of(text, model, **{"seq_len": 16, "documents": "separate", **changes}))


def one_by_one(task: Task) -> StepResult:
    """The step of a model that knows no documents: it gets each as a sequence of its own."""
    gradients: dict[str, Any] = {}
    loss, plan = 0.0, task.plan
    for batch in task.steps[0]:
        for row, starts in enumerate(batch["document_starts"]):
            for start, stop in pairwise([*np.unique(starts).tolist(), len(starts)]):
                alone = {name: batch[name][row : row + 1, start:stop] for name in ("tokens", "labels", "token_weight")}
                workload = replace(plan.workload, seq_len=stop - start, documents="joined")
                graph = decoder_graph(plan.model, workload, load_kernels(plan.kernels), micro_batch=1)
                along = np.arange(stop - start)
                made = evaluate_step(graph, task.weights, [{**alone, "positions": along, "key_positions": along}])
                loss += made.loss
                for name, gradient in made.gradients.items():
                    gradients[name] = gradients.get(name, 0.0) + gradient
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
    return StepResult(loss=loss, norm=norm, gradients=gradients, weights={})


def hold(task: Task, answers: Sequence[Sequence[StepShare]]) -> None:
    """Loss, norm and every gradient of the documents one by one; and new weights, of the graph in one process."""
    shares = [share for (share,) in answers]
    compare(one_by_one(task), shares)
    compare(task.reference(), shares)


@pytest.mark.parametrize(("text", "model", "changes"), rest_is_slow(CASES.values()))
def test_documents_in_one_sequence_give_what_they_give_one_by_one(
    text: str, model: ModelSpec, changes: Mapping[str, Any]
):
    task = task_of(text, model, changes)
    hold(task, on_ranks(task.plan.mesh.num_ranks, run_steps, task))


visible_pairs = attention_kernels.visible_pairs


def without_documents(positions: Any, keys: Any, starts: Any, window: Any, *, in_rows: bool) -> Any:
    return visible_pairs(positions, keys, starts[:, :0], window, in_rows=in_rows)


def from_the_sequence(positions: Any, *document_starts: Any) -> Any:
    return positions.expand_as(document_starts[0]) if document_starts else positions


# Not among them: rotary angles that do not start again. Queries and keys of a document then turn by as much more, which
# attention does not see; the tests of kernels do.
FAULTS = {
    "attention does not stop": (attention_kernels, "visible_pairs", without_documents),
    "learned positions do not start again": (indexing_kernels, "document_positions", from_the_sequence),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_kernels_is_caught(fault: Any):
    task = task_of("tp=1,pp=1,dp=1,mbs=2", gpt(), {})
    answers = on_ranks(1, run_steps, task, replaced=[fault])
    with pytest.raises(AssertionError):
        hold(task, answers)
