"""Blocks to stages, stages to the schedule: time and memory of a step."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.predict import plan_cost
from autoshard.cost.stages import counts_of, most_kept
from autoshard.cost.step import StageLayers, step_cost
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import PipelineTimes, ideal_bubble, simulate
from tests.cost.cases import NO_WORK, ask, block, cost_of, pipeline, plan_of, priced, setting

EVERYONE = ("edp", "ep", "cp")


@st.composite
def chunked_schedules(draw):
    """Schedules of up to 24 stages, several a rank."""
    pp = draw(st.integers(1, 6))
    builder = draw(st.sampled_from(["interleaved", "zb_v"]))
    chunks = 2 if builder == "zb_v" else draw(st.integers(1, 4))
    count = pp * draw(st.integers(1, 8))
    return Schedule(builder=builder, num_ranks=pp, num_chunks=chunks, num_micro_batches=count)


def simulated(schedule, forward, backward):
    """How long the pipeline takes; stage s takes forward[s] and backward[s], and sends are free."""
    times = PipelineTimes(forward_s=tuple(forward), input_s=tuple(backward), weight_s=(0.0,) * len(forward))
    return simulate(schedule, times).makespan_s


class TestTime:
    @given(
        st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 20), st.integers(1, 4),
        st.integers(1, 50), st.integers(1, 50),
    )  # fmt: skip
    def test_of_equal_stages_is_that_of_the_schedule_simulated(self, builder, pp, extra, layers, forward, backward):
        schedule = Schedule(builder=builder, num_ranks=pp, num_micro_batches=pp + extra)
        cost = cost_of(pipeline(schedule, [layers] * pp), block(forward, backward))
        assert cost.time_s == pytest.approx(simulated(schedule, [layers * forward] * pp, [layers * backward] * pp))
        work = (pp + extra) * layers * (forward + backward)
        assert cost.seconds["compute"] == pytest.approx(work)
        assert cost.seconds["bubble"] / cost.time_s == pytest.approx(ideal_bubble(schedule))

    @given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 4), st.integers(1, 50), st.integers(1, 50))
    def test_of_chunks_is_that_of_the_schedule_simulated(self, pp, vp, rounds, forward, backward):
        schedule = Schedule(builder="interleaved", num_ranks=pp, num_chunks=vp, num_micro_batches=pp * rounds)
        cost = cost_of(pipeline(schedule, [1] * (pp * vp)), block(forward, backward))
        assert cost.time_s == pytest.approx(simulated(schedule, [forward] * pp * vp, [backward] * pp * vp))

    @settings(max_examples=100)
    @given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 20), st.integers(1, 5))
    def test_of_unequal_stages_is_that_of_the_schedule_simulated(self, counts, count, backward):
        schedule = Schedule(builder="1f1b", num_ranks=len(counts), num_micro_batches=count)
        cost = cost_of(pipeline(schedule, counts), block(1.0, backward))
        assert cost.time_s == pytest.approx(simulated(schedule, counts, [backward * size for size in counts]))
        assert cost.seconds["compute"] == pytest.approx(count * max(counts) * (1 + backward))

    @given(st.integers(2, 6), st.integers(0, 12), st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
    def test_of_zb_h1_waits_for_f_and_i_without_w(self, pp, extra, more_forward, more_input, weight):
        # Qi et al. 2023, arXiv:2401.10241, section 2.2: (pp - 1)(F + I - W), as long as W is the shortest
        schedule = Schedule(builder="zb_h1", num_ranks=pp, num_micro_batches=pp + extra)
        forward, inputs = weight + more_forward, weight + more_input
        seconds = {"F": {"compute": forward}, "I": {"compute": inputs}, "W": {"compute": weight}}
        cost = cost_of(pipeline(schedule, [1] * pp), block(seconds=seconds))
        assert cost.seconds["bubble"] == pytest.approx((pp - 1) * (forward + inputs - weight))
        assert cost.seconds["compute"] == pytest.approx((pp + extra) * (forward + inputs + weight))

    @pytest.mark.parametrize("builder", ["1f1b", "zb_h1"])
    def test_of_more_actions_than_are_simulated_goes_on_as_with_fewer(self, builder):
        times = []
        for count in (2000, 4000, 1_000_000):
            schedule = Schedule(builder=builder, num_ranks=4, num_micro_batches=count)
            times.append(cost_of(pipeline(schedule, [1, 2, 2, 1], send_s=0.25), block(1.0, 2.0)).time_s)
        assert times[2] - times[1] == pytest.approx((1_000_000 - 4000) / 2000 * (times[1] - times[0]), rel=1e-9)

    @pytest.mark.parametrize("hides", [True, False])
    def test_hidden_sends_are_waited_for_only_where_nothing_else_is_to_do(self, hides):
        schedule = Schedule(builder="gpipe", num_ranks=2, num_micro_batches=4)
        cost = cost_of(pipeline(schedule, [1, 1], send_s=0.5, hides=hides), block(1.0, 2.0), block(0.0, 0.0))
        # Work of the other rank on one micro-batch, 3, with the messages there and back. Sends that hold their rank are
        # its own on the first one's account (pp); the other one hands on a backward every 2.5, which the first takes 2.
        assert cost.seconds["pp"] == (0.0 if hides else 4 * 0.5)
        assert cost.seconds["bubble"] == pytest.approx(3.0 + 2 * 0.5 if hides else 3.0 + 0.5 + 3 * 0.5)

    def test_the_slowest_rank_gives_the_parts(self):
        schedule = Schedule(builder="1f1b", num_ranks=2, num_micro_batches=10)
        ends = block(0.0, 0.0, seconds={"F": {"tp": 3.0}, "I": {}, "W": {}})
        cost = cost_of(pipeline(schedule, [2, 1]), block(1.0, 2.0), ends)
        # Rank 0: two layers and the embedding, forward 5 and back 4; rank 1: one layer and the head, 4 and 2. Rank 0
        # waits from 10 to 11 for its first backward, and at the end 6 - 4 for its last one.
        assert (cost.seconds["compute"], cost.seconds["tp"], cost.seconds["bubble"]) == (60, 30, 3)

    def test_every_chunk_but_the_ends_is_sent_forward_and_backward(self):
        schedule = Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=4)
        run = pipeline(schedule, [1] * 4, send_s=0.5, boundary_bytes=100)
        cost = cost_of(run, block(1.0, 2.0))
        assert cost.seconds["pp"] == 4 * 3 * 0.5, "the loss goes nowhere, and nothing comes before the first stage"
        apart = cost_of(replace(run, sends=replace(run.sends, receives_apart=True)), block(1.0, 2.0))
        assert apart.seconds["pp"] == 4 * 3 * 2 * 0.5
        assert cost.sent_bytes["pp"] == 4 * 3 * 100

    def test_one_stage_sends_nothing_and_never_waits(self):
        schedule = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=4)
        cost = cost_of(pipeline(schedule, [3], send_s=0.5, boundary_bytes=100), block(1.0, 2.0))
        assert (cost.seconds["pp"], cost.seconds["bubble"]) == (0, 0)
        assert "pp" not in cost.sent_bytes
        assert cost.memory[0]["pipeline"] == 0


class TestDataParallelTraffic:
    """What of it hides behind passes, and what a step takes besides."""

    count, weights = 4, 10**9
    alone = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=count)

    def dp_s(self, kernels, zero, layer_s=0.0, num_ranks=1):
        question = ask(kernels=kernels)
        here = replace(setting(question, "tp=8,dp=16"), zero=zero)
        schedule = replace(self.alone, num_ranks=num_ranks)
        layer = block(layer_s / 3, 2 * layer_s / 3, weights={EVERYONE: self.weights})
        price = {"layer": layer, "embed": block(), "head": block()}
        run = pipeline(schedule, [1] * num_ranks)
        return float(step_cost(question, here, run, lambda kind, drop: price[kind]).seconds["dp"])

    @pytest.mark.parametrize(
        ("zero", "per_weight"),
        # An all-reduce of FP32 sums goes around twice; a scatter of them and a gather of bf16 weights once; ZeRO-3
        # scatters for each micro-batch and gathers forward and backward, block by block: embedding, layer and head.
        [(0, 2 * 4), (1, 4 + 2), (3, count * (4 + 2 * 2))],
    )
    def test_is_as_much_as_zero_sends(self, zero, per_weight):
        ring = setting(ask(kernels="te"), "tp=8,dp=16").rings[EVERYONE]
        hops = {0: 2, 1: 2, 3: 3 * self.count * 3}[zero]
        by_ring = 15 / 16 * per_weight * self.weights / ring.bandwidth_bytes_per_s + hops * ring.latency_s
        (route,) = ring.routes  # trn1 goes inside its nodes first where that is faster
        sent = min(by_ring, per_weight * self.weights * route.seconds_per_byte + hops * route.latency_s)
        assert self.dp_s("te", zero) == pytest.approx(sent)
        assert self.dp_s("te", zero, layer_s=100.0) == pytest.approx(sent), "te hides nothing"

    @pytest.mark.parametrize("zero", [0, 1])
    def test_of_zero_0_and_1_hides_behind_the_passes_of_one_micro_batch(self, zero):
        whole = self.dp_s("te", zero)
        for share in (0.0, 0.3, 0.9, 2.0):
            found = self.dp_s("mcore", zero, layer_s=share * whole)
            assert found == pytest.approx(max(0.0, whole - share * whole), abs=1e-9)

    def test_of_zero_3_hides_behind_the_passes_of_a_step(self):
        whole = self.dp_s("torch_cpu", 3)
        for share in (0.0, 0.1, 0.2, 0.5):
            found = self.dp_s("torch_compiled", 3, layer_s=share * whole)
            assert found == pytest.approx(max(0.0, whole - self.count * share * whole), abs=1e-9)
        # what a table says of units is not said of sums at the end, nor the other way round
        assert self.dp_s("torch_compiled", 1, layer_s=100.0) == pytest.approx(self.dp_s("te", 1))
        assert self.dp_s("mcore", 3, layer_s=100.0) == pytest.approx(self.dp_s("te", 3))

    def test_of_the_rank_that_shows_most_counts(self):
        question, here = ask(kernels="mcore"), replace(setting(ask(kernels="mcore"), "tp=8,dp=16"), zero=1)
        whole = self.dp_s("te", 1)
        # Two ranks with as many weights; the second has a head that takes time, so hides more of its traffic.
        price = {
            "layer": block(weights={EVERYONE: self.weights}),
            "embed": block(0.1 * whole, 0.2 * whole),
            "head": block(0.2 * whole, 0.4 * whole),
        }
        run = pipeline(Schedule(builder="1f1b", num_ranks=2, num_micro_batches=4), [1, 1])
        found = step_cost(question, here, run, lambda kind, drop: price[kind]).seconds["dp"]
        assert found == pytest.approx((1 - 0.3) * whole)

    @given(st.floats(0, 10))
    def test_a_step_takes_a_while_whatever_it_does(self, step_s):
        question = ask()
        question = replace(question, calibration=replace(question.calibration, step_s=step_s))
        here = setting(ask(), "tp=8,dp=16")
        cost = step_cost(question, here, pipeline(self.alone, [1]), lambda kind, drop: block(1.0, 2.0))
        assert cost.seconds["fixed"] == step_s
        assert cost.time_s == pytest.approx(self.count * 9.0 + step_s)

    def test_waiting_for_hosts_is_a_part_of_a_step(self):
        seconds = {"F": {"compute": 1.0, "waiting": 0.5}, "I": {"compute": 2.0, "waiting": 0.25}, "W": {}}
        cost = cost_of(pipeline(self.alone, [2]), block(seconds=seconds))
        assert (cost.seconds["compute"], cost.seconds["waiting"]) == (self.count * 6.0, self.count * 1.5)
        assert cost.time_s == self.count * 7.5


class TestMemory:
    def test_a_rank_keeps_its_layers_for_every_micro_batch_in_flight(self):
        schedule = Schedule(builder="1f1b", num_ranks=4, num_micro_batches=16)
        cost = cost_of(pipeline(schedule, [2, 2, 2, 2]), block(saved_bytes=10), block(saved_bytes=1))
        assert [parts["activations"] for parts in cost.memory] == [4 * 21, 3 * 20, 2 * 20, 1 * 20]
        assert [parts["logits"] for parts in cost.memory] == [0, 0, 0, 1]

    def test_a_message_is_received_ahead_from_either_side_and_what_was_sent_stays_until_its_backward(self):
        # nxd keeps outputs: each rank but the last one for every micro-batch in flight
        run = pipeline(Schedule(builder="1f1b", num_ranks=3, num_micro_batches=4), [1, 1, 1], boundary_bytes=100)
        assert [parts["pipeline"] for parts in cost_of(run, block()).memory] == [100 + 300, 200 + 200, 100]
        alone = pipeline(Schedule(builder="1f1b", num_ranks=1, num_micro_batches=4), [1], boundary_bytes=100)
        assert cost_of(alone, block()).memory[0]["pipeline"] == 0

    def test_with_chunks_all_ranks_receive_from_both_sides_but_no_more_than_one_ahead(self):
        schedule = Schedule(builder="interleaved", num_ranks=2, num_chunks=3, num_micro_batches=4)
        run = pipeline(schedule, [1] * 6, boundary_bytes=100)
        here = replace(setting(ask(), "tp=8,dp=16"), zero=1)
        cost = step_cost(ask(kernels="te"), here, run, lambda kind, drop: block())  # keeps no outputs
        assert [parts["pipeline"] for parts in cost.memory] == [200, 200]

    def test_buckets_take_room_where_the_framework_copies_into_them(self):
        run = pipeline(Schedule(builder="1f1b", num_ranks=1, num_micro_batches=4), [1], bucket_bytes=7)
        here = setting(ask(), "tp=8,dp=16")
        for kernels, zero, size in (("nxd", 0, 0), ("nxd", 1, 7), ("te", 1, 0)):
            cost = step_cost(ask(kernels=kernels), replace(here, zero=zero), run, lambda kind, drop: block())
            assert cost.memory[0]["buckets"] == size

    def test_zero_3_holds_whole_blocks_while_they_are_at_work(self):
        schedule = Schedule(builder="1f1b", num_ranks=1, num_micro_batches=4)
        ends = block(weights={EVERYONE: 5}, tied_weights={EVERYONE: 1})
        cost = cost_of(pipeline(schedule, [3], bucket_bytes=7), block(weights={EVERYONE: 100}), ends, zero=3)
        # two of the largest block in bf16 and its gradient in FP32
        assert (cost.memory[0]["buckets"], cost.memory[0]["gathered"]) == (7, 100 * (2 * 2 + 4))

    def parts_of(self, num_layers, builder: str = "1f1b", **price: object):
        """The parts of the memory of a single rank whose blocks are these."""
        run = pipeline(Schedule(builder=builder, num_ranks=1, num_micro_batches=1), [num_layers])
        found: dict = {"layer": block(), "embed": block(), "head": block(), **price}
        (parts,) = step_cost(ask(), setting(ask(), "tp=8,dp=16"), run, lambda kind, drop: found[kind]).memory
        return parts

    def test_the_largest_kernel_of_any_block_counts_with_what_its_layer_brings_back(self):
        parts = self.parts_of(4, layer=block(working_bytes=5, remade_bytes=20), embed=block(working_bytes=24))
        assert parts["working"] == 25

    def test_what_a_block_kept_is_free_when_the_one_before_it_runs_backward(self):
        price = {
            "layer": block(saved_bytes=10, working_bytes=5),
            "embed": block(working_bytes=24),
            "head": block(saved_bytes=2),
        }
        assert self.parts_of(2, "1f1b", **price)["working"] == 5 - 2
        # a split backward frees nothing before W
        assert self.parts_of(2, "zb_h1", **price)["working"] == 24

    def test_placeholders_stay_once_for_all_layers_and_all_chunks(self):
        parts = self.parts_of(4, layer=block(placeholder_bytes=10), head=block(placeholder_bytes=1))
        assert parts["placeholders"] == 11

    @given(chunked_schedules(), st.lists(st.integers(1, 9), min_size=24, max_size=24))
    def test_the_most_that_is_kept_is_the_peak_of_the_simulated_schedule(self, schedule, sizes):
        kept = tuple(map(float, sizes[: schedule.num_stages]))
        unit = (1.0,) * schedule.num_stages
        run = simulate(schedule, PipelineTimes(forward_s=unit, input_s=unit, weight_s=unit), kept)
        by_chunk = np.array(kept)[counts_of(schedule).stages][:, None, :, None]
        assert most_kept(schedule, by_chunk, by_chunk)[:, 0, 0].tolist() == [rank.peak for rank in run.ranks]

    @pytest.mark.parametrize(
        ("builder", "chunks", "waiting", "most"),
        [
            ("1f1b", 1, 5, [(3, 0), (2, 0), (1, 0)]),
            ("zb_h1", 1, 5, [(3, 0), (2, 1), (1, 2)]),
            ("zb_h1", 1, 50, [(2, 1), (1, 2), (0, 3)]),
            ("zb_v", 2, 5, [(6, 0), (6, 0), (6, 0)]),
        ],
    )
    def test_a_split_backward_keeps_until_w_what_that_reads(self, builder, chunks, waiting, most):
        schedule = Schedule(builder=builder, num_ranks=3, num_chunks=chunks, num_micro_batches=8)
        run = pipeline(schedule, [2] * 3 * chunks)
        cost = cost_of(run, block(saved_bytes=10, waiting_bytes=waiting))
        found = [parts["activations"] for parts in cost.memory]
        assert found == [2 * (10 * whole + waiting * left) for whole, left in most]


class TestWeights:
    def test_a_tied_table_counts_once_where_both_ends_are_on_one_rank(self):
        question = ask("gpt2-xl", "h100-80", 1, seq_len=1024, global_batch=64)
        parameters = question.model.num_parameters
        alone = plan_cost(plan_of(question, "tp=1,pp=1,dp=8"), question)
        assert alone.weights == (parameters,)
        split = plan_cost(plan_of(question, "tp=1,pp=2,dp=4"), question)
        assert sum(split.weights) == parameters + question.model.vocab * question.model.hidden

    def test_untied_tables_count_both(self):
        question = ask("llama3-8b", "h100-80", 1)
        for text in ("tp=1,pp=1,dp=8", "tp=1,pp=4,dp=2"):
            assert sum(plan_cost(plan_of(question, text), question).weights) == question.model.num_parameters

    def test_experts_are_spread_over_ep(self):
        question = ask("mixtral-8x7b", "h100-80", 1)
        (spread,) = plan_cost(plan_of(question, "tp=1,dp=8,ep=8"), question).weights
        experts = 32 * 8 * 3 * 4096 * 14336
        assert spread == question.model.num_parameters - experts * 7 // 8


def test_a_stage_splits_its_layers_by_kind_of_recompute():
    stage = StageLayers.of(5, Recompute.parse("full:2"), is_first=True, is_last=True)
    assert stage.contents() == [
        ("embed", NO_WORK, 1),
        ("layer", Recompute.parse("full"), 2),
        ("layer", NO_WORK, 3),
        ("head", NO_WORK, 1),
    ]


def test_a_step_is_made_of_its_blocks():
    question, text = ask(kernels="nxd"), "tp=8,pp=4,dp=4"
    cost = plan_cost(plan_of(question, text), question)
    layer, head = priced(question, text), priced(question, text, kind="head")
    slowest = 8 * layer.part_s("compute") + head.part_s("compute")
    assert cost.seconds["compute"] == pytest.approx(256 // 4 * slowest)
    assert (cost.memory[3]["activations"], cost.memory[3]["logits"]) == (
        8 * layer.memory.saved_bytes,
        head.memory.saved_bytes,
    )
    assert cost.memory[0]["activations"] == 4 * 8 * layer.memory.saved_bytes
