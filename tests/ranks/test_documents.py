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
from autoshard.engine.placement import sequence_order
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.plan.plan import Plan
from autoshard.search.request import plan_at
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from tests.ranks import matrix
from tests.ranks.cases import COPIED, StepShare, Task, compare, gpt, llama, plan_of, run_steps
from tests.ranks.matrix import Row
from tests.ranks.spawn import RankFailed, on_ranks
from tests.reference_step import StepResult, evaluate_step

pytestmark = pytest.mark.ranks

CASES: Mapping[str, tuple[str, ModelSpec]] = {
    "zig-zag ring with tp": ("tp=2,pp=1,cp=2,dp=1,cp_order=zigzag", llama()),
    "a window in a ring": ("tp=1,pp=1,cp=2,dp=1,mbs=2", llama(window=3)),
    "learned positions, tied, tp and pp": ("tp=2,pp=2,dp=1", gpt()),
    "learned positions, tied, cut by heads, ZeRO-3": ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all,zero=3", gpt()),
}
MORE: Mapping[str, tuple[str, ModelSpec]] = {
    "one rank": ("tp=1,pp=1,dp=1,mbs=2", llama()),
    "zig-zag ring over four ranks": ("tp=1,pp=1,cp=4,dp=1,cp_order=zigzag", llama()),
    "stages with halves of backward": ("tp=1,pp=2,dp=1,schedule=zb_h1", llama()),
    "tp without sequence parallelism": ("tp=2,pp=1,dp=1,sp=false", llama()),
    "keys on half of the ranks": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2)),
    "ring with ZeRO-3": ("tp=1,pp=1,cp=2,dp=2,zero=3", llama()),
    "ring in stages": ("tp=1,pp=2,cp=2,dp=1,cp_order=zigzag", llama(num_layers=4)),
    "heads, all recomputed": ("tp=1,pp=1,cp=2,dp=2,cp_kind=all_to_all,zero=3,recompute=full", gpt()),
    "interleaved stages": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", gpt(num_layers=4)),
    "attention recomputed in a ring": ("tp=1,pp=1,cp=2,dp=1,recompute=selective[attend]", llama()),
    "a window in zig-zag": ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", llama(window=5)),
}


def separate(text: str, model: ModelSpec, **changes: Any) -> Plan:
    return plan_of(text, model, **({"seq_len": 16, "documents": "separate"} | changes))


def one_by_one(task: Task) -> StepResult:
    """The step of a model that knows no documents: it gets each as a sequence of its own."""
    gradients: dict[str, Any] = {}
    loss = 0.0
    for batch in task.steps[0]:
        for row, starts in enumerate(batch["document_starts"]):
            bounds = [*np.unique(starts).tolist(), len(starts)]
            for start, stop in pairwise(bounds):
                alone = {name: batch[name][row : row + 1, start:stop] for name in ("tokens", "labels", "token_weight")}
                along = np.arange(stop - start)
                graph = plan_graph(task.plan, stop - start)
                made = evaluate_step(graph, task.weights, [{**alone, "positions": along, "key_positions": along}])
                loss += made.loss
                for name, gradient in made.gradients.items():
                    gradients[name] = gradients.get(name, 0.0) + gradient
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
    return StepResult(loss=loss, norm=norm, gradients=gradients, weights={})


def plan_graph(plan: Plan, seq_len: int) -> OpGraph:
    workload = replace(plan.workload, seq_len=seq_len, documents="joined")
    return decoder_graph(plan.model, workload, load_kernels(plan.kernels), micro_batch=1)


def hold(task: Task, answers: Sequence[Sequence[StepShare]]) -> None:
    """Loss, norm and every gradient of the documents one by one; and new weights, of the graph in one process."""
    shares = [share for (share,) in answers]
    compare(one_by_one(task), shares)
    compare(task.reference(), shares)


# -- ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "model"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()),
    ],
)
def test_documents_in_one_sequence_give_what_they_give_one_by_one(text: str, model: ModelSpec):
    task = Task.of(separate(text, model))
    hold(task, on_ranks(task.plan.mesh.num_ranks, run_steps, task))


@pytest.mark.slow
def test_copied_keys_and_sizes_that_nothing_divides():
    for plan in (
        separate("tp=4,pp=1,dp=1", llama(num_kv_heads=2, vocab=32), pins=COPIED),
        separate("tp=1,pp=1,cp=3,dp=1", llama(hidden=13, vocab=31), seq_len=13),
    ):
        task = Task.of(plan)
        hold(task, on_ranks(plan.mesh.num_ranks, run_steps, task))


@pytest.mark.slow
@pytest.mark.parametrize("row", matrix.rows(), ids=lambda row: str(matrix.candidate_of(row)))
def test_every_pair_of_features_with_separate_documents(row: Row):
    request = matrix.request_for(row)
    request = replace(request, workload=replace(request.workload, documents="separate"))
    task = Task.of(plan_at(request, matrix.candidate_of(row)), masked=row["mask"] == "yes")
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    compare(task.reference(), [share for (share,) in answers])


# -- seeded faults -------------------------------------------------------------------------------------


visible_pairs = attention_kernels.visible_pairs


def without_documents(positions: Any, keys: Any, starts: Any, window: Any, *, in_rows: bool) -> Any:
    return visible_pairs(positions, keys, starts[:, :0], window, in_rows=in_rows)


def from_the_sequence(positions: Any, *document_starts: Any) -> Any:
    if document_starts:
        return positions.expand_as(document_starts[0])
    return positions


# Not among them: rotary angles that do not start again. Queries and keys of a document then turn by as much more, which
# attention does not see; the tests of kernels do.
FAULTS = {
    "attention does not stop": (attention_kernels, "visible_pairs", without_documents, "a window in a ring"),
    "learned positions do not start again": (
        indexing_kernels, "places", from_the_sequence, "learned positions, tied, tp and pp",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name", "fault", "case"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_kernels_is_caught(module, name, fault, case, monkeypatch):
    task = Task.of(separate(*CASES[case]))
    monkeypatch.setattr(module, name, fault)  # ranks are forked, so they have it too
    answers = on_ranks(task.plan.mesh.num_ranks, run_steps, task)
    with pytest.raises(AssertionError):
        hold(task, answers)


def in_another_order(task: Task) -> Task:
    """Undo the zig-zag beforehand, for documents alone."""
    back = np.argsort(sequence_order(task.plan))
    (step,) = task.steps
    return replace(
        task, steps=(tuple({**batch, "document_starts": batch["document_starts"][:, back]} for batch in step),)
    )


def of_another_micro_batch(task: Task) -> Task:
    (step,) = task.steps
    starts = [batch["document_starts"] for batch in step]
    return replace(
        task,
        steps=(tuple({**one, "document_starts": other} for one, other in zip(step, starts[::-1], strict=True)),),
    )


def test_a_batch_that_does_not_say_where_documents_start_is_refused():
    task = Task.of(separate("tp=1,pp=1,dp=1", llama()))
    (step,) = task.steps
    silent = tuple({name: array for name, array in batch.items() if name != "document_starts"} for batch in step)
    with pytest.raises(RankFailed, match="document_starts: the plan keeps documents separate"):
        on_ranks(1, run_steps, replace(task, steps=(silent,)))


@pytest.mark.parametrize("seed", [in_another_order, of_another_micro_batch])
def test_documents_of_other_tokens_are_caught(seed):
    task = Task.of(separate("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", llama()))
    answers = on_ranks(2, run_steps, seed(task))
    with pytest.raises(AssertionError):
        hold(task, answers)
