"""Why a question has no plan, and which changes would give one: other pins, a larger cluster, a shorter sequence.

Each change is tried on the small part of the space that uses least memory: one sequence at a time where Rules allow
that, 1F1B, and full recompute. A plan that fits there is an answer of the changed question, if not its best.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from autoshard.errors import AutoshardError, Fault, InputError, NoPlan
from autoshard.plan.candidate import Candidate, pins_text
from autoshard.plan.explanation import Refusal
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules import shape
from autoshard.plan.rules.check import all_rules
from autoshard.plan.rules.columns import Engine, kernels_fault
from autoshard.plan.rules.nxd_engine import nxd_tied
from autoshard.plan.rules.nxd_kernels import FLASH_TILE
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.bound.legal_space import InTheWay, in_the_way, legal_space
from autoshard.search.bound.request import Request, rejections_of
from autoshard.search.bound.space import default_kernels
from autoshard.search.bound.watch import Look, SearchProgress, SearchStopped, Watch, go_on, never_stop
from autoshard.spec.cluster import LOCAL
from autoshard.spec.kernels import kernels_names
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.units import counted, format_bytes

_MOST_DOUBLINGS = 6  # of the nodes, and of the batch
_MOST_NEXT = 3  # numbers of nodes that are tried beside powers of two and doublings
_MOST_LOCAL_RANKS = 64
_LEAST_TOKENS = 512
_MUCH_BETTER = 0.05
_MOST_REFUSALS = 4  # that are printed
_OF_QUESTION = (
    "seq_len", "engine", "precision", "documents", "router_balance_loss", "router_z_loss", "router_bias_speed",
)  # fmt: skip
_OPTIONS = {key: f"--{key.replace('_', '-')}" for key in _OF_QUESTION}
_STATES = ("weights", "gradients", "optimizer", "masters", "runtime", "workspace")  # whatever is computed with them
_SMALL = {"mbs": 1, "vp": 1, "schedule": "1f1b", "recompute": (Recompute(kind="full"),)}

Change = tuple[str, Callable[[], Request]]  # options to type, and the question with them


def unanswered(
    request: Request, result: SearchResult, *, helpful: bool = False, watch: Watch = never_stop
) -> AutoshardError:
    """Return the error of a search without a plan, with changes of the question after which a plan exists."""
    faults = () if result.certificate.num_legal else question_faults(request)
    if faults:
        return InputError(faults)
    lines = [why_none(request, result)]
    if helpful:
        local = request.cluster.name == LOCAL
        larger = f"{_MOST_LOCAL_RANKS} ranks" if local else f"{2**_MOST_DOUBLINGS} times as many nodes"
        nothing = (
            f"none of these helps: up to {larger}, less headroom, a shorter sequence, other kernels, an untied card"
        )
        why, count = nothing, len(lines)
        try:
            for remedy in remedies(request, result, watch):
                lines.append(f"  try {remedy}")
        except SearchStopped as stop:
            why = f"{stop}, before all that could help was tried"
        lines += [] if len(lines) > count and why == nothing else [f"  {why}"]
    return NoPlan("\n".join(lines))


def best_plan(ask: Callable[[], Request]) -> Plan | None:
    """Return the best plan of a changed question; None where the change is impossible, or where no plan fits."""
    try:
        return next(iter(search(ask(), nearest=False).plans), None)
    except InputError:
        return None


def any_plan(request: Request, watch: Watch = never_stop) -> Plan | None:
    """Return a plan that fits, from the part of the space that needs least memory; None if no plan there fits."""
    pins, small = request.pins, dict[str, Any](_SMALL)
    if {"schedule", "vp"} & pins.keys():
        del small["schedule"], small["vp"]

    def until_found(look: Look) -> str:
        return watch(SearchProgress) or ("found" if math.isfinite(look().best) else "")

    def tried(small: Mapping[str, Any]) -> SearchResult:
        smaller = replace(request, pins={**small, **pins}, objective="time")
        return search(smaller, watch=until_found, nearest=False)

    try:
        result = tried(small)
        if not result.certificate.num_legal and small.pop("mbs"):  # NxD's kernel for experts refuses few tokens
            result = tried(small)
    except InputError:
        return None
    go_on(watch)
    return next(iter(result.plans), None)


def remedies(request: Request, result: SearchResult, watch: Watch = never_stop) -> Iterator[str]:
    """Yield single changes after which a plan exists, the smallest of each kind, as options to type."""
    yield from _Remedies(request=request, found=result, watch=watch).all()


def better_sizes(request: Request, plan: Plan, watch: Watch = never_stop) -> Iterator[str]:
    """Yield the nearest numbers of nodes and batches with which dp can take the odd factor of the ranks, if faster.

    Otherwise tp, cp or pp have to take it, which is slow for most models and schedules. What is tried keeps tp, cp, ep
    and the schedule of the plan, so that it takes little time; the gain may be larger.
    """
    cluster, batch = request.cluster, request.workload.global_batch
    good = [count for count in range(1, 2 * cluster.num_nodes + 1) if not batch % _odd(count * cluster.ranks_per_node)]
    if cluster.num_nodes in good or cluster.name == LOCAL or not plan.prediction:
        return
    nodes = min(good, key=lambda count: (abs(count - cluster.num_nodes), -count))
    size = math.ceil(batch / _odd(cluster.num_ranks)) * _odd(cluster.num_ranks)
    workload = replace(request.workload, global_batch=size)
    rate = plan.prediction.tokens_per_s / cluster.num_nodes
    plan_keys = {key: getattr(plan.candidate, key) for key in ("tp", "cp", "ep", "schedule")}
    request = replace(request, pins={**plan_keys, **request.pins}, effort=replace(request.effort, at_once=False))
    for words, changed in (
        (f"--nodes {nodes}", _resized(request, nodes)),
        (f"--global-batch {size}", replace(request, workload=workload)),
    ):
        best = next(iter(search(changed, 1, watch, nearest=False).plans), None)
        if best and best.prediction:
            more = best.prediction.tokens_per_s / best.cluster.num_nodes / rate - 1
            if more >= _MUCH_BETTER:
                yield f"{words} would train at least {more:.0%} more tokens a second on each node"


def _odd(number: int) -> int:
    return number // (number & -number)


def _resized(request: Request, size: int) -> Request:
    """Return the question for another number of nodes; on this machine, of ranks."""
    if request.cluster.name == LOCAL:
        return replace(request, cluster=request.cluster.with_local_ranks(size))
    clusters = tuple(replace(lnc_cluster, num_nodes=size) for lnc_cluster in request.other_lnc)
    return replace(request, cluster=replace(request.cluster, num_nodes=size), other_lnc=clusters)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remedies:
    """Tries changes of a question without a plan."""

    request: Request
    found: SearchResult
    watch: Watch

    def all(self) -> Iterator[str]:
        """Yield the smallest helpful change of each kind; where none helps, changes with another model card."""
        helped = False
        small = self._pins(), self._batch(), self._kernels(), self._headroom()
        for words in chain(*small, self._nodes(), self._sequence(), self._engines()):
            helped = True
            yield words
        untied = list(self._untied())
        yield from untied
        if not helped and not untied and self.request.model.tied_embeddings:
            words, ask = self._untied_card()
            for nodes in replace(self, request=ask())._nodes():
                yield f"{words} {nodes}"

    def _first(self, changes: Sequence[Change]) -> Iterator[str]:
        """Yield the first change that helps."""
        for words, ask in changes:
            try:
                helps = any_plan(ask(), self.watch)
            except InputError:  # no such question
                continue
            if helps:
                yield words
                return

    def _with_work(self, **numbers: int) -> Request:
        return replace(self.request, workload=replace(self.request.workload, **numbers))

    def _pins(self) -> Iterator[str]:
        pins, changes = self.request.pins, list[Change]()
        for key in pins if len(pins) > 1 else ():
            rest = {name: value for name, value in pins.items() if name != key}
            words = f"--fix {pins_text(rest)}, so without {pins_text({key: pins[key]})}"
            changes.append((words, partial(replace, self.request, pins=rest)))
        if pins:
            changes.append(("it without --fix", partial(replace, self.request, pins={})))
        yield from self._first(changes)

    def _batch(self) -> Iterator[str]:
        """Try larger batches, and those with which dp can take the odd factor of the ranks: other axes rarely can."""
        now, odd = self.request.workload.global_batch, _odd(self.request.cluster.num_ranks)
        sizes = [math.ceil(now / odd) * odd]
        if not self.found.certificate.num_legal:
            sizes += [sizes[0] << power for power in range(1, _MOST_DOUBLINGS + 1)]
        batches = [(f"--global-batch {size}", partial(self._with_work, global_batch=size)) for size in sizes]
        yield from self._first([change for change, size in zip(batches, sizes, strict=True) if size != now])

    def _kernels(self) -> Iterator[str]:
        """Try other kernels of the same engine where the Rules leave nothing with the usual ones."""
        request, changes = self.request, list[Change]()
        if not self.found.certificate.num_legal and "kernels" not in request.pins:
            for name in kernels_names():
                if any(
                    not kernels_fault(name, engine) and name != default_kernels(request.cluster, engine)
                    for engine in request.engines
                ):
                    pins = {**request.pins, "kernels": name}
                    changes.append((f"--fix {pins_text(pins)}", partial(replace, request, pins=pins)))
        yield from self._first(changes)

    def _headroom(self) -> Iterator[str]:
        """Try half of the headroom, and none, where the smallest plan fits without."""
        request, miss = self.request, self.found.nearest_miss
        if miss and miss.prediction and miss.prediction.peak_bytes <= request.cluster.rank_memory_bytes:
            shares = (float(f"{request.headroom / 2:.3g}"), 0.0) if request.headroom else ()
            yield from self._first(
                [(f"--headroom {share:g}", partial(replace, request, headroom=share)) for share in shares]
            )

    def _nodes(self) -> Iterator[str]:
        """Try the next sizes that could be enough, powers of two, three times these, doublings; the smallest first."""
        cluster = self.request.cluster
        local = cluster.name == LOCAL
        option = "--ranks" if local else "--nodes"
        now = cluster.num_ranks if local else cluster.num_nodes
        most = _MOST_LOCAL_RANKS if local else now << _MOST_DOUBLINGS
        least = max(now + 1, math.ceil(now * self._times_more()))
        doubled = [start << power for start in (1, 3, now) for power in range(most.bit_length())]
        sizes = sorted({*range(least, least + _MOST_NEXT), *doubled})
        yield from self._first(
            [(f"{option} {size}", partial(_resized, self.request, size)) for size in sizes if least <= size <= most]
        )

    def _times_more(self) -> float:
        """Return by which factor ranks must grow if all that the smallest plan holds could be cut."""
        miss = self.found.nearest_miss
        if miss is None or miss.prediction is None:
            return 1.0
        fullest = max(miss.prediction.stage_memory, key=lambda memory: memory.total)
        fixed_bytes = sum(fullest.parts.get(part, 0) for part in ("runtime", "workspace"))
        free = miss.prediction.capacity_bytes - fixed_bytes
        return max(1.0, (fullest.total - fixed_bytes) / free) if free > 0 else 2.0**_MOST_DOUBLINGS

    def _sequence(self) -> Iterator[str]:
        """Try the next length that kernels take, and halves, unless states alone are too much."""
        length, miss = self.request.workload.seq_len, self.found.nearest_miss
        tokens = math.ceil(length / FLASH_TILE) * FLASH_TILE
        lengths = [tokens] if tokens != length and "nxd" in self.request.engines else []
        positions = self.request.model.max_positions
        if self.request.model.positions == "learned":
            lengths = [size for size in (*lengths, positions) if size <= positions and size != length]
        states = 0
        if miss and miss.prediction:
            fullest = max(miss.prediction.stage_memory, key=lambda memory: memory.total)
            states = sum(fullest.parts.get(part, 0) for part in _STATES)
        if miss is None or miss.prediction is None or states <= miss.prediction.capacity_bytes:
            halves = (length >> power for power in range(1, length.bit_length()))
            lengths += [half for half in halves if half >= _LEAST_TOKENS]
        yield from self._first([(f"--seq-len {size}", partial(self._with_work, seq_len=size)) for size in lengths])

    def _engines(self) -> Iterator[str]:
        engines: tuple[Engine, ...] = ("nxd", "torch")
        untried = [engine for engine in engines if engine not in self.request.engines]
        yield from self._first(
            [(f"--engine {engine}", partial(replace, self.request, engines=(engine,))) for engine in untried]
        )

    def _untied(self) -> Iterator[str]:
        """Try a card with untied embeddings, where a Rule refuses tied ones."""
        for refusal in self.found.certificate.refusals:
            if refusal.rule_id == nxd_tied.id:
                words, ask = self._untied_card()
                yield from self._first(
                    [(f"{words} ({counted(refusal.num_points, 'layout')} refused by {refusal.rule_id})", ask)]
                )

    def _untied_card(self) -> Change:
        """Return a card that differs in nothing else, or what to write into a copy of the model's own."""
        model = self.request.model
        named = (name for name in model_names() if name.startswith(f"{model.name}-"))
        cards = [card for card in map(load_model, named) if not card.tied_embeddings]
        untied = replace(model, tied_embeddings=False)
        matching = [card for card in cards if replace(card, name=model.name, source=model.source) == untied]
        words = f"--model {matching[0].name}" if matching else "a copy of the card with tie_word_embeddings false"
        return words, partial(replace, self.request, model=matching[0] if matching else untied)


def question_faults(request: Request, option: str = "--fix") -> tuple[Fault, ...]:
    """Return what is wrong with the question itself: what the Rules say against every layout that it leaves.

    ``option`` is the option with which the pins were given: ``tp=3: ...`` becomes a fault of the option that says so,
    ``--fix tp=3: ...``. Reasons with the same remedy are one fault.
    """
    by_engine = [_against_all(request, engine) for engine in request.engines]
    distinct: dict[tuple[str, str], Fault] = {}
    for message in (message for messages in by_engine if all(by_engine) for message in messages):
        head, colon, rest = message.partition(": ")
        key, _, value = head.partition("=")
        if colon and key in _OPTIONS:
            fault = Fault(where=f"{_OPTIONS[key]} {value}", message=rest)
        elif colon and request.pins.keys() & {pair.partition("=")[0] for pair in head.split(",")}:
            fault = Fault(where=f"{option} {head}", message=rest)
        else:
            fault = Fault(where="", message=message)
        distinct.setdefault((fault.where, fault.message.rpartition(". ")[2]), fault)
    return tuple(distinct.values())


def why_none(request: Request, result: SearchResult) -> str:
    """Say why a search has no plan: which Rules refuse all layouts, or by how much the smallest plan misses memory."""
    pins, cluster = f" with {pins_text(request.pins)}" if request.pins else "", request.cluster
    local = f"this machine with {counted(cluster.num_ranks, 'rank')}"
    where = local if cluster.name == LOCAL else f"{cluster.num_nodes} x {cluster.name}"
    question = f"{request.model.name} on {where}{pins}"
    certificate = result.certificate
    if not certificate.num_legal and (faults := question_faults(request)):
        return ";\n  ".join(["no plan: " + str(faults[0]), *map(str, faults[1:])])
    if not certificate.num_legal:
        count = certificate.num_points
        layouts = "the only layout" if count == 1 else f"each of the {count:,} layouts"
        head = f"no plan: {layouts} of {question} is refused by a rule"
        binding = list(_binding_lines(request))
        uneven = any(line.endswith(f"[{shape.batch.id}]") for line in binding)  # no point of a search
        basis = ["  counted below are layouts whose dp divides the sequences of a step:"] if uneven else []
        return "\n".join([head, *binding, *basis, *_refusal_lines(certificate.refusals)])
    count = certificate.num_legal
    head = f"no plan: none of the {count:,} legal layouts of {question} fits in memory"
    if count == 1:
        head = f"no plan: the only legal layout of {question} does not fit in memory"
    return "\n".join([head, *smallest_lines(result.nearest_miss)])


def why_none_yet(ended: str, miss: Plan | None) -> str:
    """Say that a search was stopped before it had any plan, and by how much the smallest that was tried misses."""
    head = f"no plan: {ended}, before any was found that fits. Give the search more time"
    return "\n".join([head, *smallest_lines(miss)])


def smallest_lines(miss: Plan | None) -> Iterator[str]:
    """Say by how much the smallest plan misses memory, if one is known."""
    if miss and miss.prediction:
        peak, capacity = miss.prediction.peak_bytes, miss.prediction.capacity_bytes
        usable, headroom = miss.cluster.rank_memory_bytes, miss.headroom
        leaves = f"a headroom of {headroom:.3g} leaves of {format_bytes(usable)}"
        supply = leaves if capacity < usable else "there are"  # what an allocator reserves may fill the headroom
        fullest = max(miss.prediction.stage_memory, key=lambda memory: memory.total)
        largest = sorted(fullest.parts.items(), key=lambda part: -part[1])[:3]
        yield (
            f"  the smallest found is {miss.candidate}: {format_bytes(peak)} a rank "
            f"({', '.join(f'{part} {format_bytes(size)}' for part, size in largest)}), "
            f"{format_bytes(peak - capacity)} more than the {format_bytes(capacity)} that {supply}"
        )


def _binding_lines(request: Request) -> Iterator[str]:
    """Say which Rules alone refuse some candidate, for the engine with the fewest such Rules."""
    pins = request.pins if {"schedule", "vp"} & request.pins.keys() else {"schedule": "1f1b", "vp": 1, **request.pins}
    small = replace(request, pins={**{key: _SMALL[key] for key in ("mbs", "recompute")}, **pins})
    obstacles: list[tuple[Engine, InTheWay]] = []
    for engine in request.engines:
        obstacles.extend((engine, obstacle) for obstacle in in_the_way(small, engine))
    fewest = min((len(obstacle.rules) for _, obstacle in obstacles), default=0)
    for engine, obstacle in [pair for pair in obstacles if len(pair[1].rules) == fewest][:2]:
        named = "this rule alone stands" if fewest == 1 else f"only these {fewest} rules stand"
        yield f"  {named} against {replace(obstacle.candidate, recompute=(Recompute(),))}:"
        yield from (f"    {reason}" for reason in rejections_of(request, obstacle.candidate, engine))


def _refusal_lines(refusals: Sequence[Refusal]) -> list[str]:
    most = sorted(refusals, key=lambda refusal: -refusal.num_points)[:_MOST_REFUSALS]
    return [f"  {refusal.num_points} by {refusal.rule_id}, like {refusal.example}" for refusal in most]


def _against_all(request: Request, engine: Engine) -> list[str]:
    """Return the messages of the Rules about the question that refuse every layout of an engine.

    Where the pinned sizes leave no layout at all, return what the Rules say about a candidate with these sizes.
    """
    keys = {rule.id: rule.keys for rule in (*all_rules(), *request.extra_rules)}
    question_keys = {*_OPTIONS, *request.pins}
    ruled = legal_space(request, engine)
    if ruled.num_points:
        hopeless = [refusal for refusal in ruled.refusals if refusal.rule_id in ruled.hopeless]
        return [refusal.example for refusal in hopeless if question_keys & keys[refusal.rule_id]]
    size = math.prod(int(request.pins.get(key, 1)) for key in ("tp", "pp", "cp"))
    usual = {"dp": max(1, request.cluster.num_ranks // size), "kernels": default_kernels(request.cluster, engine)}
    reasons = rejections_of(request, replace(Candidate(), **{**usual, **request.pins}), engine)
    about_pins = [reason for reason in reasons if keys[reason.rule_id] <= question_keys]
    return [reason.message for reason in about_pins or reasons]
