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
from autoshard.spec.workload import DTYPE_BYTES, Precision
from tests.cost.cases import ask, block, candidate_of, cost_of, pipeline, priced
from tests.tabled import blocks_of

FEWER = settings(max_examples=35)  # each prices a plan or more, which takes a while in all
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
    "experts": ("mixtral-8x7b", "h100-80", 2, GPU, (BF16,), (
        "tp=2,ep=8,dp=8", "tp=4,pp=2,dp=2,ep=2", "tp=1,ep=4,dp=16",
    )),
    "a100": ("gpt2-xl", "a100-80", 2, GPU, (BF16,), (
        "tp=1,dp=16", "tp=1,pp=4,dp=4,recompute=full", "tp=1,pp=2,dp=8,zero=3",
    )),
}  # fmt: skip


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
    shares = {name: draw(st.floats(0.05, 1)) for name in EFFICIENCIES}
    times = {"launch_s": draw(st.floats(0, 3e-5)), "collective_s": draw(st.floats(0, 2e-4)),
             "step_s": draw(st.floats(0, 1))}  # fmt: skip
    constants = replace(uncalibrated(), **{**shares, **times})
    if question.kernels in NXD and "selective" in text:
        text = text.replace("LlamaMLP", draw(st.sampled_from(effective_names(question.kernels))))
    return replace(question, calibration=constants), candidate_of(question, text)


def quicker(cluster, part, factor):
    """The same cluster with one number better."""
    chip = cluster.chip
    kind, _, name = part.partition(".")
    if kind == "matrix":
        rates = {**chip.matrix_flops_per_s, name: factor * chip.matrix_flops_per_s.get(name, 1.0)}
        return replace(cluster, chip=replace(chip, matrix_flops_per_s=rates))
    if kind == "chip":
        return replace(cluster, chip=replace(chip, **{name: factor * getattr(chip, name)}))
    links = tuple(
        replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * (factor if kind == "bandwidth" else 1),
            latency_s=link.latency_s / (factor if kind == "latency" else 1),
        )
        if link.domain == name
        else link
        for link in cluster.links
    )
    return replace(cluster, links=links)


PARTS = (
    "matrix.bf16", "matrix.fp8", "chip.vector_flops_per_s", "chip.memory_bandwidth_bytes_per_s",
    *(f"{kind}.{domain}" for kind in ("bandwidth", "latency") for domain in ("chip", "node", "cluster")),
)  # fmt: skip


class TestBetterHardware:
    @FEWER
    @given(plans(), st.sampled_from(PARTS), st.floats(1, 8))
    def test_a_faster_link_or_chip_never_makes_a_step_longer(self, case, part, factor):
        question, candidate = case
        better = replace(question, cluster=quicker(question.cluster, part, factor))
        assert no_more(seconds(better, candidate, question), seconds(question, candidate))

    @FEWER
    @given(plans(), st.sampled_from(EFFICIENCIES), st.floats(1, 8))
    def test_a_higher_efficiency_never_makes_a_step_longer(self, case, name, factor):
        question, candidate = case
        constants = question.calibration
        better = replace(constants, **{name: min(1.0, factor * getattr(constants, name))})
        assert no_more(seconds(replace(question, calibration=better), candidate, question), seconds(*case))

    @FEWER
    @given(plans(), st.sampled_from(SECONDS), st.floats(0, 1))
    def test_less_to_wait_for_never_makes_a_step_longer(self, case, name, share):
        question, candidate = case
        constants = question.calibration
        better = replace(constants, **{name: share * getattr(constants, name)})
        assert no_more(seconds(replace(question, calibration=better), candidate, question), seconds(*case))

    @FEWER
    @given(plans(), st.floats(1.5, 8))
    def test_everything_as_much_faster_makes_a_step_as_much_shorter(self, case, factor):
        question, candidate = case
        cluster, constants = question.cluster, question.calibration
        for part in PARTS:
            if part != "matrix.fp8" or "fp8" in cluster.chip.matrix_flops_per_s:
                cluster = quicker(cluster, part, factor)
        times = {name: getattr(constants, name) / factor for name in SECONDS}
        better = replace(question, cluster=cluster, calibration=replace(constants, **times))
        # (no ultraserver here: all links are among the parts)
        assert seconds(better, candidate, question) * factor == pytest.approx(seconds(question, candidate), rel=1e-9)


class TestLessWork:
    @FEWER
    @given(plans(), st.integers(1, 6))
    def test_fewer_layers_never_make_a_step_longer_nor_fuller(self, case, fewer):
        question, candidate = case
        left = question.model.num_layers - fewer * candidate.pp * candidate.vp
        if left < candidate.pp * candidate.vp:
            return
        smaller = replace(question, model=replace(question.model, num_layers=left))
        before, after = cost(question, candidate), cost(smaller, candidate)
        assert no_more(float(after.time_s), float(before.time_s))
        assert float(after.peak_bytes) <= float(before.peak_bytes)

    @FEWER
    @given(plans(), st.data())
    def test_recompute_takes_time_and_gives_back_activations(self, case, data):
        question, candidate = case
        if candidate.schedule in ("zb_h1", "zb_v"):
            return  # engines refuse it with a split backward
        names = [data.draw(st.sampled_from(effective_names(question.kernels)))]
        first = "none"
        if question.kernels == "nxd_core":  # see below
            names, first = [*names, "CoreAttention"], "selective[CoreAttention]"
        texts = (first, f"selective[{','.join(names)}]", "full")
        costs = [cost(question, replace(candidate, recompute=(Recompute.parse(text),)), question) for text in texts]
        for less, more in itertools.pairwise(costs):
            assert no_more(float(less.time_s), float(more.time_s))
            for before, after in zip(less.memory, more.memory, strict=True):
                assert float(after["activations"]) <= float(before["activations"])

    @FEWER
    @given(plans(), st.integers(1, 4))
    def test_full_recompute_of_more_layers_lies_between_none_and_all(self, case, layers):
        question, candidate = case
        if candidate.schedule in ("zb_h1", "zb_v") or question.kernels == "nxd_core":
            return
        most = question.model.num_layers // candidate.num_stages
        texts = ["none", *(f"full:{count}" for count in sorted({min(layers, most), min(layers + 1, most)})), "full"]
        costs = [cost(question, replace(candidate, recompute=(Recompute.parse(text),)), question) for text in texts]
        times = [float(one.time_s) for one in costs]
        assert all(no_more(less, more) for less, more in itertools.pairwise(times))

    @pytest.mark.parametrize(("memory", "saves"), [(0.1, True), (1.0, False)])
    def test_scores_alone_may_take_longer_to_move_than_to_make_again(self, memory, saves):
        # Dao et al. 2022, arXiv:2205.14135: why fused attention makes them again. NxD's own attention, run again by a
        # compiler piece by piece, is the only other one that need not move them, so it pays where memory is slow.
        question = asked("trn1", "nxd_core", BF16)
        constants = replace(uncalibrated(), **{**dict.fromkeys(EFFICIENCIES, 1.0), "memory_efficiency": memory})
        question = replace(question, calibration=constants)
        plain, again = (
            seconds(question, candidate_of(question, f"tp=8,dp=16,recompute={text}"))
            for text in ("none", "selective[CoreAttention]")
        )
        assert (again < plain) == saves

    @FEWER
    @given(plans())
    def test_half_of_the_micro_batches_take_no_longer(self, case):
        question, candidate = case
        workload = replace(question.workload, global_batch=question.workload.global_batch // 2)
        count = workload.global_batch // (candidate.dp * candidate.mbs)
        if count % candidate.pp:
            return
        smaller = replace(question, workload=workload)
        assert no_more(seconds(smaller, candidate), seconds(question, candidate))


class TestInterleaving:
    """Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2."""

    @given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
    def test_divides_the_bubble_by_the_number_of_chunks(self, pp, vp, rounds, forward, backward):
        builder = "interleaved" if vp > 1 else "1f1b"
        schedule = Schedule(builder=builder, num_ranks=pp, num_chunks=vp, num_micro_batches=pp * rounds)
        # as many layers in all, whatever the chunks
        found = cost_of(pipeline(schedule, [12 // vp] * (pp * vp)), block(forward, backward))
        work = pp * rounds * 12 * (forward + backward)
        assert found.seconds["compute"] == pytest.approx(work)
        assert found.seconds["bubble"] == pytest.approx(work * (pp - 1) / (pp * rounds * vp))

    @given(st.integers(2, 6), st.sampled_from([2, 3, 4]), st.integers(2, 6))
    def test_keeps_activations_of_more_chunks(self, pp, vp, rounds):
        # Korthikanti et al. 2022, arXiv:2205.05198, appendix B: L (1 + (p - 1) / (p m)) layers on the first rank.
        kept = []
        for chunks in (1, vp):
            builder = "interleaved" if chunks > 1 else "1f1b"
            schedule = Schedule(builder=builder, num_ranks=pp, num_chunks=chunks, num_micro_batches=pp * rounds)
            run = pipeline(schedule, [12 // chunks] * (pp * chunks))
            kept.append(cost_of(run, block(1.0, 2.0, saved_bytes=1.0)).memory[0]["activations"])
        layers = 12 * pp
        assert kept == pytest.approx([layers, layers * (1 + (pp - 1) / (pp * vp))])

    @given(st.integers(2, 6), st.sampled_from([2, 3, 4]), st.integers(1, 4))
    def test_sends_once_for_every_chunk(self, pp, vp, rounds):
        for chunks in (1, vp):
            builder = "interleaved" if chunks > 1 else "1f1b"
            schedule = Schedule(builder=builder, num_ranks=pp, num_chunks=chunks, num_micro_batches=pp * rounds)
            run = pipeline(schedule, [12 // chunks] * (pp * chunks), boundary_bytes=7)
            ends = [stage % pp for hop in range(chunks * pp - 1) for stage in (hop, hop + 1)]
            busiest = max(map(ends.count, range(pp)))  # of each hop one end sends forward, the other backward
            assert cost_of(run, block()).sent_bytes["pp"] == busiest * pp * rounds * 7


class TestZero:
    """Rajbhandari et al. 2020, arXiv:1910.02054: what every stage of ZeRO divides by the data-parallel ranks."""

    @pytest.mark.parametrize("precision", [BF16, Precision.named("fp32"), FP8], ids=["bf16", "fp32", "fp8"])
    @pytest.mark.parametrize("zero", [0, 1, 3])
    @pytest.mark.parametrize("text", ["tp=1,dp=16", "tp=1,cp=2,dp=8"])
    def test_states_are_divided_by_the_ranks_that_have_the_same_weights(self, text, zero, precision):
        question = asked("h100", "torch_cuda", precision)
        found = cost(question, candidate_of(question, f"{text},zero={zero}")).memory[0]
        count, weight = question.model.num_parameters, DTYPE_BYTES[precision.weights]
        states = count if zero == 3 else 16 * count
        shards = count if zero else 16 * count
        expected = {
            "weights": states * weight,
            "gradients": states * 4,
            "masters": shards * 4 if precision.masters else 0,
            "optimizer": shards * 8,
        }
        assert {name: 16 * found[name] for name in expected} == pytest.approx(expected, rel=1e-7)

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


class TestContextParallelism:
    @pytest.mark.parametrize("kernels", ["te", "torch_cuda", "mcore", "nxd"])
    @pytest.mark.parametrize("cp", [2, 4])
    @pytest.mark.parametrize("kind", ["layer", "head"])
    def test_divides_what_is_kept_of_a_block_by_cp(self, kernels, cp, kind):
        question = ask(kernels=kernels)
        alone, cut = (priced(question, f"tp=8,cp={size},dp={16 // size}", kind) for size in (1, cp))
        assert cut.memory.saved_bytes * cp == alone.memory.saved_bytes
        assert sum(cut.memory.weights.values()) == sum(alone.memory.weights.values())

    @pytest.mark.parametrize("cp", [2, 4])
    def test_divides_products_by_cp_and_in_zigzag_order_attention_too(self, cp):
        question = ask(kernels="te")
        quick = replace(question.rates, memory_bytes_per_s=1e30, vector_flops_per_s=1e30, launch_s=0.0)
        alone, contiguous, zigzag = (
            priced(question, text, rates=quick).part_s("compute")
            for text in ("tp=8", f"tp=8,cp={cp},dp={16 // cp}", f"tp=8,cp={cp},dp={16 // cp},cp_order=zigzag")
        )
        assert zigzag * cp == pytest.approx(alone)
        assert contiguous * cp > alone
