"""What a plan promises, and how promises compare."""

import json
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st

from autoshard.cost.predict import plan_cost, predict, predicted
from autoshard.plan.codec import dump, fingerprint, load
from autoshard.spec.workload import Precision
from tests.cost.cases import ask, plan_of, predicted_of
from tests.json_schema import schema_text

FEWER = settings(max_examples=min(settings().max_examples, 60))  # each prices two plans
TEXTS = (
    "tp=8,pp=4,dp=4",
    "tp=8,pp=1,dp=16,mbs=2",
    "tp=32,pp=2,dp=2,recompute=full",
    "tp=8,pp=2,cp=4,dp=2",
    "tp=8,pp=4,dp=4,sp=false",
    "tp=8,pp=4,vp=2,dp=4,schedule=interleaved",
    "tp=8,pp=4,dp=4,recompute=full:3",
    "tp=8,pp=8,dp=2,zero=0",
    "tp=1,pp=4,dp=32,zero=3",
)
texts = pytest.mark.parametrize("text", TEXTS)


class TestPrediction:
    @texts
    def test_it_says_whose_prediction_it_is(self, text):
        question = ask()
        plan = predicted(plan_of(question, text))
        assert plan.prediction and plan.prediction.of == fingerprint(plan)
        assert plan.prediction.basis.startswith("calibrated on 15 rows of trn1.32xlarge")
        assert predict(plan, question.calibration).basis.startswith("uncalibrated")

    @texts
    def test_parts_add_up(self, text):
        prediction = predicted_of(ask(), text)
        assert sum(prediction.time_parts.values()) == pytest.approx(prediction.step_time_s, rel=1e-8)
        assert len(prediction.stage_memory) == plan_of(ask(), text).schedule.num_ranks
        assert all(min(memory.parts.values()) >= 0 for memory in prediction.stage_memory)
        assert min(prediction.time_parts.values()) > 0

    @texts
    def test_it_is_the_same_every_time(self, text):
        question = ask()
        assert dump(predicted(plan_of(question, text))) == dump(predicted(plan_of(question, text)))

    def test_the_interval_is_that_of_the_calibration(self):
        question = ask()
        prediction = predicted_of(question, TEXTS[0])
        assert prediction.low_s == pytest.approx(0.5 * prediction.step_time_s)
        assert prediction.high_s == pytest.approx(1.5 * prediction.step_time_s)
        narrow = replace(question.calibration, interval=0.1)
        assert predict(plan_of(question, TEXTS[0]), narrow).low_s == pytest.approx(0.9 * prediction.step_time_s)

    def test_capacity_is_the_memory_of_a_rank(self):
        assert predicted_of(ask(), TEXTS[0]).capacity_bytes == 16 * 2**30

    def test_tokens_and_utilisation_follow_from_the_step_time(self):
        question, text = ask(), TEXTS[0]
        prediction, model = predicted_of(question, text), question.model
        assert prediction.tokens_per_s == pytest.approx(256 * 8192 / prediction.step_time_s)
        attention = 12 * model.num_layers * model.num_heads * model.head_dim * 8192
        matmul = model.num_parameters - (model.vocab + 2 * model.num_layers + 1) * model.hidden
        flops = (6 * matmul + attention) * 256 * 8192
        peak = 128 * 95e12  # 4 nodes of 32 cores of 95 TFLOPS
        assert prediction.mfu == pytest.approx(flops / peak / prediction.step_time_s, rel=1e-6)
        assert 0.05 < prediction.mfu < 0.7

    def test_slots_that_no_token_needs_are_no_work_of_the_model(self):
        even, roomy = (
            predicted_of(ask("mixtral-8x7b", "h100-80", 4, expert_capacity=capacity), "tp=8,pp=4,dp=1,mbs=1")
            for capacity in (None, 2.0)
        )
        assert roomy.step_time_s > 1.2 * even.step_time_s
        assert roomy.mfu * roomy.step_time_s == pytest.approx(even.mfu * even.step_time_s, rel=1e-6)

    def test_nothing_beats_the_efficiency_of_the_calibration(self):
        question = ask(kernels="te")
        for text in TEXTS:
            # masked pairs count as work done, and a kernel skips them
            assert predicted_of(question, text).mfu < question.calibration.matrix_efficiency / 0.8

    def test_the_runtime_keeps_its_own_memory_on_every_rank(self):
        memory = predicted_of(ask(), TEXTS[0]).stage_memory
        assert {entry.parts["runtime"] for entry in memory} == {2**30}


class TestComparisons:
    @FEWER
    @given(st.sampled_from(TEXTS), st.floats(1, 100))
    def test_more_bandwidth_never_makes_a_step_slower(self, text, factor):
        question = ask()
        links = tuple(
            replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s) for link in question.cluster.links
        )
        quick = replace(question, cluster=replace(question.cluster, links=links))
        assert time_s(quick, text) <= time_s(question, text) * (1 + 1e-8)

    @FEWER
    @given(st.sampled_from(TEXTS), st.floats(1, 100), st.sampled_from(["matrix", "vector", "memory"]))
    def test_a_faster_chip_never_makes_a_step_slower(self, text, factor, what):
        question = ask()
        chip = question.cluster.chip
        changed = {
            "matrix": {"matrix_flops_per_s": {name: factor * rate for name, rate in chip.matrix_flops_per_s.items()}},
            "vector": {"vector_flops_per_s": factor * chip.vector_flops_per_s},
            "memory": {"memory_bandwidth_bytes_per_s": factor * chip.memory_bandwidth_bytes_per_s},
        }
        cluster = replace(question.cluster, chip=replace(chip, **changed[what]))
        assert time_s(replace(question, cluster=cluster), text) <= time_s(question, text) * (1 + 1e-8)

    @given(st.sampled_from(TEXTS), st.sampled_from([8, 16, 24]))
    def test_fewer_layers_are_faster_and_smaller(self, text, num_layers):
        question, text = ask(), text.replace("full:3", "full:1")
        small = replace(question, model=replace(question.model, num_layers=num_layers))
        few, many = predicted_of(small, text), predicted_of(question, text)
        assert few.step_time_s < many.step_time_s
        assert few.stage_memory[0].num_weights < many.stage_memory[0].num_weights
        assert few.peak_bytes < many.peak_bytes

    @texts
    def test_a_larger_batch_takes_longer_and_at_most_in_proportion(self, text):
        once, twice = time_s(ask(), text), time_s(ask(global_batch=512), text)
        assert once < twice <= 2 * once

    @texts
    def test_a_longer_sequence_takes_longer_and_keeps_more(self, text):
        short, long = predicted_of(ask(seq_len=4096), text), predicted_of(ask(), text)
        assert short.step_time_s < long.step_time_s
        assert short.peak_bytes < long.peak_bytes

    @pytest.mark.parametrize("order", ["contiguous", "zigzag"])
    def test_the_order_of_the_sequence_changes_nothing_but_the_wait_of_attention(self, order):
        text = "tp=8,pp=1,cp=4,dp=4"
        here = predicted_of(ask(kernels="te"), f"{text},cp_order={order}")
        other = predicted_of(ask(kernels="te"), f"{text},cp_order=zigzag")
        assert here.communication_bytes == other.communication_bytes
        assert here.peak_bytes == other.peak_bytes
        assert (here.step_time_s > other.step_time_s) == (order == "contiguous")

    @given(st.sampled_from([1, 2, 4, 8, 16]))
    def test_more_tp_never_gives_a_rank_more_weights(self, tp):
        wide = predicted_of(ask(), f"tp={tp},pp=4").stage_memory[0].num_weights
        assert predicted_of(ask(), f"tp={2 * tp},pp=4").stage_memory[0].num_weights <= wide

    @given(st.sampled_from([1, 2, 4, 8]))
    def test_more_stages_never_give_the_fullest_rank_more_weights(self, pp):
        weights = [
            max(entry.num_weights for entry in predicted_of(ask(), f"tp=8,pp={size}").stage_memory)
            for size in (pp, 2 * pp)
        ]
        assert weights[1] <= weights[0]

    def test_zero_1_and_3_need_ever_less_memory_at_rest(self):
        states = []
        for zero in (0, 1, 3):
            parts = predicted_of(ask(), f"tp=8,pp=1,dp=16,zero={zero}").stage_memory[0].parts
            states.append(parts["weights"] + parts["gradients"] + parts["masters"] + parts["optimizer"])
        assert states[0] > states[1] > states[2]

    def test_fp32_needs_twice_the_room_for_activations(self):
        wide = ask(precision=Precision.named("fp32"), kernels="te")
        ratio = predicted_of(wide, TEXTS[0]).stage_memory[0].parts["activations"]
        ratio /= predicted_of(ask(kernels="te"), TEXTS[0]).stage_memory[0].parts["activations"]
        assert ratio == pytest.approx(2, rel=0.01)

    def test_sequence_parallelism_keeps_less(self):
        whole = predicted_of(ask(), "tp=8,pp=4,dp=4,sp=false").stage_memory[0].parts["activations"]
        assert predicted_of(ask(), "tp=8,pp=4,dp=4").stage_memory[0].parts["activations"] < whole

    def test_the_cost_holds_what_the_prediction_rounds(self):
        question = ask()
        cost, prediction = plan_cost(plan_of(question, TEXTS[0]), question), predicted_of(question, TEXTS[0])
        assert float(cost.time_s) == pytest.approx(prediction.step_time_s, rel=1e-8)
        assert float(cost.peak_bytes) == prediction.peak_bytes


def time_s(question, text):
    return predicted_of(question, text).step_time_s


class TestFormatOfProducts:
    question = ask(cluster_name="h100-80", nodes=1, precision=replace(Precision.named("bf16"), products="fp8"))
    text = "tp=2,pp=2,dp=2"

    def test_a_plan_carries_it_through_its_file_and_its_schema(self):
        plan = predicted(plan_of(self.question, self.text))
        written = dump(plan)
        assert json.loads(written)["workload"]["precision"]["products"] == "fp8"
        assert load(written) == plan
        jsonschema.validate(json.loads(written), json.loads(schema_text()))
        plain = plan_of(ask(cluster_name="h100-80", nodes=1), self.text)
        assert fingerprint(plain) != fingerprint(plan), "another plan"

    def test_a_plan_file_without_it_multiplies_as_it_activates(self):
        plain = predicted(plan_of(ask(cluster_name="h100-80", nodes=1), self.text))
        data = json.loads(dump(plain))
        data["workload"]["precision"].pop("products", None)
        assert load(json.dumps(data)) == plain

    def test_faster_products_make_a_faster_step_of_the_same_size(self):
        plain, quick = (
            predict(plan_of(question, self.text)) for question in (ask(cluster_name="h100-80", nodes=1), self.question)
        )
        assert quick.step_time_s < plain.step_time_s
        assert quick.stage_memory == plain.stage_memory
        assert quick.communication_bytes == plain.communication_bytes
        # utilisation is of the peak that activations have, as published ones are
        assert quick.mfu * quick.step_time_s == pytest.approx(plain.mfu * plain.step_time_s, rel=1e-6)
