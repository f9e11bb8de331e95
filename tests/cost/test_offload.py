"""Activations in host memory: what plans take and hold with them, counted again from the same plans without."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.blocks.inside import PassContents
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.predict import predict, predicted, question_of
from autoshard.cost.setting import BlockCost, offloaded
from autoshard.cost.timeline import timeline_of
from autoshard.plan.plan import Plan, Prediction
from autoshard.plan.recompute import Recompute
from autoshard.plan.verify import verify
from autoshard.spec.kernels import kernels_names, load_kernels
from tests.cost.cases import block
from tests.plan.cases import ask, plan_of
from tests.slower import covering
from tests.tabled import tabled

KINDS = ("none", "selective[activation,norms]", "full")
SHAPES = ("tp=2,pp=4", "tp=2,pp=4,vp=2,schedule=interleaved", "tp=2,pp=4,schedule=zb_h1")


def plan(text: str, cluster: str = "h100-80", model: str = "llama3-8b", nodes: int = 2) -> Plan:
    """A plan with its tables, predicted."""
    return predicted(tabled(plan_of(ask(model, cluster, nodes, global_batch=32), text)))


def parts(chosen: Plan) -> Prediction:
    assert chosen.prediction
    return chosen.prediction


@pytest.mark.parametrize(("kind", "shape"), covering(KINDS, SHAPES, fast=3))
def test_host_memory_holds_what_a_rank_held_and_three_layers_of_it_are_on_their_way(kind: str, shape: str):
    before, after = parts(plan(f"{shape},recompute={kind}")), parts(plan(f"{shape},recompute={kind}+offload"))
    layers = 32 // 4
    for rank, (with_all, without) in enumerate(zip(before.stage_memory, after.stage_memory, strict=True)):
        gone = with_all.parts["activations"] - without.parts["activations"]
        assert without.parts["logits"] == with_all.parts["logits"]
        if "zb" not in shape:  # there I leaves for W what it has fetched
            embedding = 0 if rank else without.parts["activations"]
            assert gone > 0 and without.parts["activations"] == embedding
        if shape == "tp=2,pp=4":
            in_flight = min(4 - rank, 32 // 2)  # of 1f1b: 4, 3, 2, 1
            assert without.parts["moving"] == pytest.approx(3 * gone / (layers * in_flight), rel=1e-6)
        assert without.host_bytes == (gone if "zb" not in shape else without.host_bytes)
    assert "moving" not in before.stage_memory[0].parts and before.stage_memory[0].host_bytes == 0


def test_a_pass_hides_as_much_of_the_way_as_it_takes():
    question = question_of(plan("tp=2,pp=4"), uncalibrated())
    cost = replace(
        block(seconds={"F": {"compute": 1.0}, "I": {"tp": 2.0}, "W": {"compute": 3.0}}),
        memory=replace(block().memory, saved_bytes=200e9),
    )  # 4 s at 50 GB/s
    chosen = offloaded(cost, question)
    assert (chosen.seconds["F"]["host"], chosen.seconds["I"]["host"]) == (3.0, 0.0)
    assert (chosen.memory.saved_bytes, chosen.memory.host_bytes) == (0.0, 200e9)
    columns = offloaded(replace(cost, memory=replace(cost.memory, saved_bytes=np.array([0.0, 400e9]))), question)
    assert [list(columns.seconds[half]["host"]) for half in "FI"] == [[0.0, 7.0], [0.0, 3.0]]


def test_a_host_that_computes_copies_meanwhile_nothing_and_holds_the_same_bytes():
    before, after = (plan(f"tp=2,pp=2,recompute={kind}", "local", "tiny-llama", 1) for kind in ("none", "none+offload"))
    rank = parts(after).stage_memory[0].parts
    assert rank["host"] == parts(before).stage_memory[0].parts["activations"] - rank["activations"]
    assert parts(after).time_parts["host"] > 0
    assert parts(after).step_time_s > parts(before).step_time_s
    assert parts(after).peak_bytes > parts(before).peak_bytes


@pytest.mark.parametrize("shape", ["tp=2,pp=4,recompute=none+offload", "tp=1,pp=2,recompute=full/none+offload"])
def test_timelines_and_passes_add_up_to_what_is_predicted(shape: str):
    chosen = plan(shape, cluster="a100-80")
    timeline, prediction = timeline_of(chosen), parts(chosen)
    assert prediction.time_parts["host"] > 0, "12.5 GB/s are few"
    assert timeline.end_s == pytest.approx(prediction.step_time_s, rel=1e-6)
    assert [rank.most_bytes for rank in timeline.ranks] == [memory.total for memory in prediction.stage_memory]
    inside, last = PassContents(chosen), len(chosen.stages) - 1
    for kind in "FB":
        pieces = [piece for of_block in inside.of(kind, last) for piece in of_block.pieces]
        seconds = sum(piece.time_s for piece in pieces if piece.part == "host")
        assert seconds == pytest.approx(timeline.passes[kind, last].parts["host"], rel=1e-9)


def test_tables_are_those_of_the_same_plan_without_host_memory():
    with_all, without = (plan(f"tp=2,pp=4,recompute={kind}") for kind in ("full", "full+offload"))
    assert with_all.strategies == without.strategies
    assert plan("tp=2,pp=4,recompute=none+offload").strategies == plan("tp=2,pp=4").strategies


def test_more_than_a_node_has_is_refused():
    chosen = plan("tp=1,pp=2,recompute=none+offload")
    assert verify(chosen) == () or {reason.rule_id for reason in verify(chosen)} == {"memory"}
    small = replace(chosen.cluster, host_memory_bytes=2**30)
    reasons = {
        reason.rule_id: reason.message for reason in verify(predicted(replace(chosen, cluster=small, prediction=None)))
    }
    assert "the 8 ranks of a node are predicted to keep" in reasons["host-memory"]
    assert "of which a plan may fill 768" in reasons["host-memory"]
    assert predict(chosen).stage_memory[0].host_bytes * 8 < 0.75 * (chosen.cluster.host_memory_bytes or 0)


@pytest.mark.parametrize("name", kernels_names())
def test_what_a_search_tries_of_a_table_is_one_of_its_kinds_of_recompute(name: str):
    table = load_kernels(name)
    for text in table.offloads:
        kind = Recompute.parse(text)
        assert not kind.offload and set(kind.ops) <= set(table.selective)


def test_the_cost_of_a_block_is_as_before_where_it_keeps_nothing():
    question = question_of(plan("tp=2,pp=4"), uncalibrated())
    cost: BlockCost = block(seconds={"F": {"compute": 1.0}, "I": {"tp": 2.0}, "W": {"compute": 3.0}})
    assert offloaded(cost, question).part_s("host") == 0.0
