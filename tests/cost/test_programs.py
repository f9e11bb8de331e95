"""What single programs do otherwise: sums of whole gradients, copies of weights, and a host far ahead of its device."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.predict import sent_by_stage
from autoshard.plan.candidate import balanced_stages
from autoshard.spec.kernels import load_kernels
from autoshard.units import GIB
from tests.cost.cases import ask, plan_of, predicted_of


@given(layers=st.integers(1, 96), stages=st.integers(1, 16), head=st.floats(0.0, 12.0))
def test_stages_end_where_blocks_in_a_row_meet_their_thresholds(layers: int, stages: int, head: float) -> None:
    """The same rule block by block: a block stays where it meets or crosses a threshold, and the next one goes on."""
    stages = min(stages, layers)
    total, rank, ranks = layers + head, 0, list[int]()
    for block in range(1, layers + 1):
        ranks.append(rank)
        rank += block >= total * (rank + 1) / stages - 1e-9 and rank < stages - 1
    crossed = [ranks.count(stage) for stage in range(stages)]
    split = balanced_stages(layers, stages, head)
    assert sum(split) == layers and min(split) >= 1
    if min(crossed) >= 1:
        assert list(split) == crossed
    else:  # who gets a layer of its neighbour
        assert split[0] <= crossed[0]


def test_zero_1_of_a_program_that_sums_whole_gradients_sends_them_twice_and_weights_once() -> None:
    text = "tp=1,dp=16,zero=1"
    here, others = (ask("llama3-8b", "h100-80", 2, kernels=name) for name in ("nanotron", "torch_flash"))
    weights = 8030261248
    scattered, gathered = 15 / 16 * weights * 4, 15 / 16 * weights * 2
    assert sent_by_stage(plan_of(others, text))[0]["dp"] == pytest.approx(scattered + gathered, rel=1e-6)
    assert sent_by_stage(plan_of(here, text))[0]["dp"] == pytest.approx(2 * scattered + gathered, rel=1e-6)
    assert predicted_of(here, text).stage_memory[0].parts["buckets"] == 2 * weights
    alone = predicted_of(ask("llama3-8b", "h100-80", 2, kernels="nanotron"), "tp=8,pp=2,dp=1,zero=1")
    assert all(not memory.parts.get("buckets") for memory in alone.stage_memory)


def test_a_host_ahead_of_its_device_holds_what_was_scattered_until_its_queue_or_the_step_ends() -> None:
    asked = ask("llama3-8b", "h100-80", 1, kernels="nanotron", seq_len=4096)
    question = replace(asked, model=replace(asked.model, num_layers=4))
    queue, of_a_block, text = load_kernels("nanotron").queued_starts, 4096 * 4096 * 2, "tp=8,dp=1,zero=0,mbs=1"
    long, short = (
        predicted_of(replace(question, workload=replace(question.workload, global_batch=count)), text)
        for count in (256, 1)
    )
    queued = long.stage_memory[0].parts["queued"]
    # Of a layer four sums are scattered both ways together, and 50 to 200 kernels and messages are started.
    assert 4 * queue / 200 < queued / of_a_block < 4 * queue / 50
    assert 0 < short.stage_memory[0].parts["queued"] < queued
    whole = predicted_of(question, "tp=1,dp=8,zero=1")
    assert not whole.stage_memory[0].parts["queued"]


def test_what_is_queued_takes_no_more_memory_than_there_is() -> None:
    question = ask("llama3-8b", "h100-80", 1, kernels="nanotron", seq_len=32768, global_batch=64)
    for mbs in (1, 2, 4):
        memory = predicted_of(question, f"tp=8,dp=1,zero=0,recompute=full,mbs={mbs}").stage_memory[0]
        assert memory.total <= 80 * GIB or not memory.parts["queued"]


@pytest.mark.parametrize("zero", [1, 3])
def test_copies_of_states_in_every_node_sum_pieces_between_nodes_and_gather_weights_inside(zero: int) -> None:
    question, weights = ask("llama3-8b", "h100-80", 4), 8030261248
    whole, inside = (predicted_of(question, f"tp=1,dp=32,zero={zero}{more}") for more in ("", ",zero_group=8"))
    (whole_memory,), (inside_memory,) = whole.stage_memory, inside.stage_memory
    for part in ("masters", "optimizer", *(("weights", "gradients") if zero == 3 else ())):
        assert inside_memory.parts[part] == pytest.approx(4 * whole_memory.parts[part], rel=1e-6)
    if zero == 1:  # FP32 sums are scattered and BF16 weights gathered among 8, pieces of sums reduced among 4 nodes
        sent = sent_by_stage(plan_of(question, "tp=1,dp=32,zero=1,zero_group=8"))[0]["dp"]
        assert sent == pytest.approx(weights * (7 / 8 * (4 + 2) + 2 * 3 / 4 * 4 / 8), rel=1e-6)
    assert inside.time_parts["dp"] != whole.time_parts["dp"]


def test_weights_in_every_node_are_gathered_inside_and_once_a_step_between_nodes() -> None:
    """Sums of gradients are scattered over all ranks, as without."""
    question, weights = ask("llama3-8b", "h100-80", 4, global_batch=64), 8030261248
    whole, inside = (predicted_of(question, f"tp=1,dp=32,zero=3{more}") for more in ("", ",weight_group=8"))
    (whole_memory,), (inside_memory,) = whole.stage_memory, inside.stage_memory
    for part in ("weights", "gradients", "masters", "optimizer", "gathered", "activations"):
        times = 4 if part == "weights" else 1
        assert inside_memory.parts[part] == pytest.approx(times * whole_memory.parts[part], rel=1e-6)
    by_micro_batch = 7 / 8 * 2 * 2 + 31 / 32 * 4  # of each of two: BF16 weights gathered twice, FP32 sums scattered
    assert inside.communication_bytes["dp"] == pytest.approx(weights * (2 * by_micro_batch + 3 / 4 * 2 / 8), rel=1e-6)


def test_a_group_of_all_ranks_is_none() -> None:
    question = ask("llama3-8b", "h100-80", 4)
    for text, key in product(("tp=2,dp=8,cp=2,zero=3", "tp=1,dp=32,zero=3"), ("zero_group", "weight_group")):
        whole, same = (predicted_of(question, f"{text}{more}") for more in ("", f",{key}={32 // int(text[3])}"))
        assert same.time_parts == whole.time_parts and same.stage_memory == whole.stage_memory


def test_sums_that_hide_behind_the_last_backward_leave_the_gather_of_weights() -> None:
    text, asked = "tp=1,dp=16,zero=1,mbs=1", {"seq_len": 8192, "global_batch": 64}
    others, here = (
        predicted_of(ask("llama3-8b", "a100-80", 2, kernels=name, **asked), text)
        for name in ("torch_flash", "internevo")
    )
    # FP32 sums are two thirds of what is sent, BF16 weights one third.
    assert here.time_parts["dp"] == pytest.approx(others.time_parts["dp"] / 3, rel=0.02)
