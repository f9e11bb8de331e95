"""The layout nearest to a candidate that a program can express, and in words what is lost on the way."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, cast

from autoshard.imports.stages import recompute_of_stages
from autoshard.imports.table import OtherProgram
from autoshard.plan.candidate import Candidate, even_stages
from autoshard.plan.folding import fold_of_axes, folded_axes
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute, stages_text
from autoshard.spec.kernels import libraries_of, load_kernels, with_libraries
from autoshard.spec.workload import Precision, Workload

_FULL = Recompute(kind="full")
_USUAL: Mapping[str, Any] = {"optimizer": "adamw", "documents": "joined", "expert_capacity": None}
_AXES = {"pp": "pipeline stages", "cp": "context parallelism", "ep": "experts over ranks", "tp": "tensor parallelism"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something of a plan that a program cannot express, and what it does instead."""

    what: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expressed:
    """A plan's layout with a program's kernels: as planned, and as the program runs it, with its workload."""

    planned: Candidate
    candidate: Candidate
    workload: Workload
    differences: tuple[Difference, ...]


@dataclass(slots=True)
class _Rewriting:
    """A candidate that becomes expressible step by step."""

    plan: Plan
    program: OtherProgram
    kernels: str
    candidate: Candidate
    differences: list[Difference]

    def become(self, what: str, instead: str, **values: Any) -> None:
        self.candidate = replace(self.candidate, **values)
        self.differences.append(Difference(what=what, instead=instead))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of each stage."""
        count = self.candidate.num_stages
        return self.candidate.stages or even_stages(self.plan.model.num_layers, count)


def expressed(plan: Plan, program: OtherProgram) -> Expressed:
    """Return the nearest layout to that of a plan that a program can express."""
    kernels = program.kernels
    if plan.kernels.startswith(("nxd", "torch_async", "torch_comp", "torch_cuda")) and _same_family(plan, program):
        kernels = plan.kernels
    libraries = [library for library in libraries_of(plan.kernels) if library in program.limits.libraries]
    kernels = with_libraries(kernels, *libraries)
    change = _Rewriting(plan, program, kernels, _with_kernels(plan, kernels), [])
    planned = change.candidate
    for step in _STEPS:
        step(change)
    work = _workload(change)
    change.differences.extend(_of_routers(change))
    if (scaling := plan.model.rotary_scaling) and not program.limits.says_rotation(plan.model):
        what = f"rotary frequencies scaled by {scaling.kind} (factor {scaling.factor:g})"
        change.differences.append(Difference(what=what, instead="as they are without"))
    return Expressed(
        planned=planned,
        candidate=change.candidate,
        workload=work,
        differences=tuple(change.differences),
    )


def _workload(change: _Rewriting) -> Workload:
    """Return the workload that a program runs: what neither its file nor the user's script says has its usual value."""
    work, limits = change.plan.workload, change.program.limits
    names, planned = [Precision.named(text).name for text in limits.precisions], work.precision.name
    if planned not in names:
        base, *_ = planned.split(",")
        nearest = base if base in names else names[0]
        change.differences.append(Difference(what=f"precision {planned}", instead=nearest))
        work = replace(work, precision=Precision.named(nearest))
    for name, usual in _USUAL.items():
        value = getattr(work, name)
        if value != usual and name not in limits.workload and f"work.{name}" not in limits.unsaid:
            instead = "no token is dropped" if usual is None else usual
            change.differences.append(Difference(what=f"{name} {value}", instead=instead))
            work = replace(work, **{name: usual})
    return work


def _of_routers(change: _Rewriting) -> Iterator[Difference]:
    """Yield what becomes of losses and biases of routers."""
    work = change.plan.workload
    if work.router_bias_speed and not change.program.limits.router_losses:
        yield Difference(what="biases of routers that move", instead="what the program does by itself")
    if work.trains_routers and not change.program.limits.router_losses:
        yield Difference(what="losses of routers", instead="what the program does by itself: its file states none")
    elif work.router_balance_loss and work.router_balance_over == "batch" and change.candidate.dp > 1:
        yield Difference(what="experts balanced over all ranks", instead="over the tokens of one data-parallel rank")


def _same_family(plan: Plan, program: OtherProgram) -> bool:
    return plan.kernels.startswith(program.kernels.partition("_")[0])


def _with_kernels(plan: Plan, kernels: str) -> Candidate:
    """Return a plan's candidate with other kernels, its sets of recomputed operations by their names."""
    candidate, resolve = plan.candidate, load_kernels(plan.kernels).resolve
    named = tuple(
        replace(kind, ops=_named(resolve(kind.ops), kernels) or resolve(kind.ops))
        if kind.ops and not set(kind.ops) <= set(load_kernels(kernels).sets)
        else kind
        for kind in candidate.recompute
    )
    return replace(candidate, kernels=None if kernels == plan.cluster.kernels else kernels, recompute=named)


def _named(ops: Sequence[str], kernels: str) -> tuple[str, ...]:
    """Return the names of sets that hold these operations and no others; () where there are none."""
    sets = {name: set(held) for name, held in load_kernels(kernels).sets.items() if held}
    names = [name for name, held in sets.items() if held <= set(ops)]
    if {op for name in names for op in sets[name]} != set(ops):
        return ()
    # a set inside another says nothing more
    return tuple(name for name in names if not any(sets[name] < sets[larger] for larger in names))


def _axes(change: _Rewriting) -> None:
    """Give the ranks of axes that a program does not have to data parallelism."""
    limits, candidate = change.program.limits, change.candidate
    for axis in _AXES:
        size = getattr(candidate, axis)
        if size == 1 or axis in limits.axes:
            continue
        words = f"{_AXES[axis]} ({axis}={size})"
        if axis == "ep":
            change.become(words, "every rank holds all experts", ep=1)
            continue
        values: dict[str, Any] = {axis: 1, "dp": change.candidate.dp * size}
        values["mbs"] = _micro_batch(change.plan.workload.global_batch, values["dp"], change.candidate.mbs)
        if axis == "pp":
            _recompute_alike(change)
            values |= {"vp": 1, "stages": None, "schedule": "1f1b", "recompute": (_heaviest(change),)}
        if axis == "cp":
            values |= {"cp_kind": "ring", "cp_order": "contiguous"}
        if axis == "tp":
            values |= {"sp": None, "boundary": None}
        if axis in ("pp", "tp") and 3 in limits.zero:
            values |= {"zero": 3, "zero_group": None}
        zero = " with ZeRO-3" if "zero" in values else ""
        change.become(words, f"these ranks are replicas{zero}", **values)


def _micro_batch(batch: int, dp: int, mbs: int) -> int:
    fitting = [size for size in range(1, mbs + 1) if batch % (dp * size) == 0]
    return max(fitting, default=mbs)


def _experts(change: _Rewriting) -> None:
    """Say over which axes experts are shared out; programs that fold fill tp first, then cp, then dp."""
    candidate, limits = change.candidate, change.program.limits
    can_fold = change.program.engine == "torch" and max(candidate.tp, candidate.cp) > 1
    if not (change.plan.model.num_experts and can_fold):
        return
    planned = [axis for axis in folded_axes(change.plan) if getattr(candidate, axis) > 1]
    folded = [axis for axis in planned if limits.folds]
    if limits.folds and candidate.cp > 1 and "cp" not in folded and (folded or candidate.ep > 1):
        folded = ["cp", *folded]
    change.candidate = replace(candidate, fold=fold_of_axes(folded))
    ranks = candidate.ep * math.prod(getattr(candidate, axis) for axis in folded)
    if change.plan.model.num_experts % ranks:
        change.become(f"experts over {candidate.ep} ranks", "every rank holds all experts", ep=1, fold="none")
    elif folded != planned:
        words = " and ".join(planned) or "ep alone"
        change.become(f"experts shared out over {words}", f"over {' and '.join(folded) or 'ep alone'}")


def _schedule(change: _Rewriting) -> None:
    candidate, limits = change.candidate, change.program.limits
    if candidate.pp == 1 or candidate.schedule in limits.schedules:
        return
    what = f"schedule {candidate.schedule}"
    rounds = change.plan.workload.global_batch // (candidate.dp * candidate.mbs) % candidate.pp == 0
    if candidate.vp > 1 and "interleaved" in limits.schedules and rounds:
        change.become(what, f"interleaved 1f1b over {candidate.vp} chunks", schedule="interleaved")
    elif candidate.vp > 1:
        _recompute_alike(change)
        one_each = {"vp": 1, "stages": None, "recompute": (_heaviest(change),), "schedule": "1f1b"}
        change.become(what, "1f1b with one stage a rank", **one_each)
    else:
        change.become(what, "1f1b", schedule="1f1b")


def _stages(change: _Rewriting) -> None:
    """Use the program's own split where its cuts are not free."""
    candidate, program = change.candidate, change.program
    free = program.limits.stages == "free" or (program.limits.stages == "one a rank" and candidate.vp == 1)
    if free or candidate.pp == 1:
        return
    count, layers = candidate.num_stages, change.plan.model.num_layers
    even = program.stages(layers, count, {})
    if even is not None and even != change.layers:
        words = f"layers per stage {_words(change.layers)}"
        stages = None if even == even_stages(layers, count) else even
        change.become(words, f"its own split, {_words(even)}", stages=stages)


def _words(layers: Sequence[int]) -> str:
    return Candidate(pp=len(layers), stages=tuple(layers)).__str__().partition("stages=")[2]


def _heaviest(change: _Rewriting) -> Recompute:
    """Return the recompute of a plan's stages that holds least: what fits with another fits with it."""

    def weight(kind: Recompute) -> tuple[int, int]:
        order = {"none": 0, "selective": 1, "full": 2 if kind.num_layers else 3}
        place = 4 if kind.offload else order[kind.kind]
        return place, kind.num_layers or len(load_kernels(change.kernels).resolve(kind.ops))

    return max(change.candidate.recompute, key=weight)


def _recompute_alike(change: _Rewriting) -> None:
    """Give all stages one recompute, before their number changes."""
    kinds = change.candidate.recompute
    if len(set(kinds)) > 1:
        heaviest = (_heaviest(change),)
        change.become(f"recompute {stages_text(kinds)}", f"{stages_text(heaviest)} everywhere", recompute=heaviest)


def _recompute(change: _Rewriting) -> None:
    """Use one kind for all stages, of those that the program has."""
    candidate, limits = change.candidate, change.program.limits
    if all(kind in kinds for kinds in [tuple(_kinds(change))] for kind in candidate.recompute):
        if len(set(candidate.recompute)) == 1:
            return
        if "part" in limits.recompute and _is_part(change):
            return
    what = f"recompute {stages_text(candidate.recompute)}"
    nearest = _nearest(change, _heaviest(change))
    stages = recompute_of_stages((nearest,), change.layers)
    change.become(what, f"{stages_text(stages)} in all stages", recompute=stages)


def _is_part(change: _Rewriting) -> bool:
    """Say whether stages recompute the same number of layers, or all where they have no more."""
    counts = [kind.num_layers for kind in change.candidate.recompute if kind.num_layers]
    if not counts:
        return False
    written = recompute_of_stages((Recompute(kind="full", num_layers=max(counts)),), change.layers)
    return written == change.candidate.recompute


def _kinds(change: _Rewriting) -> Iterator[Recompute]:
    """Yield the kinds of the candidate's recompute that the program can say."""
    limits = change.program.limits
    for kind in {kind for kind in change.candidate.recompute if not kind.offload}:
        if kind.kind == "selective":
            if "selective" in limits.recompute and _is_nameable(change, kind):
                yield kind
        elif kind.num_layers is not None:
            if "part" in limits.recompute:
                yield kind
        elif kind.kind in limits.recompute:
            yield kind


def _is_nameable(change: _Rewriting, kind: Recompute) -> bool:
    choices = change.program.limits.selective
    if choices is None:
        return set(kind.ops) <= set(load_kernels(change.kernels).selective)
    names = {name for choice in choices for name in choice}
    return set(kind.ops) in [set(choice) for choice in choices] or (
        set(kind.ops) <= names and all(len(choice) == 1 for choice in choices)
    )


def _nearest(change: _Rewriting, kind: Recompute) -> Recompute:
    """Return the kind that computes as much again or more, and can be said."""
    limits, table = change.program.limits, load_kernels(change.kernels)
    if kind in set(_kinds(change)):
        return kind
    if kind.kind == "selective" and "selective" in limits.recompute and not kind.offload:
        need = set(table.resolve(kind.ops))
        choices = limits.selective if limits.selective is not None else tuple((name,) for name in table.selective)
        for count in range(1, len(choices) + 1):
            for group in combinations(choices, count):
                names = tuple(name for choice in group for name in choice)
                if need <= set(table.resolve(names)) and (count == 1 or all(len(choice) == 1 for choice in choices)):
                    return Recompute(kind="selective", ops=names)
    return _FULL


def _zero(change: _Rewriting) -> None:
    candidate, limits = change.candidate, change.program.limits
    whole = candidate.dp * candidate.cp
    if whole == 1:
        if candidate.zero not in limits.zero:
            change.candidate = replace(candidate, zero=0, zero_group=None)  # there is nothing to divide
        return
    inner = candidate.zero == 0 and any(getattr(candidate, axis) > 1 for axis in limits.shards_with)
    if candidate.zero not in limits.zero or inner:
        nearest = 3 if inner or candidate.zero == 1 else max(stage for stage in limits.zero if stage < 3)
        words = {0: "plain data parallelism", 1: "ZeRO-1", 3: "ZeRO-3"}
        change.become(words[candidate.zero], words[nearest], zero=cast(Any, nearest), zero_group=None)
    group = change.candidate.zero_group
    if group is not None and (not limits.zero_group or change.candidate.zero == 0):
        change.become(f"ZeRO over groups of {group} ranks", f"over all {whole} ranks", zero_group=None)
    weights = change.candidate.weight_group
    if weights is not None and not limits.weight_group:
        change.become(f"weights over groups of {weights} ranks", "over as many as states", weight_group=None)


def _ring(change: _Rewriting) -> None:
    candidate, limits = change.candidate, change.program.limits
    if candidate.cp == 1:
        return
    if candidate.cp_kind not in limits.cp_kinds:
        change.become(f"cp_kind {candidate.cp_kind}", limits.cp_kinds[0], cp_kind=cast(Any, limits.cp_kinds[0]))
    if candidate.cp_order not in limits.cp_orders:
        order = limits.cp_orders[0]
        change.become(f"cp_order {candidate.cp_order}", order, cp_order=cast(Any, order))


def _sequence(change: _Rewriting) -> None:
    candidate = change.candidate
    if candidate.tp > 1 and candidate.sequence_parallel not in change.program.limits.sp:
        now = candidate.sequence_parallel
        change.become(f"sp={str(now).lower()}", f"sp={str(not now).lower()}", sp=not now)


def _placing(change: _Rewriting) -> None:
    """Leave out what no program can say: the layout between blocks, and the order of the ranks of a node."""
    candidate = change.candidate
    if candidate.boundary is not None:
        usual = "the hidden state between blocks as it usually lies"
        change.become(f"boundary {candidate.boundary}", usual, boundary=None)
    if change.candidate.place is not None:
        change.become(f"place {candidate.place}", "its own order of the ranks of a node", place=None)


_STEPS: tuple[Callable[[_Rewriting], None], ...] = (
    _axes, _experts, _schedule, _stages, _recompute, _zero, _ring, _sequence, _placing,
)  # fmt: skip
