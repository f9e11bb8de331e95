"""What a run says when the memory of a device is full: where, what was predicted, and what to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autoshard.errors import RunFailed
from autoshard.plan.plan import Plan
from autoshard.run.activity import RankActivity
from autoshard.run.protocol import HOST
from autoshard.units import format_bytes

_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_STATE = ("weights", "gradients", "masters", "optimizer")
_KEPT = ("activations", "logits")


@contextmanager
def explained_when_full(plan: Plan, rank: int, device: str, activity: RankActivity, doing: str) -> Iterator[None]:
    """Turn what torch says of a full device into one line of a failed run; ``doing`` is what the block does."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = _explained(plan, rank, device, doing, activity.action, str(error))
        raise RunFailed(message) from error


def _explained(plan: Plan, rank: int, device: str, doing: str, action: str, said: str) -> str:
    """Return the sentence: which rank had how much memory, what the plan predicted for it, and a remedy."""
    assert plan.prediction, "a plan is predicted before it runs"
    stage = plan.mesh.coordinates(rank).get("pp", 0)
    parts = plan.prediction.stage_memory[stage].parts
    state, for_backward = (sum(parts.get(name, 0) for name in names) for names in (_STATE, _KEPT))
    request = f", when {match[1]} more were asked for" if (match := _ASKED.search(said)) else ""
    during = f" in {action}" if action else ""
    total = format_bytes(sum(parts.values()))
    has = "" if device == HOST or not torch.cuda.is_available() else f" of {format_bytes(torch.cuda.mem_get_info()[1])}"
    where = f"rank {rank}, on place {stage} of the pipeline"
    of_it = f"{format_bytes(state)} of weights and what updates them, {format_bytes(for_backward)} kept for backward"
    return (
        f"{where}, ran out of the memory{has} of its device {doing}{during}{request}. "
        f"The plan predicts {total} for this rank: {of_it}. {_remedy(plan, for_backward > state)}, "
        "or plan again with a larger --headroom; end what else uses the device"
    )


def _remedy(plan: Plan, keeps_most: bool) -> str:
    """Return a remedy: pins of a plan with fewer activations, or with less state, whichever is the larger part here."""
    if keeps_most:
        smaller = f"mbs={plan.micro_batch // 2} or " if plan.micro_batch > 1 else ""
        full = all(str(recompute) == "full" for recompute in plan.candidate.recompute)
        return f"Plan with --fix {smaller}{'a larger tp, cp or pp' if full else 'recompute=full'}"
    if plan.mesh.size("dp") > 1 and plan.zero != 3:
        return f"Plan with --fix zero={3 if plan.zero else 1}"
    for key, size in (("weight_group", plan.weight_group), ("zero_group", plan.zero_group)):
        if size:
            return f"Plan with a larger {key} than {size}, or without"
    return "Plan with a larger tp or pp, for more ranks"
