"""Experts on a mesh of their own: beside ep, ranks of tp and of cp may hold other experts each.

Attention lies on tp x cp x dp and experts on etp x ep x edp over the same ranks (Liu et al. 2025, MoE Parallel Folding,
arXiv:2504.14960). Here ep is a part of dp, and tables say whether tp and cp cut experts as well; ``fold`` pins that.
"""

import math
import re
from collections.abc import Collection, Mapping

from autoshard.errors import require
from autoshard.plan.candidate import Candidate, Fold
from autoshard.plan.plan import Plan

FOLDED = ("cp", "tp")  # axes whose ranks may hold other experts each
_FOLDS: Mapping[tuple[str, ...], Fold] = {(): "none", ("cp",): "cp", ("tp",): "tp", ("cp", "tp"): "cp.tp"}
_EXPERTS = re.compile(r"-> \[experts/([\w.]+), slots")  # what an operation gives for its own experts alone


def folded_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes beside ep over which a plan shares experts out: as it is pinned, or as its tables cut them."""
    if plan.fold is not None:
        return tuple(axis for axis in FOLDED if axis in plan.fold)
    texts = (text for of_block in plan.strategies.values() for text in of_block.values())
    axes = {axis for text in texts for found in _EXPERTS.findall(text) for axis in found.split(".")}
    named = {"kv": "tp", "rep": "tp"}
    return tuple(axis for axis in FOLDED if axis in {named.get(axis, axis) for axis in axes})


def fold_of(plan: Plan) -> Fold | None:
    """Return what a plan of a mixture folds, as it is pinned; None where there is nothing to fold."""
    can_fold = plan.model.num_experts and max(plan.mesh.size(axis) for axis in FOLDED) > 1
    return fold_of_axes(folded_axes(plan)) if can_fold else None


def fold_of_axes(axes: Collection[str]) -> Fold:
    """Return the fold over these axes, in any order."""
    return _FOLDS[tuple(axis for axis in FOLDED if axis in axes)]


def expert_ranks(plan: Plan) -> int:
    """Return over how many ranks the experts of a layer are shared out."""
    return plan.mesh.size("ep") * math.prod(plan.mesh.size(axis) for axis in folded_axes(plan))


def expert_mesh(candidate: Candidate) -> tuple[int, int]:
    """Return ep and etp of a candidate as other programs state them, the other way round than ``unfolded``.

    >>> expert_mesh(Candidate(tp=2, dp=8, ep=4, fold="tp")), expert_mesh(Candidate(tp=2, dp=8, ep=4))
    ((8, 1), (4, 2))
    """
    fold = candidate.fold or "none"
    folded = math.prod(getattr(candidate, axis) for axis in FOLDED if axis in fold)
    return candidate.ep * folded, 1 if "tp" in fold else candidate.tp


def unfolded(ep: int, etp: int | None, *, tp: int, cp: int) -> tuple[int, Fold | None]:
    """Return ep as a part of dp, and what else shares out experts, of an expert mesh as Megatron-LM states it.

    There ``ep`` ranks share experts out, first those of tp if ``etp`` is 1, then of cp, then of dp; without ``etp`` the
    ranks of tp cut each expert.

    >>> unfolded(8, 1, tp=2, cp=1), unfolded(8, None, tp=2, cp=2), unfolded(1, None, tp=8, cp=4)
    ((4, 'tp'), (4, 'cp'), (1, 'none'))
    """
    require((etp in (None, 1, tp), "etp", f"must be 1 or tp ({tp}), not {etp}: a rank holds whole experts or 1 / tp"))
    folds = {"cp": ep > 1 and cp > 1, "tp": ep > 1 and tp > 1 and etp == 1}
    inner = math.prod(size for axis, size in (("cp", cp), ("tp", tp)) if folds[axis])
    fold = fold_of_axes([axis for axis in FOLDED if folds[axis]])
    require((ep % inner == 0, "ep", f"{ep} ranks with other experts are no multiple of {inner}, those of {fold}"))
    return ep // inner, fold if max(tp, cp) > 1 else None
