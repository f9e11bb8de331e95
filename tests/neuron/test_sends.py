"""What NxD's layer of experts sends on a CPU is what the plan's table lists: kinds, passes and sizes, in no order."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autoshard.layout.layout import local_sizes
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, plan_programs, step_graph_of, table_setting
from tests.neuron.cases import PATIENCE_S, as_started, nxd_plan
from tests.neuron.nxd_ranks import on_nxd_ranks
from tests.ranks.cases import MIXTRAL, Task, llama

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
ENTRIES = ("mlp_in", "router_out", "expert_in", "share_out", "mlp_out")
Sent = Counter[tuple[str, str, int]]  # pass, kind, elements of the larger side


def listed(plan: Plan) -> Sent:
    """What the table lists of the run of experts; NxD sums gradients of shares for all experts, not for the chosen."""
    block, atoms = plan_blocks(plan)["layer"], table_setting(plan).atoms
    sizes = step_graph_of(plan).sizes(plan.micro_batch * plan.mesh.size("dp"))
    found: Sent = Counter()
    for change in plan_programs(plan)["layer"].collectives():
        if change.entry in ENTRIES and change.collective.kind != "slice":
            tensor = block.tensors[change.reads.tensor]
            sides = [local_sizes(sizes, dict(value.layout.dims), atoms) for value in (change.reads, change.writes)]
            count = max(tensor.num_elements(side) for side in sides)
            wider = sizes["experts"] // sizes["choices"] if change.entry == "share_out" else 1
            found["F" if change.pass_ == "F" else "I", change.collective.kind, count * wider] += 1
    return found


def run_sends(task: Task) -> Sent:
    """What every rank runs: forward and backward of the first layer's experts alone."""
    with as_started(task.plan.mesh.size("tp")):
        from autoshard.engine.nxd.engine import NxdEngine

        engine = NxdEngine(task.plan, task.weights.__getitem__)
        mixture = next(one for one in engine.model.modules() if hasattr(getattr(one, "layer", None), "expert_mlps"))
        plan, seq = task.plan, task.plan.workload.seq_len
        shape = (seq // plan.mesh.size("tp"), plan.micro_batch) if plan.sp else (plan.micro_batch, seq)
        x = torch.randn(*shape, plan.model.hidden, requires_grad=True)
        found: Sent = Counter()
        with counting(lambda kind, count: found.update([("F", kind, count)])):
            made = mixture(x)
        with counting(lambda kind, count: found.update([("I", kind, count)])):
            made.sum().backward()
    return found


@contextmanager
def counting(note: Callable[[str, int], None]) -> Iterator[None]:
    """Note the collectives of NxD's mappings, and those that its layers call themselves, with their larger sizes."""
    mappings, depth = import_module("neuronx_distributed.parallel_layers.mappings"), [0]

    def noted(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **named: Any) -> Any:
            depth[0] += 1
            try:
                result = call(*given, **named)
            finally:
                depth[0] -= 1
            if depth[0] == 0:
                sides = [one for one in (*given, *named.values(), result) if isinstance(one, torch.Tensor)]
                note(kind, max(side.numel() for side in sides))
            return result

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            patch.setattr(mappings, name, noted(name, getattr(mappings, name)))
        patch.setattr(dist, "all_reduce", noted("all_reduce", dist.all_reduce))
        yield


@pytest.mark.parametrize("sp", ["true", "false"])
@pytest.mark.parametrize("capacity", [0.5, 1.0, 2.0, None])
def test_experts_send_what_the_table_lists(sp: str, capacity: float | None) -> None:
    plan = nxd_plan(f"tp=2,pp=1,dp=1,sp={sp}", llama(vocab=32, **MIXTRAL), expert_capacity=capacity)
    for sent in on_nxd_ranks(2, run_sends, Task.of(plan, 1), timeout_s=PATIENCE_S):
        assert sent == listed(plan)
