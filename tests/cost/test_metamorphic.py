"""What must not change for the worse when hardware gets better or work less, and closed forms of the axes.

Nothing here knows what a step takes: a fixed plan is priced twice, and the two are compared.
"""

import functools
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.calibration import EFFICIENCIES, SECONDS, uncalibrated
from autoshard.cost.predict import plan_cost
from autoshard.plan.build import build_plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import effective_names
from autoshard.schedule.schedule import Schedule
from autoshard.spec.kernels import kernels_names
from autoshard.spec.workload import Precision
from tests.cost.cases import ask, block, candidate_of, cost_of, pipeline
from tests.tabled import blocks_of

FEWER = settings(
    max_examples=min(settings().max_examples, 15)
)  # each prices a plan or more, which takes a while in all
BF16, FP8 = Precision.named("bf16"), replace(Precision.named("bf16"), products="fp8")
NXD, GPU = ("nxd", "nxd_core"), tuple(name for name in kernels_names() if not name.startswith("nxd"))
# Model, cluster, nodes, tables, formats, and layouts of every kind: each axis alone and together, ZeRO, schedules.
PLACES = {
    "trn1": ("llama3-8b", "trn1.32xlarge", 4, NXD, (BF16,), (
        "tp=8,dp=16", "tp=32,dp=4,mbs=2", "tp=8,pp=4,dp=4", "tp=8,pp=4,dp=4,vp=2,schedule=interleaved",
        "tp=32,pp=2,dp=2,recompute=full", "tp=8,cp=4,dp=4", "tp=8,pp=4,dp=4,recompute=selective[LlamaMLP]",
    )),
    "trn2": ("llama3-8b", "trn2.48xlarge", 2, NXD, (BF16, FP8), (
        "tp=16,dp=8", "tp=64,dp=2", "tp=4,pp=4,dp=8,recompute=full:2", "tp=32,pp=4,dp=1",
    )),
    "h100": ("llama3-8b", "h100-80", 2, GPU, (BF16, FP8), (
        "tp=8,dp=2,zero=1", "tp=1,dp=16,zero=3", "tp=2,pp=4,dp=2,vp=2,schedule=interleaved", "tp=4,pp=4,schedule=zb_h1",
        "tp=2,pp=2,vp=2,dp=4,schedule=zb_v", "tp=2,cp=4,dp=2,cp_order=zigzag", "tp=8,pp=2,recompute=full",
        "tp=1,pp=4,dp=4,schedule=gpipe,mbs=2", "tp=4,dp=4,zero=0",
    )),
    "experts": ("mixtral-8x7b", "h100-80", 2, GPU, (BF16, FP8), (
        "tp=2,ep=8,dp=8", "tp=4,pp=2,dp=2,ep=2", "tp=1,ep=4,dp=16",
    )),
    "a100": ("gpt2-xl", "a100-80", 2, GPU, (BF16,), (
        "tp=1,dp=16", "tp=1,pp=4,dp=4,recompute=full", "tp=1,pp=2,dp=8,zero=3",
    )),
}  # fmt: skip


PARTS = (
    "matrix.bf16", "matrix.fp8", "chip.vector_flops_per_s", "chip.memory_bandwidth_bytes_per_s",
    *(f"{kind}.{domain}" for kind in ("bandwidth", "latency") for domain in ("chip", "node", "cluster")),
)  # fmt: skip


@functools.cache
def asked(place, kernels, precision):
    name, cluster, nodes, _, _, _ = PLACES[place]
    seq_len = 1024 if name == "gpt2-xl" else 4096
    return ask(name, cluster, nodes, kernels=kernels, seq_len=seq_len, global_batch=64, precision=precision)


@functools.cache
def blocks(question, candidate):
    return blocks_of(question, candidate, question.cluster.engine)


def cost(question, candidate, like=None):
    """Price a plan as ``like`` (the same question, where it is asked of other hardware) cuts it."""
    plan = build_plan(candidate, question.model, question.cluster, question.workload, question.cluster.engine)
    return plan_cost(plan, question, blocks(like or question, candidate))


def seconds(question, candidate, like=None):
    return float(cost(question, candidate, like).time_s)


def no_more(after, before):
    """Not larger, but for rounding."""
    return after <= before * (1 + 1e-9)


@st.composite
def plans(draw):
    """A question with constants of any size, and a layout of it."""
    place = draw(st.sampled_from(sorted(PLACES)))
    _, _, _, tables, formats, texts = PLACES[place]
    question = asked(place, draw(st.sampled_from(tables)), draw(st.sampled_from(formats)))
    text = draw(st.sampled_from(texts))
    values = {name: draw(st.floats(0.05, 1)) for name in EFFICIENCIES}
    values |= {name: draw(st.floats(0, most)) for name, most in zip(SECONDS, (3e-5, 2e-4, 1), strict=True)}
    if question.kernels in NXD and "selective" in text:
        text = text.replace("LlamaMLP", draw(st.sampled_from(effective_names(question.kernels))))
    return replace(question, calibration=replace(uncalibrated(), **values)), candidate_of(question, text)


def quicker(question, part, factor):
    """The same question with one number of the hardware, or one constant, better."""
    cluster, constants = question.cluster, question.calibration
    chip = cluster.chip
    kind, _, name = part.partition(".")
    if not name:
        value = getattr(constants, part)
        better = value / factor if part in SECONDS else min(1.0, factor * value)
        return replace(question, calibration=replace(constants, **{part: better}))
    if kind in ("matrix", "chip"):
        rates = {**chip.matrix_flops_per_s, name: factor * chip.matrix_flops_per_s.get(name, 1.0)}
        change = {"matrix_flops_per_s": rates} if kind == "matrix" else {name: factor * getattr(chip, name)}
        return replace(question, cluster=replace(cluster, chip=replace(chip, **change)))
    field, power = ("bandwidth_bytes_per_s", 1) if kind == "bandwidth" else ("latency_s", -1)
    links = (
        replace(link, **{field: getattr(link, field) * factor**power}) if link.domain == name else link
        for link in cluster.links
    )
    return replace(question, cluster=replace(cluster, links=tuple(links)))


class TestBetterHardware:
    @pytest.mark.slow
    @settings(max_examples=min(settings().max_examples, 30))
    @given(plans(), st.sampled_from([*PARTS, *EFFICIENCIES, *SECONDS]), st.floats(1, 8))
    def test_a_faster_link_or_chip_or_constant_never_makes_a_step_longer(self, case, part, factor):
        question, candidate = case
        assert no_more(seconds(quicker(question, part, factor), candidate, question), seconds(question, candidate))

    @pytest.mark.slow
    @FEWER
    @given(plans(), st.floats(1.5, 8))
    def test_everything_as_much_faster_makes_a_step_as_much_shorter(self, case, factor):
        question, candidate = case
        better = question
        for part in (*PARTS, *SECONDS):  # no ultraserver is here: all links are among the parts
            if part != "matrix.fp8" or "fp8" in question.cluster.chip.matrix_flops_per_s:
                better = quicker(better, part, factor)
        assert seconds(better, candidate, question) * factor == pytest.approx(seconds(question, candidate), rel=1e-9)


class TestLessWork:
    @pytest.mark.slow
    @FEWER
    @given(plans(), st.integers(1, 6))
    def test_fewer_layers_never_make_a_step_longer_nor_fuller(self, case, fewer):
        question, candidate = case
        left = question.model.num_layers - fewer * candidate.num_stages
        if left >= candidate.num_stages:
            before = cost(question, candidate)
            after = cost(replace(question, model=replace(question.model, num_layers=left)), candidate)
            assert no_more(float(after.time_s), float(before.time_s))
            assert float(after.peak_bytes) <= float(before.peak_bytes)

    @pytest.mark.slow
    @FEWER
    @given(plans(), st.integers(1, 4), st.data())
    def test_recompute_takes_time_and_gives_back_activations(self, case, layers, data):
        question, candidate = case
        if candidate.schedule in ("zb_h1", "zb_v"):
            return  # engines refuse it with a split backward
        names = [data.draw(st.sampled_from(effective_names(question.kernels)))]
        most = question.model.num_layers // candidate.num_stages
        parts = ["none", *(f"full:{count}" for count in sorted({min(layers, most), min(layers + 1, most)})), "full"]
        kinds = [parts, ["none", f"selective[{names[0]}]", "full"]]
        if question.kernels == "nxd_core":  # see below
            kinds = [["selective[CoreAttention]", f"selective[{names[0]},CoreAttention]", "full"]]
        for texts in kinds:
            costs = [cost(question, replace(candidate, recompute=(Recompute.parse(one),)), question) for one in texts]
            for less, more in itertools.pairwise(costs):
                assert no_more(float(less.time_s), float(more.time_s))
                for before, after in zip(less.memory, more.memory, strict=True):
                    assert float(after["activations"]) <= float(before["activations"])

    @pytest.mark.parametrize(("memory", "saves"), [(0.1, True), (1.0, False)])
    def test_scores_alone_may_take_longer_to_move_than_to_make_again(self, memory, saves):
        # Dao et al. 2022, arXiv:2205.14135: why fused attention makes them again. NxD's own attention, run again by a
        # compiler piece by piece, is the only other one that need not move them, so it pays where memory is slow.
        constants = replace(uncalibrated(), **{**dict.fromkeys(EFFICIENCIES, 1.0), "memory_efficiency": memory})
        question = replace(asked("trn1", "nxd_core", BF16), calibration=constants)
        plain, again = (
            seconds(question, candidate_of(question, f"tp=8,dp=16,recompute={text}"))
            for text in ("none", "selective[CoreAttention]")
        )
        assert (again < plain) == saves

    @pytest.mark.slow
    @FEWER
    @given(plans())
    def test_half_of_the_micro_batches_take_no_longer(self, case):
        question, candidate = case
        workload = replace(question.workload, global_batch=question.workload.global_batch // 2)
        if not workload.global_batch // (candidate.dp * candidate.mbs) % candidate.pp:
            assert no_more(seconds(replace(question, workload=workload), candidate), seconds(question, candidate))


class TestInterleaving:
    """Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2."""

    def run(self, pp, chunks, rounds, **changes):
        """A pipeline with as many layers in all, whatever the chunks."""
        builder = "interleaved" if chunks > 1 else "1f1b"
        schedule = Schedule(builder=builder, num_ranks=pp, num_chunks=chunks, num_micro_batches=pp * rounds)
        return pipeline(schedule, [12 // chunks] * (pp * chunks), **changes)

    @given(st.integers(2, 6), st.sampled_from([2, 3, 4]), st.integers(2, 6))
    def test_keeps_activations_of_more_chunks_and_sends_once_for_every_chunk(self, pp, vp, rounds):
        # Korthikanti et al. 2022, arXiv:2205.05198, appendix B: L (1 + (p - 1) / (p m)) layers on the first rank.
        plain, chunked = (
            cost_of(self.run(pp, chunks, rounds, boundary_bytes=7), block(1.0, 2.0, saved_bytes=1.0))
            for chunks in (1, vp)
        )
        kept = [one.memory[0]["activations"] for one in (plain, chunked)]
        assert kept == pytest.approx([12 * pp, 12 * pp * (1 + (pp - 1) / (pp * vp))])
        for chunks, found in ((1, plain), (vp, chunked)):
            ends = [stage % pp for hop in range(chunks * pp - 1) for stage in (hop, hop + 1)]
            busiest = max(map(ends.count, range(pp)))  # of each hop one end sends forward, the other backward
            assert found.sent_bytes["pp"] == busiest * pp * rounds * 7


class TestZero:
    """Rajbhandari et al. 2020, arXiv:1910.02054: what every stage of ZeRO divides by the data-parallel ranks."""

    def test_what_it_sends_is_what_its_paper_counts(self):
        # Section 7: gradients and weights once each, as an all-reduce sends, 1.5 times that with weights twice.
        question = asked("h100", "torch_cuda", Precision.named("fp32"))
        one_batch = replace(question, workload=replace(question.workload, global_batch=16))
        sent = [
            float(cost(one_batch, candidate_of(question, f"tp=1,dp=16,zero={zero}")).sent_bytes["dp"])
            for zero in (0, 1, 3)
        ]
        whole = 2 * 15 / 16 * question.model.num_parameters * 4
        assert sent == pytest.approx([whole, whole, 1.5 * whole], rel=1e-6)
