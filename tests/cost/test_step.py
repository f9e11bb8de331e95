"""Blocks to stages, stages to the schedule, then the step phase: time and memory of a step."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.cost.predict import plan_cost
from autoshard.cost.setting import TP, boundary_bytes, handed_on
from autoshard.cost.step import step_cost
from autoshard.cost.update import HeldWeight, held_weights_s, num_shards, per_weight, stored_bytes, update_cost
from autoshard.layout.layout import Collective
from autoshard.schedule.counts import counts_of, most_kept
from autoshard.schedule.schedule import Schedule
from autoshard.schedule.simulate import PipelineTimes, simulate
from autoshard.spec.kernels import load_kernels
from autoshard.spec.workload import Precision
from tests.cost.cases import EVERYONE, ask, block, cost_of, pipeline, plan_of, priced, setting, workload
from tests.schedule.bubbles import ideal_bubble


def made(builder, num_ranks, num_micro_batches, num_chunks=1):
    return Schedule(builder=builder, num_ranks=num_ranks, num_micro_batches=num_micro_batches, num_chunks=num_chunks)


@st.composite
def chunked_schedules(draw):
    """Schedules of up to 24 stages, several a rank."""
    pp = draw(st.integers(1, 6))
    builder = draw(st.sampled_from(["interleaved", "zb_v"]))
    chunks = 2 if builder == "zb_v" else draw(st.integers(1, 4))
    return made(builder, pp, pp * draw(st.integers(1, 8)), chunks)


def simulated(schedule, forward, backward):
    """How long the pipeline takes; stage s takes forward[s] and backward[s], and sends are free."""
    times = PipelineTimes(forward_s=tuple(forward), input_s=tuple(backward), weight_s=(0.0,) * len(forward))
    return simulate(schedule, times).makespan_s


class TestTime:
    @given(
        st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(2, 6), st.integers(1, 4), st.integers(1, 4),
        st.integers(1, 50), st.integers(1, 50),
    )  # fmt: skip
    def test_of_equal_stages_is_that_of_the_schedule_simulated(self, builder, pp, rounds, layers, forward, backward):
        chunks = 2 if builder == "interleaved" else 1
        schedule = made(builder, pp, pp * rounds, chunks)
        cost = cost_of(pipeline(schedule, [layers] * pp * chunks), block(forward, backward))
        stages = ([layers * forward] * pp * chunks, [layers * backward] * pp * chunks)
        assert cost.time_s == pytest.approx(simulated(schedule, *stages))
        assert cost.seconds["compute"] == pytest.approx(pp * rounds * chunks * layers * (forward + backward))
        assert cost.seconds["bubble"] / cost.time_s == pytest.approx(ideal_bubble(schedule))

    @given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 20), st.integers(1, 5))
    def test_of_unequal_stages_is_that_of_the_schedule_simulated(self, counts, count, backward):
        schedule = made("1f1b", len(counts), count)
        cost = cost_of(pipeline(schedule, counts), block(1.0, backward))
        assert cost.time_s == pytest.approx(simulated(schedule, counts, [backward * size for size in counts]))
        assert cost.seconds["compute"] == pytest.approx(count * max(counts) * (1 + backward))

    @pytest.mark.parametrize("hides", [True, False])
    def test_hidden_sends_are_waited_for_only_where_nothing_else_is_to_do(self, hides):
        run = pipeline(made("gpipe", 2, 4), [1, 1], send_s=0.5, hides=hides)
        cost = cost_of(run, block(1.0, 2.0), block(0.0, 0.0))
        # Work of the other rank on one micro-batch, 3, with the messages there and back. Sends that hold their rank are
        # its own on the first one's account (pp); the other one hands on a backward every 2.5, which the first takes 2.
        assert cost.seconds["pp"] == (0.0 if hides else 4 * 0.5)
        assert cost.seconds["bubble"] == pytest.approx(3.0 + 2 * 0.5 if hides else 3.0 + 0.5 + 3 * 0.5)

    def test_the_slowest_rank_gives_the_parts(self):
        ends = block(seconds={"F": {"tp": 3.0}, "I": {"waiting": 0.5}, "W": {}})
        cost = cost_of(pipeline(made("1f1b", 2, 10), [2, 1]), block(1.0, 2.0), ends)
        # Rank 0: two layers and the embedding, forward 5 and back 4.5; rank 1: one layer and the head, 4 and 2.5. Rank
        # 0 waits from 10 to 11.5 for its first backward, and at the end 6.5 - 4.5 for its last one.
        assert [cost.seconds[part] for part in ("compute", "tp", "waiting")] == [60, 30, 5]
        assert cost.seconds["bubble"] == pytest.approx(3.5)

    def test_every_chunk_but_the_ends_is_sent_forward_and_backward(self):
        run = pipeline(made("interleaved", 2, 4, 2), [1] * 4, send_s=0.5, boundary_bytes=100)
        cost = cost_of(run, block(1.0, 2.0))
        assert cost.seconds["pp"] == 4 * 3 * 0.5, "the loss goes nowhere, and nothing comes before the first stage"
        apart = cost_of(replace(run, sends=replace(run.sends, receives_apart=True)), block(1.0, 2.0))
        assert apart.seconds["pp"] == 4 * 3 * 2 * 0.5
        assert cost.sent_bytes["pp"] == 4 * 3 * 100

    def test_one_stage_sends_nothing_and_never_waits(self):
        cost = cost_of(pipeline(made("1f1b", 1, 4), [3], send_s=0.5, boundary_bytes=100), block(1.0, 2.0))
        assert (cost.seconds["pp"], cost.seconds["bubble"], cost.memory[0]["pipeline"]) == (0, 0, 0)
        assert "pp" not in cost.sent_bytes

    @given(st.floats(0, 10))
    def test_a_step_takes_a_while_whatever_it_does(self, step_s):
        question = ask()
        slow = replace(question, calibration=replace(question.calibration, step_s=step_s))
        run = pipeline(made("1f1b", 1, 4), [1])
        cost = step_cost(slow, setting(question, "tp=8,dp=16"), run, lambda kind, drop: block(1.0, 2.0))
        assert (cost.seconds["fixed"], cost.time_s) == (step_s, pytest.approx(4 * 9.0 + step_s))


class TestDataParallelTraffic:
    """What of it hides behind passes."""

    count, weights = 4, 10**9

    def dp_s(self, kernels, zero, layer_s=0.0, price=None):
        """Seconds of dp where a layer takes so long; with other blocks a second rank holds as many weights."""
        ranks = 2 if price else 1
        layer = block(layer_s / 3, 2 * layer_s / 3, weights={EVERYONE: self.weights})
        run = pipeline(made("1f1b", ranks, self.count), [1] * ranks)
        return cost_of(run, layer, zero=zero, kernels=kernels, price=price).seconds["dp"]

    @pytest.mark.parametrize(
        ("zero", "kernels", "passes"), [(0, "mcore", 1), (1, "mcore", 1), (3, "torch_compiled", count)]
    )
    def test_hides_behind_the_passes_of_one_micro_batch_or_under_zero_3_of_a_step(self, zero, kernels, passes):
        whole = self.dp_s("te", zero)
        for share in (0.0, 0.1, 0.3, 0.9, 2.0):
            found = self.dp_s(kernels, zero, layer_s=share * whole)
            assert found == pytest.approx(max(0.0, whole - passes * share * whole), abs=1e-9)

    def test_what_a_table_says_of_units_is_not_said_of_sums_at_the_end_nor_the_other_way_round(self):
        assert self.dp_s("torch_compiled", 1, layer_s=100.0) == pytest.approx(self.dp_s("te", 1))
        assert self.dp_s("mcore", 3, layer_s=100.0) == pytest.approx(self.dp_s("te", 3))

    def test_of_the_rank_that_shows_most_counts(self):
        # Two ranks with as many weights; the second has a head that takes time, so hides more of its traffic.
        whole = self.dp_s("te", 1)
        ends = {"embed": block(0.1 * whole, 0.2 * whole), "head": block(0.2 * whole, 0.4 * whole)}
        assert self.dp_s("mcore", 1, price=ends) == pytest.approx((1 - 0.3) * whole)


class TestMemory:
    def test_a_rank_keeps_its_layers_for_every_micro_batch_in_flight(self):
        cost = cost_of(pipeline(made("1f1b", 4, 16), [2, 2, 2, 2]), block(saved_bytes=10), block(saved_bytes=1))
        assert [parts["activations"] for parts in cost.memory] == [4 * 21, 3 * 20, 2 * 20, 1 * 20]
        assert [parts["logits"] for parts in cost.memory] == [0, 0, 0, 1]
        chunks = cost_of(pipeline(made("interleaved", 4, 16, 2), [1] * 8), block(saved_bytes=10), block(saved_bytes=1))
        assert chunks.memory[3]["logits"] == 1, "the last chunk runs backward as soon as forward is done"

    @pytest.mark.parametrize(
        ("kernels", "schedule", "expected"),
        [
            # nxd keeps outputs: each rank but the last one for every micro-batch in flight
            ("nxd", made("1f1b", 3, 4), [100 + 300, 200 + 200, 100]),
            ("te", made("1f1b", 3, 4), [100, 200, 100]),
            # with chunks all ranks receive from both sides, but no more than one ahead
            ("te", made("interleaved", 2, 4, 3), [200, 200]),
        ],
    )
    def test_a_message_is_received_ahead_from_either_side(self, kernels, schedule, expected):
        run = pipeline(schedule, [1] * schedule.num_stages, boundary_bytes=100)
        assert [parts["pipeline"] for parts in cost_of(run, kernels=kernels).memory] == expected

    @pytest.mark.parametrize(("kernels", "zero", "size"), [("nxd", 0, 0), ("nxd", 1, 7), ("te", 1, 0)])
    def test_buckets_take_memory_where_the_framework_copies_into_them(self, kernels, zero, size):
        run = replace(pipeline(made("1f1b", 1, 4), [1]), bucket_bytes=7)
        assert cost_of(run, kernels=kernels, zero=zero).memory[0]["buckets"] == size

    @pytest.mark.parametrize(("kernels", "num_gradients"), [("nxd", 1), ("te", 2)])
    def test_zero_3_holds_whole_blocks_while_they_are_at_work(self, kernels, num_gradients):
        ends = block(weights={EVERYONE: 5}, tied_weights={EVERYONE: 1})
        cost = cost_of(pipeline(made("1f1b", 1, 4), [3]), block(weights={EVERYONE: 100}), ends, zero=3, kernels=kernels)
        # two of the largest block in bf16, and its gradient in FP32, twice where it is sent from its own memory
        assert cost.memory[0]["gathered"] == 100 * (2 * 2 + num_gradients * 4)

    @pytest.mark.parametrize(("kernels", "per_weight"), [("torch_cuda", 2 + 4), ("te", 0)])
    def test_in_a_pipeline_zero_3_keeps_its_stage_whole_where_a_framework_gathers_once(self, kernels, per_weight):
        layer, ends = block(weights={EVERYONE: 100}), block(weights={EVERYONE: 7})
        cost = cost_of(pipeline(made("1f1b", 2, 4), [3, 2]), layer, ends, zero=3, kernels=kernels)
        largest = 100 * (2 * 2 + 2 * 4)
        whole = [(3 * 100 + 7) * per_weight, (2 * 100 + 7) * per_weight]
        assert [parts["gathered"] for parts in cost.memory] == (whole if per_weight else [largest, largest])

    @pytest.mark.parametrize("kernels", ["te", "torch_cuda", "nxd", "torch_cuda"])
    def test_an_allocator_reserves_a_share_of_all_but_the_runtime(self, kernels):
        table = load_kernels(kernels)
        (parts,) = cost_of(pipeline(made("1f1b", 1, 4), [3]), block(saved_bytes=1e10), kernels=kernels).memory
        counted = sum(size for part, size in parts.items() if part not in ("reserved", "runtime"))
        assert parts.get("reserved", 0.0) == pytest.approx(table.reserved.share * counted if table.reserved else 0.0)
        assert parts["runtime"] == table.runtime_bytes

    @pytest.mark.parametrize(
        ("builder", "num_layers", "price", "part", "expected"),
        [
            # the largest kernel of any block counts, with what its layer brings back
            ("1f1b", 4, {"layer": {"working_bytes": 5, "remade_bytes": 20}, "embed": {"working_bytes": 24}},
             "working", 25),
            # what a block kept is free when the one before it runs backward; a split backward frees nothing before W
            *((builder, 2, {"layer": {"saved_bytes": 10, "working_bytes": 5}, "embed": {"working_bytes": 24},
                            "head": {"saved_bytes": 2}}, "working", most)
              for builder, most in (("1f1b", 5 - 2), ("zb_h1", 24))),
            # placeholders stay once for all layers
            ("1f1b", 4, {"layer": {"placeholder_bytes": 10}, "head": {"placeholder_bytes": 1}}, "placeholders", 11),
        ],
    )  # fmt: skip
    def test_the_fullest_moment_of_a_rank(self, builder, num_layers, price, part, expected):
        run = pipeline(made(builder, 1, 1), [num_layers])
        (parts,) = cost_of(run, price={kind: block(**sizes) for kind, sizes in price.items()}).memory
        assert parts[part] == expected

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
        run = pipeline(made(builder, 3, 8, chunks), [2] * 3 * chunks)
        cost = cost_of(run, block(saved_bytes=10, waiting_bytes=waiting))
        found = [parts["activations"] for parts in cost.memory]
        assert found == [2 * (10 * whole + waiting * left) for whole, left in most]


def test_ranks_hold_tied_tables_once_untied_ones_twice_and_experts_spread_over_ep():
    tied, own, moe = (ask(name, "h100-80", 1, seq_len=1024) for name in ("gpt2-xl", "llama3-8b", "mixtral-8x7b"))

    def weights(question, text):
        return sum(plan_cost(plan_of(question, text), question).weights)

    assert weights(tied, "tp=1,pp=1,dp=8") == tied.model.num_parameters
    assert weights(tied, "tp=1,pp=2,dp=4") == tied.model.num_parameters + tied.model.vocab * tied.model.hidden
    assert weights(own, "tp=1,pp=1,dp=8") == weights(own, "tp=1,pp=4,dp=2") == own.model.num_parameters
    experts = 32 * 8 * 3 * 4096 * 14336
    assert weights(moe, "tp=1,dp=8,ep=8") == moe.model.num_parameters - experts * 7 // 8


def test_a_step_is_made_of_its_blocks():
    question, text = ask(kernels="nxd"), "tp=8,pp=4,dp=4"
    cost = plan_cost(plan_of(question, text), question)
    layer, head = priced(question, text), priced(question, text, kind="head")
    slowest = 8 * layer.part_s("compute") + head.part_s("compute")
    assert cost.seconds["compute"] == pytest.approx(256 // 4 * slowest)
    kept = layer.memory.saved_bytes
    assert (cost.memory[3]["activations"], cost.memory[3]["logits"]) == (8 * kept, head.memory.saved_bytes)
    assert cost.memory[0]["activations"] == 4 * 8 * kept
    full, mixed = (plan_cost(plan_of(question, f"{text},recompute={drop}"), question) for drop in ("full", "full:3"))
    again = priced(question, text, drop="full").memory
    assert mixed.memory[0]["activations"] == 4 * (3 * again.saved_bytes + 5 * kept)
    assert full.memory[0]["working"] >= again.remade_bytes, "all that it dropped is there while it runs backward"


BF16, FP16, FP32 = (workload(precision=Precision.named(name)) for name in ("bf16", "fp16", "fp32"))
WEIGHTS = st.integers(1, 10**11)
TEXT = "tp=8,dp=4,cp=4"
NORMS = (*EVERYONE, "kv", "rep")  # what sums of their gradients await


def here(text=TEXT, zero=1, question=None):
    return replace(setting(question or ask(), text), zero=zero)


class TestStates:
    @pytest.mark.parametrize(("zero", "divided"), [(0, ""), (1, "masters optimizer"), (3, "gradients")])
    @given(count=WEIGHTS)
    def test_zero_divides_the_optimizer_over_dp_and_cp_and_zero_3_all(self, zero, divided, count):
        share = math.ceil(count / 16)
        one, rest = share if zero == 3 else count, share if divided else count
        expected = {"weights": 2 * one, "gradients": 4 * one, "masters": 4 * rest, "optimizer": 8 * rest}
        found = stored_bytes({EVERYONE: count}, here(zero=zero), BF16)
        assert found == expected and num_shards(EVERYONE, here(zero=zero)) == (16 if zero else 1)
        assert stored_bytes({EVERYONE: count}, here(zero=zero), replace(BF16, optimizer="sgd")) == {
            **expected,
            "optimizer": 0,
        }

    @given(WEIGHTS)
    def test_without_masters_the_weights_are_updated_themselves(self, count):
        parts = stored_bytes({EVERYONE: count}, here(zero=0), FP32)
        assert parts == {"weights": 4 * count, "gradients": 4 * count, "masters": 0, "optimizer": 8 * count}
        assert stored_bytes({EVERYONE: count}, here(zero=0), FP16)["masters"] == 4 * count

    @given(WEIGHTS, WEIGHTS)
    def test_weights_are_divided_over_the_ranks_that_hold_the_same_ones_whatever_else_they_await(self, some, others):
        moe = setting(ask("mixtral-8x7b", "h100-80", 2), "tp=1,dp=16,ep=4")
        parts = stored_bytes({EVERYONE: some, ("edp", "cp"): others}, moe, BF16)
        assert parts["optimizer"] == 8 * (math.ceil(some / 16) + math.ceil(others / 4))
        apart = stored_bytes({NORMS: some, EVERYONE: others}, here(), BF16)
        assert apart == stored_bytes({EVERYONE: some + others}, here(), BF16)


def test_a_program_may_take_longer_for_each_rank_over_which_zero_divides():
    question = ask()
    slow = replace(question, calibration=replace(question.calibration, shard_s=1e-3))
    for zero, others in ((0, 0), (1, 15), (3, 15)):
        once, later = (
            update_cost({EVERYONE: 10**6}, here(zero=zero, question=one), one, 0.0, 8, 5).seconds["dp"]
            for one in (question, slow)
        )
        assert later - once == pytest.approx(others * 1e-3)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_program_may_take_longer_than_links_say_for_what_data_parallelism_sends(zero):
    question = ask()
    slow = replace(question, calibration=replace(question.calibration, dp_ratio=2.0))
    once, twice = (
        update_cost({EVERYONE: 10**6}, here(zero=zero, question=one), one, 0.0, 8, 5).seconds
        for one in (question, slow)
    )
    assert twice["dp"] == pytest.approx(2 * once["dp"]) and once["dp"] > 0
    assert (twice["tp"], twice["update"]) == (once["tp"], once["update"])


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_block_that_is_reported_alone_takes_as_much_longer_for_its_weights(in_pieces):
    rings = setting(ask(), "tp=8,dp=16").rings
    weights = 1e9 * np.ones(1)
    held = HeldWeight(weight_bytes=weights, gradient_bytes=weights, shared=EVERYONE, summed=(), in_pieces=in_pieces)
    once, twice = (held_weights_s([held], rings, load_kernels("nxd"), 0.0, 4, ratio) for ratio in (1.0, 2.0))
    assert twice == pytest.approx(2 * once) and once > 0


def test_where_a_program_sends_parts_each_rank_of_tp_sends_its_own_and_the_next_stage_gathers_them():
    text, te, parts = "tp=8,pp=4,dp=1,mbs=2", load_kernels("te"), load_kernels("megatron")
    question = ask(kernels="megatron", cluster_name="a100-80", nodes=4)
    for sp, cut in (("", 1), (",sp=false", 8)):
        split = setting(question, text + sp)
        whole_s, whole = handed_on(split, te)
        seconds, share = handed_on(split, parts)
        assert (whole, share) == (1, 1 / cut)
        size, gather = boundary_bytes(split), Collective(kind="all_gather", dim=None, atoms=TP)
        gathers_s = split.rings[TP].time_s(gather, size) if cut > 1 else 0.0
        assert seconds == pytest.approx(split.rings["pp",].send_s(size / cut) + gathers_s) and seconds <= whole_s


def test_hosts_take_their_time_for_each_layer_each_way():
    question = ask(kernels="te", cluster_name="h100-80", nodes=4)
    host = replace(question.rates, host_computes=True)
    for drop, ways in (("none", 2), ("full", 3)):
        plain, slow = (
            priced(question, "tp=8,pp=1,dp=4", drop=drop, rates=replace(host, layer_s=layer_s)).part_s("waiting")
            for layer_s in (0.0, 1e-2)
        )
        assert slow - plain == pytest.approx(ways * 1e-2), "forward, backward, and forward again"


class TestTraffic:
    count, micro_batches, blocks = 10**6, 8, 5

    def cost(self, zero, pending=EVERYONE, question=None):
        question = question or ask()
        found = here(zero=zero, question=question)
        return update_cost({pending: self.count}, found, question, 0.0, self.micro_batches, self.blocks)

    @pytest.mark.parametrize(
        ("zero", "per_weight", "starts"),
        # Gradients are summed everywhere; or scattered, and weights gathered, under ZeRO-3 once and twice for every
        # micro-batch, and a message for each block.
        [(0, 2 * 4, 1), (1, 4 + 2, 2), (3, 8 * (4 + 2 * 2), 3 * 8 * 5)],
    )
    def test_is_what_zero_sends_and_starts(self, zero, per_weight, starts):
        found = self.cost(zero)
        assert found.sent_bytes == {"dp": pytest.approx(per_weight * self.count * 15 / 16)}
        slow = replace(ask(), calibration=replace(ask().calibration, collective_s=1e-3))
        later = self.cost(zero, question=slow)
        assert later.seconds["dp"] - found.seconds["dp"] == pytest.approx(starts * 1e-3)

    def test_what_awaits_tp_is_summed_over_tp_once_a_step(self):
        for zero, pieces in ((0, 1), (1, 1), (3, 16)):  # under ZeRO-3 each rank has but a piece of the sum by then
            sent = self.cost(zero, NORMS).sent_bytes
            assert sent["tp"] == pytest.approx(2 * 4 * self.count / pieces * 7 / 8)
            assert sent["dp"] == self.cost(zero).sent_bytes["dp"]

    def test_weights_that_await_the_same_ranks_travel_as_one_and_take_what_the_rings_say(self):
        now, half = here(), self.count // 2
        together = update_cost({EVERYONE: half, NORMS: half}, now, ask(), 0.0, 1, 1)
        cost = update_cost({EVERYONE: self.count}, now, ask(), 0.0, 1, 1)
        assert together.seconds["dp"] == pytest.approx(cost.seconds["dp"])
        ring = now.rings[EVERYONE]
        by_ring = cost.sent_bytes["dp"] / ring.bandwidth_bytes_per_s + 2 * ring.latency_s
        (route,) = ring.routes
        both_ways = cost.sent_bytes["dp"] * ring.size / (ring.size - 1)
        by_nodes = both_ways * route.seconds_per_byte + 2 * route.latency_s
        assert cost.seconds["dp"] == pytest.approx(min(by_ring, by_nodes))
        assert cost.seconds["tp"] == 0


class TestUpdate:
    def test_a_weight_is_updated_by_its_share_of_the_work(self):
        # Traffic: gradient read for the norm; master, two moments (SGD has none) and gradient read, the others written;
        # master read, weight written. Arithmetic: norm 2, AdamW 15 or SGD 2, cast 1.
        assert per_weight(ask().step) == pytest.approx((18, 4 + 4 * 4 + 3 * 4 + 4 + 2), rel=1e-4)
        assert per_weight(ask(optimizer="sgd").step) == pytest.approx((5, 4 + 2 * 4 + 4 + 4 + 2), rel=1e-4)

    def test_it_takes_the_longer_of_arithmetic_and_memory_and_shards_divide_it(self):
        question = ask()
        flops, traffic_bytes = per_weight(question.step)
        whole_s = 1600 * max(
            flops / question.rates.vector_flops_per_s, traffic_bytes / question.rates.memory_bytes_per_s
        )
        for zero, shards in ((0, 1), (1, 16), (3, 16)):
            found = update_cost({EVERYONE: 1600}, here(zero=zero), question, 0.0, 1, 1).seconds["update"]
            assert found == pytest.approx(whole_s / shards)
