"""States at rest, and the step phase."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.update import num_shards, per_weight, state_bytes, update_cost
from autoshard.plan.lowering import split_pending
from autoshard.spec.workload import Precision
from tests.cost.cases import ask, setting, workload

BF16, FP16, FP32 = (workload(precision=Precision.named(name)) for name in ("bf16", "fp16", "fp32"))
EVERYONE = ("edp", "ep", "cp")
WEIGHTS = st.integers(1, 10**11)


TEXT = "tp=8,dp=4,cp=4"


def here(text=TEXT, zero=1):
    return replace(setting(ask(), text), zero=zero)


class TestStates:
    @given(WEIGHTS)
    def test_zero_0_keeps_everything_everywhere(self, count):
        parts = state_bytes({EVERYONE: count}, here(zero=0), BF16)
        assert parts == {"weights": 2 * count, "gradients": 4 * count, "masters": 4 * count, "optimizer": 8 * count}

    @given(WEIGHTS)
    def test_zero_1_divides_the_optimizer_over_dp_and_cp(self, count):
        parts = state_bytes({EVERYONE: count}, here(), BF16)
        share = math.ceil(count / 16)
        assert parts == {"weights": 2 * count, "gradients": 4 * count, "masters": 4 * share, "optimizer": 8 * share}

    @given(WEIGHTS)
    def test_zero_3_divides_all(self, count):
        parts = state_bytes({EVERYONE: count}, here(zero=3), BF16)
        share = math.ceil(count / 16)
        assert parts == {"weights": 2 * share, "gradients": 4 * share, "masters": 4 * share, "optimizer": 8 * share}

    @given(WEIGHTS)
    def test_without_masters_the_weights_are_updated_themselves(self, count):
        parts = state_bytes({EVERYONE: count}, here(zero=0), FP32)
        assert parts == {"weights": 4 * count, "gradients": 4 * count, "masters": 0, "optimizer": 8 * count}
        assert state_bytes({EVERYONE: count}, here(zero=0), FP16)["masters"] == 4 * count

    @given(WEIGHTS)
    def test_sgd_keeps_no_moments(self, count):
        for one in (BF16, FP32):
            parts = state_bytes({EVERYONE: count}, here(), one)
            assert state_bytes({EVERYONE: count}, here(), replace(one, optimizer="sgd")) == {**parts, "optimizer": 0}

    @given(WEIGHTS, WEIGHTS)
    def test_weights_of_experts_are_divided_over_the_ranks_that_hold_the_same_ones(self, dense, experts):
        question = ask("mixtral-8x7b", "h100-80", 2)
        moe = setting(question, "tp=1,dp=16,ep=4")
        parts = state_bytes({EVERYONE: dense, ("edp", "cp"): experts}, moe, BF16)
        assert parts["optimizer"] == 8 * (math.ceil(dense / 16) + math.ceil(experts / 4))

    @given(WEIGHTS, WEIGHTS)
    def test_what_also_awaits_tp_lies_with_the_rest(self, norms, others):
        apart = state_bytes({(*EVERYONE, "kv", "rep"): norms, EVERYONE: others}, here(), BF16)
        assert apart == state_bytes({EVERYONE: norms + others}, here(), BF16)
        assert (num_shards(EVERYONE, here()), num_shards(EVERYONE, here(zero=0))) == (16, 1)
        assert split_pending(("edp", "cp")) == (("edp", "cp"), ())


class TestTraffic:
    count, micro_batches = 10**6, 8

    def sent(self, zero, pending=EVERYONE):
        cost = update_cost({pending: self.count}, here(zero=zero), ask(), self.micro_batches, 5)
        return cost.sent_bytes

    def test_zero_0_sums_gradients_everywhere(self):
        assert self.sent(0) == {"dp": pytest.approx(2 * 4 * self.count * 15 / 16)}

    def test_zero_1_scatters_gradients_and_gathers_weights(self):
        assert self.sent(1) == {"dp": pytest.approx((4 + 2) * self.count * 15 / 16)}

    def test_zero_3_scatters_once_and_gathers_twice_every_micro_batch(self):
        assert self.sent(3) == {"dp": pytest.approx(8 * (4 + 2 * 2) * self.count * 15 / 16)}

    def test_zero_3_starts_a_gather_and_a_sum_for_every_block_and_the_others_once(self):
        slow = replace(ask(), calibration=replace(ask().calibration, collective_s=1e-3))
        for zero, starts in ((0, 1), (1, 2), (3, 3 * 8 * 5)):
            both = [
                update_cost({EVERYONE: self.count}, one, ask(), self.micro_batches, 5)
                for one in (here(zero=zero), replace(setting(slow, TEXT), zero=zero))
            ]
            assert both[1].seconds["dp"] - both[0].seconds["dp"] == pytest.approx(starts * 1e-3)

    def test_what_awaits_tp_is_summed_over_tp_once_a_step(self):
        for zero, pieces in ((0, 1), (1, 1), (3, 16)):  # under ZeRO-3 each rank has but a piece of the sum by then
            sent = self.sent(zero, (*EVERYONE, "kv", "rep"))
            assert sent["tp"] == pytest.approx(2 * 4 * self.count / pieces * 7 / 8)
            assert sent["dp"] == self.sent(zero)["dp"]

    def test_weights_that_await_the_same_ranks_travel_as_one(self):
        together = {EVERYONE: self.count // 2, (*EVERYONE, "kv", "rep"): self.count // 2}
        cost = update_cost(together, here("tp=8"), ask(), 1, 1)
        alone = update_cost({EVERYONE: self.count}, here("tp=8"), ask(), 1, 1)
        assert cost.seconds["dp"] == pytest.approx(alone.seconds["dp"])

    def test_seconds_are_those_of_the_rings(self):
        now = here()
        cost = update_cost({EVERYONE: self.count}, now, ask(), 1, 1)
        ring = now.rings[EVERYONE]
        by_ring = cost.sent_bytes["dp"] / ring.bandwidth_bytes_per_s + 2 * ring.latency_s
        (route,) = ring.routes
        both_ways = cost.sent_bytes["dp"] * ring.size / (ring.size - 1)
        by_nodes = both_ways * route.seconds_per_byte + 2 * route.latency_s
        assert cost.seconds["dp"] == pytest.approx(min(by_ring, by_nodes))
        assert cost.seconds["tp"] == 0


class TestUpdate:
    def test_a_weight_is_updated_by_its_share_of_the_traffic(self):
        question = ask()
        flops, traffic_bytes = per_weight(question.step)
        # gradient read for the norm; master, two moments and gradient read, the first three written; master read,
        # weight written
        assert traffic_bytes == pytest.approx(4 + 4 * 4 + 3 * 4 + 4 + 2, rel=1e-4)
        # norm 2, AdamW 15, cast 1
        assert flops == pytest.approx(18, rel=1e-4)

    def test_sgd_moves_no_moments(self):
        flops, traffic_bytes = per_weight(ask(optimizer="sgd").step)
        # gradient read for the norm; master and gradient read, master written; master read, weight written
        assert traffic_bytes == pytest.approx(4 + 2 * 4 + 4 + 4 + 2, rel=1e-4)
        # norm 2, SGD 2, cast 1
        assert flops == pytest.approx(5, rel=1e-4)

    def test_it_takes_the_longer_of_arithmetic_and_memory(self):
        question = ask()
        flops, traffic_bytes = per_weight(question.step)
        seconds = update_cost({EVERYONE: 1600}, here(), question, 1, 1).seconds["update"]
        arithmetic_s, memory_s = (
            flops / question.rates.vector_flops_per_s,
            traffic_bytes / question.rates.memory_bytes_per_s,
        )
        assert seconds == pytest.approx(100 * max(arithmetic_s, memory_s))

    @pytest.mark.parametrize("zero", [1, 3])
    def test_shards_divide_it(self, zero):
        alone, divided = (update_cost({EVERYONE: 1600}, here(zero=one), ask(), 1, 1).seconds for one in (0, zero))
        assert divided["update"] == pytest.approx(alone["update"] / 16)
