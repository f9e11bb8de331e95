"""States at rest, and the step phase."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.update import num_shards, per_weight, state_bytes, update_cost
from autoshard.spec.workload import Precision
from tests.cost.cases import EVERYONE, ask, setting, workload

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
        found = state_bytes({EVERYONE: count}, here(zero=zero), BF16)
        assert found == expected and num_shards(EVERYONE, here(zero=zero)) == (16 if zero else 1)
        assert state_bytes({EVERYONE: count}, here(zero=zero), replace(BF16, optimizer="sgd")) == {
            **expected,
            "optimizer": 0,
        }

    @given(WEIGHTS)
    def test_without_masters_the_weights_are_updated_themselves(self, count):
        parts = state_bytes({EVERYONE: count}, here(zero=0), FP32)
        assert parts == {"weights": 4 * count, "gradients": 4 * count, "masters": 0, "optimizer": 8 * count}
        assert state_bytes({EVERYONE: count}, here(zero=0), FP16)["masters"] == 4 * count

    @given(WEIGHTS, WEIGHTS)
    def test_weights_are_divided_over_the_ranks_that_hold_the_same_ones_whatever_else_they_await(self, some, others):
        moe = setting(ask("mixtral-8x7b", "h100-80", 2), "tp=1,dp=16,ep=4")
        parts = state_bytes({EVERYONE: some, ("edp", "cp"): others}, moe, BF16)
        assert parts["optimizer"] == 8 * (math.ceil(some / 16) + math.ceil(others / 4))
        apart = state_bytes({NORMS: some, EVERYONE: others}, here(), BF16)
        assert apart == state_bytes({EVERYONE: some + others}, here(), BF16)


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
