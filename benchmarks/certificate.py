"""Random small questions, and an adversary who looks for a plan faster than the answer's certificate allows.

The adversary prices whole candidates, one at a time, and asks the Rules about each; it has its own loops over layouts,
schedules and splits, and shares no bound, column or split with the search. It draws candidates with even stages at
random, then improves the best of them, and the search's own plan, by small changes: a layer from one stage to another,
the recompute of a rank, another layout. Half of the questions fix some of the pipeline, and half leave less memory than
the fastest plan of all would take, because small models have neither a pipeline nor recompute of their own accord.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from autoshard.errors import InputError
from autoshard.layout.layout import Cutting
from autoshard.plan.candidate import Candidate, CpKind, CpOrder, Zero
from autoshard.plan.recompute import Recompute
from autoshard.schedule.builders import builders
from autoshard.schedule.schedule import Schedule
from autoshard.search.ask.planner import search
from autoshard.search.ask.vendor.defaults import default_workload
from autoshard.search.bound.request import Request, rejections_of
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model_catalogue import load_model
from benchmarks.measure import counted_off
from benchmarks.result import Result

TASKS = 40
DRAWN = 150  # candidates with even stages
CHANGED = 250  # candidates that differ from one of the best by a small change
_TRIES = 20
_STARTS = 4  # candidates that are improved, beside the search's own plan
_ROUNDING = 1e-8  # of a time, between a sum over columns and one over a single plan
_ZB_V = {"schedule": "zb_v", "vp": 2}
_CLUSTERS = (("trn1.32xlarge", 2), ("trn2.48xlarge", 1), ("a100-80", 4), ("h100-80", 4))  # the most nodes of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the search promised for one question, and the best that the adversary found."""

    question: str
    value: float  # seconds of the search's plan; infinite where it found none
    bound: float
    least: float  # seconds of the adversary's best plan
    candidate: str
    num_priced: int

    @property
    def refuted(self) -> bool:
        """Whether a legal plan that fits is faster than the bound."""
        return self.least < self.bound * (1 - _ROUNDING)

    @property
    def gap(self) -> float:
        """By which share the answer may be slower than the best, as it says."""
        return 1 - self.bound / self.value


def run(count: int = TASKS) -> Result:
    """Attack the certificates of the first questions."""
    return judge([attack(task(number), number) for number in counted_off(range(count), "question")])


def judge(found: Sequence[Finding]) -> Result:
    """Count certificates that a legal plan refutes; none may be."""
    refuted = [one for one in found if one.refuted]
    answered = [one for one in found if one.value < float("inf")]
    worst = min(answered, key=lambda one: one.least / one.value)
    gaps = sorted(one.gap for one in answered)
    faults = {f"refuted_{number}": f"{one.question}: {one.candidate}" for number, one in enumerate(refuted)}
    return Result(
        name="certificate",
        value=len(refuted),
        unit="certificates refuted",
        bar=0,
        holds=not refuted,
        extras={
            "questions": len(found),
            "answered": len(answered),
            "priced": sum(one.num_priced for one in found),
            "plan_beaten": sum(one.least < one.value * (1 - _ROUNDING) for one in answered),
            "worst_ratio": round(worst.least / worst.value, 5),
            "worst_question": worst.question,
            "median_gap": round(gaps[len(gaps) // 2], 5),
            "largest_gap": round(gaps[-1], 5),
            **faults,
        },
    )


def task(number: int) -> Request:
    """Draw a question: a dense or MoE model, a cluster, a sequence and a batch, some of them tiny or long.

    Half of the questions fix a pipeline, and half of all leave less memory than the fastest plan would take.
    """
    draw = random.Random(f"question {number}")
    name, most = draw.choice(_CLUSTERS)
    cluster = load_cluster(name, draw.randint(1, most))
    on_neuron = cluster.engine == "nxd"
    sparse, head_dim, num_kv_heads = draw.random() < 0.3, draw.choice((64, 128)), draw.choice((4, 8))
    num_heads = num_kv_heads * draw.choice((1, 2, 4))
    hidden = head_dim * num_heads
    model = replace(
        load_model("mixtral-8x7b" if sparse else "llama3-8b"),
        name=f"random-{number}",
        num_layers=draw.randint(4, 24),
        hidden=hidden,
        ffn=hidden * draw.choice((2, 3, 4)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab=draw.choice((4096, 32000, 128256)),
        max_positions=65536,
        tied_embeddings=draw.random() < 0.2 and not on_neuron,  # NxD has no pipelines of tied embeddings
    )
    seq_len, batch = draw.choice((2048, 4096, 4096, 32768)), cluster.num_ranks * draw.choice((1, 2, 4, 8)) // 4
    workload = replace(default_workload(model, cluster)[0], seq_len=seq_len, global_batch=batch)
    interleaved = {"schedule": "interleaved", "vp": draw.choice((2, 3))}
    pipelines: list[dict[str, Any]] = [{}, interleaved] if on_neuron else [{}, _ZB_V, interleaved]
    pipeline = {"pp": draw.choice((2, 4)), **draw.choice(pipelines)}
    pins = draw.choice(({}, pipeline))
    request = Request(model=model, cluster=cluster, workload=workload, engines=(cluster.engine,), pins=pins)
    fastest = next(iter(search(request).plans), None) if draw.random() < 0.5 else None
    if fastest is None or not fastest.prediction:
        return request
    return replace(request, memory_bytes=fastest.prediction.peak_bytes * draw.uniform(0.6, 0.98))


@dataclass(slots=True)
class Adversary:
    """Prices candidates of one question by themselves, and remembers the fastest."""

    request: Request
    draw: random.Random
    _cuttings: dict[Candidate, Cutting] = field(default_factory=dict[Candidate, Cutting])
    times: dict[Candidate, float] = field(default_factory=dict[Candidate, float])

    @classmethod
    def of(cls, request: Request, number: int) -> "Adversary":
        """Return one that draws the same candidates every time."""
        return cls(request, random.Random(f"attack {number}"))

    def time_s(self, candidate: Candidate) -> float:
        """Return the seconds of a step; infinite where a Rule refuses the candidate or it does not fit."""
        if candidate not in self.times:
            try:
                self.times[candidate] = self._priced_s(candidate)
            except InputError:  # it has no shape: fewer layers than stages, a batch that does not divide
                self.times[candidate] = float("inf")
        return self.times[candidate]

    def _priced_s(self, candidate: Candidate) -> float:
        engine = self.request.engines[0]
        if rejections_of(self.request, candidate, engine):
            return float("inf")
        outer = replace(candidate, stages=None, recompute=(Recompute(),))
        if outer not in self._cuttings:
            self._cuttings[outer] = self.request.cutting(outer, engine)
        plan = self.request.plan(candidate, engine, self._cuttings[outer], tables=False)
        assert plan.prediction
        fits = plan.prediction.peak_bytes <= self.request.capacity_bytes(plan.kernels)
        return plan.prediction.step_time_s if fits else float("inf")

    def best(self, count: int) -> list[Candidate]:
        """Return the fastest candidates so far, each of another layout."""
        found: dict[Candidate, Candidate] = {}
        for one in sorted(self.times, key=self.times.__getitem__):
            if self.times[one] < float("inf"):
                found.setdefault(replace(one, stages=None, recompute=(Recompute(),)), one)
        return list(found.values())[:count]

    def drawn(self) -> Candidate:
        """Draw a layout, a schedule, and one recompute for all stages, which are even."""
        model, workload, pins = self.request.model, self.request.workload, self.request.pins
        sizes, left = {"pp": pins.get("pp", 0)}, self.request.cluster.num_ranks // pins.get("pp", 1)
        for axis, most in (("pp", model.num_layers), ("tp", model.num_heads), ("cp", workload.seq_len // 512)):
            if not sizes.get(axis):
                sizes[axis] = self.draw.choice([size for size in _divisors(left) if size <= most])
                left //= sizes[axis]
        expert = [size for size in _divisors(left) if model.num_experts and model.num_experts % size == 0]
        builder = self.draw.choice([*builders()])
        chunks = builders()[builder].num_chunks or self.draw.choice((2, 2, 3, 4))
        choices: dict[str, Any] = {
            "ep": self.draw.choice(expert or [1]),
            "mbs": self.draw.choice((1, 1, 1, 2, 3, 4, 8)),
            "sp": self.draw.choice((None, None, False)) if sizes["tp"] > 1 else None,
            "vp": chunks if sizes["pp"] > 1 else 1,
            "schedule": builder if sizes["pp"] > 1 else "1f1b",
            "zero": self.draw.choice((1, 1, *get_args(Zero))),
            "cp_kind": self.draw.choice(get_args(CpKind)) if sizes["cp"] > 1 else "ring",
            "cp_order": self.draw.choice(get_args(CpOrder)) if sizes["cp"] > 1 else "contiguous",
        }
        recompute = (self.draw.choice(self.recomputes),)
        return replace(Candidate(), **{**sizes, "dp": left, **choices, **pins, "recompute": recompute})

    @property
    def recomputes(self) -> list[Recompute]:
        """None, full, and each named set of operations."""
        kernels = load_kernels(self.request.cluster.kernels)
        named = [Recompute(kind="selective", ops=(name,)) for name, ops in kernels.selective.items() if ops]
        return [Recompute(), *named, Recompute(kind="full")]

    def changed(self, candidate: Candidate) -> Candidate:
        """Move some layers, change the recompute of one rank, or take another outer choice."""
        if candidate.pp == 1 or self.draw.random() < 0.1:
            return self._other_outer(candidate)
        return self._other_layers(candidate) if self.draw.random() < 0.7 else self._other_recompute(candidate)

    def _layers(self, candidate: Candidate) -> list[int]:
        count, stages = self.request.model.num_layers, candidate.num_stages
        return list(candidate.stages or (count * (at + 1) // stages - count * at // stages for at in range(stages)))

    def _other_layers(self, candidate: Candidate) -> Candidate:
        layers = self._layers(candidate)
        for _ in range(self.draw.choice((1, 1, 1, 2, 3))):
            giver, taker = self.draw.sample(range(len(layers)), 2)
            if layers[giver] > 1:
                layers[giver], layers[taker] = layers[giver] - 1, layers[taker] + 1
        return replace(candidate, stages=tuple(layers))

    def _other_recompute(self, candidate: Candidate) -> Candidate:
        """Let the chunks of one rank, or of all, recompute otherwise."""
        layers = self._layers(candidate)
        schedule = Schedule(
            builder=candidate.schedule, num_ranks=candidate.pp, num_chunks=candidate.vp, num_micro_batches=candidate.pp
        )
        entries = [candidate.recompute_of(stage) for stage in range(len(layers))]
        rank, new = self.draw.randrange(candidate.pp), self.draw.choice(self.recomputes)
        some = self.draw.randint(1, max(layers)) if self.draw.random() < 0.3 else None
        everywhere = self.draw.random() < 0.3
        for stage, size in enumerate(layers):
            if everywhere or schedule.place_of(stage)[0] == rank:
                partly = new.kind == "full" and some is not None and some < size
                entries[stage] = replace(new, num_layers=some) if partly else new
        return replace(candidate, stages=tuple(layers), recompute=tuple(entries))

    def _other_outer(self, candidate: Candidate) -> Candidate:
        other = self.drawn()
        name = self.draw.choice(("mbs", "sp", "zero", "recompute", "cp_kind", "cp_order"))
        return replace(candidate, **{name: getattr(other, name)}) if self.draw.random() < 0.5 else other


def attack(request: Request, number: int, budget: tuple[int, int] = (DRAWN, CHANGED)) -> Finding:
    """Search, then look for a faster plan."""
    answer, adversary = search(request), Adversary.of(request, number)
    certificate, workload = answer.certificate, request.workload
    for _ in range(budget[0]):
        for _ in range(_TRIES):  # most candidates that are drawn blindly are refused
            if adversary.time_s(adversary.drawn()) < float("inf"):
                break
    starts = [*(plan.candidate for plan in answer.plans), *adversary.best(_STARTS)]
    for start in starts:
        climb(adversary, start, budget[1] // len(starts))
    least = min(adversary.times, key=adversary.times.__getitem__)
    sizes = f"{request.model.num_layers} layers of {request.model.hidden}, {request.model.num_experts} experts"
    return Finding(
        question=f"{number}: {sizes}, {request.cluster.num_nodes} x {request.cluster.name}, "
        f"seq {workload.seq_len}, batch {workload.global_batch}",
        value=certificate.value,
        bound=certificate.bound,
        least=adversary.times[least],
        candidate=str(least),
        num_priced=len(adversary.times),
    )


def climb(adversary: Adversary, start: Candidate, count: int) -> None:
    """Change a candidate as often as told, and go on from whatever is not slower."""
    here, time_s = start, adversary.time_s(start)
    for _ in range(count):
        other = adversary.changed(here)
        other_s = adversary.time_s(other)
        if other_s <= time_s:
            here, time_s = other, other_s


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
