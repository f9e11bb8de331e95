"""Documents in one sequence that do not see each other: ranks equal a model written here, with its mask in full.

The oracle is plain PyTorch: a block-diagonal mask of every token against every token, positions counted one by one in
each document, autograd. It shares nothing with the graph or with the kernels but the names of weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import autoshard.engine.torch.kernels.attention as attention_kernels
import autoshard.engine.torch.kernels.indexing as indexing_kernels
from autoshard.engine.placement import sequence_order
from autoshard.graph.block import OpGraph
from autoshard.graph.decoder import decoder_graph
from autoshard.plan.plan import Plan
from autoshard.search.planner import plan_at
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from tests.ranks import matrix
from tests.ranks.cases import COPIED, Arrays, StepShare, Task, compare, gpt, llama, plan_of, run_steps, torch_adamw
from tests.ranks.matrix import Row
from tests.ranks.spawn import RankFailed, on_ranks
from tests.reference_step import StepResult, evaluate_step

pytestmark = pytest.mark.ranks

CASES: Mapping[str, tuple[str, ModelSpec]] = {
    "one rank": ("tp=1,pp=1,dp=1,mbs=2", llama()),
    "tp with sequence parallelism": ("tp=2,pp=1,dp=1", llama()),
    "ring": ("tp=1,pp=1,cp=2,dp=1,mbs=2", llama()),
    "zig-zag ring over four ranks": ("tp=1,pp=1,cp=4,dp=1,cp_order=zigzag", llama()),
    "zig-zag ring with tp": ("tp=2,pp=1,cp=2,dp=1,cp_order=zigzag", llama()),
    "attention cut by heads": ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all", llama()),
    "stages with halves of backward": ("tp=1,pp=2,dp=1,schedule=zb_h1", llama()),
    "ZeRO-3, all recomputed": ("tp=1,pp=1,dp=2,zero=3,recompute=full", llama()),
    "a window in a ring": ("tp=1,pp=1,cp=2,dp=1", llama(window=3)),
    "learned positions, tied, tp and pp": ("tp=2,pp=2,dp=1", gpt()),
    "learned positions, tied, zig-zag": ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", gpt()),
    "learned positions, tied, cut by heads, ZeRO-3": ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all,zero=3", gpt()),
}
MORE: Mapping[str, tuple[str, ModelSpec]] = {
    "tp without sequence parallelism": ("tp=2,pp=1,dp=1,sp=false", llama()),
    "keys on half of the ranks": ("tp=4,pp=1,dp=1", llama(num_kv_heads=2)),
    "dp with ZeRO-1": ("tp=1,pp=1,dp=2", llama()),
    "dp without ZeRO": ("tp=1,pp=1,dp=2,zero=0", gpt()),
    "ring with ZeRO-3": ("tp=1,pp=1,cp=2,dp=2,zero=3", llama()),
    "ring in stages": ("tp=1,pp=2,cp=2,dp=1,cp_order=zigzag", llama(num_layers=4)),
    "heads in stages": ("tp=1,pp=2,cp=2,dp=1,cp_kind=all_to_all,schedule=zb_h1", llama()),
    "heads, all recomputed": ("tp=1,pp=1,cp=2,dp=2,cp_kind=all_to_all,zero=3,recompute=full", gpt()),
    "interleaved stages": ("tp=1,pp=2,dp=1,vp=2,schedule=interleaved", gpt(num_layers=4)),
    "attention recomputed in a ring": ("tp=1,pp=1,cp=2,dp=1,recompute=selective[attend]", llama()),
    "zig-zag, tp, pp": ("tp=2,pp=2,cp=2,dp=1,cp_order=zigzag", gpt()),
    "a window in zig-zag": ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", llama(window=5)),
    "a V with tied ends": ("tp=2,pp=2,dp=1,vp=2,schedule=zb_v", gpt(num_layers=4)),
}


def separate(text: str, model: ModelSpec, **changes: Any) -> Plan:
    return plan_of(text, model, **({"seq_len": 16, "documents": "separate"} | changes))


# -- the oracle ----------------------------------------------------------------------------------------


def oracle(task: Task, weights: Arrays | None = None) -> StepResult:
    """Loss, gradients and norm of the first step by the model below."""
    tensors, _ = torch_adamw(weights or task.weights)
    for tensor in tensors.values():
        tensor.requires_grad_()
    model, losses = task.plan.model, list[torch.Tensor]()
    for batch in task.steps[0]:
        tokens, labels, weight = (torch.from_numpy(batch[name]) for name in ("tokens", "labels", "token_weight"))
        mask, places = _mask_and_places(batch["document_starts"], model.window)
        losses.append((_token_losses(model, tensors, tokens, labels, mask, places) * weight).sum())
    total = torch.stack(losses).sum()
    total.backward()
    tied = {"head.0.unembed.weight"} if model.tied_embeddings else set[str]()
    gradients = {name: one.grad.numpy() for name, one in tensors.items() if name not in tied and one.grad is not None}
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))
    return StepResult(loss=float(total.detach()), norm=norm, gradients=gradients, weights={})


def _mask_and_places(starts: np.ndarray, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the documents, count the tokens of each, and say of every pair of tokens whether one sees the other."""
    mask, places = np.zeros((*starts.shape, starts.shape[1]), dtype=bool), np.zeros_like(starts)
    for row, sequence in enumerate(starts.tolist()):
        document, counted, documents = -1, 0, list[int]()
        for position, start in enumerate(sequence):
            document, counted = (document + 1, 0) if start == position else (document, counted)
            documents.append(document)
            places[row, position] = counted
            counted += 1
        for query in range(len(sequence)):
            for key in range(query + 1):
                near = window is None or query - key < window
                mask[row, query, key] = near and documents[query] == documents[key]
    return torch.from_numpy(mask), torch.from_numpy(places)


def _token_losses(
    model: ModelSpec, weights: Mapping[str, torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor,
    mask: torch.Tensor, places: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    x = weights["embed.0.embed.weight"][tokens]
    if model.positions == "learned":
        x = x + weights["embed.0.place.weight"][places]
    for number in range(model.num_layers):
        own = {
            name.removeprefix(f"layer.{number}."): one for name, one in weights.items() if f"layer.{number}." in name
        }
        x = x + _attended(model, own, _normed(model, own, "attn_norm", x), mask, places)
        x = x + _fed_forward(model, own, _normed(model, own, "mlp_norm", x))
    head = {name.removeprefix("head.0."): one for name, one in weights.items()}
    logits = _normed(model, head, "final_norm", x) @ head["unembed.weight"].T
    return functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def _normed(model: ModelSpec, own: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    weight = own[f"{name}.weight"]
    if model.norm == "layer":
        return functional.layer_norm(x, weight.shape, weight, own[f"{name}.bias"], model.norm_eps)
    return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weight


def _attended(
    model: ModelSpec, own: Mapping[str, torch.Tensor], x: torch.Tensor, mask: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    heads = [torch.einsum("bsh,...dh->bs...d", x, own[f"{name}.weight"]) for name in "qkv"]
    query, key, value = (one + own.get(f"{name}_shift.bias", 0.0) for name, one in zip("qkv", heads, strict=True))
    key, value = (one.unsqueeze(3).expand_as(query) for one in (key, value))
    if model.positions == "rotary":
        query, key = (_turned(one, places, model.rotary_theta) for one in (query, key))
    scores = torch.einsum("bskgd,btkgd->bkgst", query, key) / math.sqrt(model.head_dim)
    share = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    mixed = torch.einsum("bkgst,btkgd->bskgd", share, value)
    return torch.einsum("bskgd,hkgd->bsh", mixed, own["o.weight"]) + own.get("o_shift.bias", 0.0)


def _turned(x: torch.Tensor, places: torch.Tensor, theta: float) -> torch.Tensor:
    """Multiply complex numbers, made of the two halves of every head, by numbers on the unit circle."""
    half = x.shape[-1] // 2
    angles = places[:, :, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = (
        torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, :, None, None]
    )
    return torch.cat([turned.real, turned.imag], -1)


def _fed_forward(model: ModelSpec, own: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    up = x @ own["up.weight"].T + own.get("up_shift.bias", 0.0)
    inner = (
        functional.silu(x @ own["gate.weight"].T) * up if model.gated_mlp else functional.gelu(up, approximate="tanh")
    )
    return inner @ own["down.weight"].T + own.get("down_shift.bias", 0.0)


def hold(task: Task, answers: Sequence[Sequence[StepShare]]) -> None:
    """Loss, norm, every gradient, and the weights after PyTorch's own clipping and AdamW."""
    expected = oracle(task)
    tensors, optimizer = torch_adamw(task.weights)
    for name, gradient in expected.gradients.items():
        tensors[name].grad = torch.from_numpy(gradient.copy())
    torch.nn.utils.clip_grad_norm_([tensors[name] for name in expected.gradients], task.plan.workload.clip_norm)
    optimizer.step()
    compare(expected, [share for (share,) in answers], weights={name: one.numpy() for name, one in tensors.items()})


# -- ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "model"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()),
    ],
)
def test_a_step_on_ranks_is_that_of_a_model_with_a_mask_in_blocks(text: str, model: ModelSpec):
    task = Task.of(separate(text, model))
    hold(task, on_ranks(task.plan.mesh.num_ranks, run_steps, task))


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
    if row["experts"] == "dense":  # the oracle here has none
        hold(task, answers)


# -- documents one by one ------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("tp=2,pp=1,dp=1", llama()),
        ("tp=1,pp=1,cp=2,dp=1,cp_order=zigzag", gpt()),
        ("tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all", llama(window=3)),
    ],
)
def test_documents_in_one_sequence_give_what_they_give_one_by_one(text: str, model: ModelSpec):
    task = Task.of(separate(text, model))
    answers = on_ranks(2, run_steps, task)
    compare(one_by_one(task), [share for (share,) in answers])


# -- seeded faults -------------------------------------------------------------------------------------


def without_mask(positions: Any, keys: Any, starts: Any, window: Any, *, in_rows: bool) -> Any:
    spans = attention_kernels._spans(positions)
    return attention_kernels._seen(spans, keys, window, in_rows=in_rows)


def from_the_sequence(positions: Any, *document_starts: Any) -> Any:
    if document_starts:
        return positions.expand_as(document_starts[0])
    return positions


# Not among them: rotary angles that do not start again. Queries and keys of a document then turn by as much more, which
# attention does not see; the tests of kernels do.
FAULTS = {
    "attention does not stop": (attention_kernels, "_seen_by_document", without_mask, "ring"),
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
