"""How ZeRO, recompute and interleaving change what a rank holds: as their closed forms say."""

import pytest
from hypothesis import given, strategies as st

from tests.cost.cases import ask, predicted_of, priced

STATES = {"weights", "gradients", "masters", "optimizer"}
BUFFERS = {"buckets", "gathered"}


def parts_of(text, rank=0, **changes):
    return predicted_of(ask(cluster_name="h100-80", nodes=2, kernels="te", **changes), text).stage_memory[rank].parts


@given(st.sampled_from([(1, 1, 16), (2, 2, 4), (4, 1, 4), (2, 4, 2)]))
def test_zero_divides_states_over_dp_and_leaves_the_rest_as_it_is(sizes):
    tp, pp, dp = sizes
    none, one, three = (parts_of(f"tp={tp},pp={pp},dp={dp},zero={zero}") for zero in (0, 1, 3))
    for parts, divided in ((one, {"masters", "optimizer"}), (three, STATES)):
        for name in STATES:
            share = dp if name in divided else 1
            assert parts[name] == pytest.approx(none[name] / share, rel=1e-6)
        same = none.keys() - STATES - BUFFERS
        assert {name: parts[name] for name in same} == {name: none[name] for name in same}


@given(st.integers(0, 8))
def test_every_layer_that_is_computed_again_keeps_its_input_only(dropped):
    text = "tp=2,pp=4,dp=2"
    mixed = parts_of(f"{text},recompute=full:{dropped}" if dropped else text)
    question = ask(cluster_name="h100-80", nodes=2, kernels="te")
    plain, full = priced(question, text), priced(question, text, drop="full")
    kept = dropped * full.memory.saved_bytes + (8 - dropped) * plain.memory.saved_bytes
    assert mixed["activations"] == 4 * kept
    # while such a layer runs backward, all that it dropped is there
    assert full.memory.remade_bytes == plain.memory.saved_bytes - full.memory.saved_bytes
    assert mixed["working"] >= (full.memory.remade_bytes if dropped == 8 else 0)


@given(st.sampled_from([(2, 2), (2, 4), (4, 2), (4, 4), (8, 2)]), st.integers(2, 4))
def test_interleaving_keeps_more_on_the_first_rank(shape, rounds):
    # 1 + (pp - 1) / (pp vp) of what 1F1B keeps: Korthikanti et al. 2022 (arXiv:2205.05198)
    pp, vp = shape
    tp = 16 // pp
    batch = {"global_batch": rounds * pp}
    plain = parts_of(f"tp={tp},pp={pp},dp=1", **batch)
    chunked = parts_of(f"tp={tp},pp={pp},vp={vp},dp=1,schedule=interleaved", **batch)
    more = 1 + (pp - 1) / (pp * vp)
    assert chunked["activations"] == pytest.approx(more * plain["activations"])
    for name in STATES:
        assert chunked[name] == plain[name]


def test_logits_count_for_the_micro_batches_of_the_last_chunk_only():
    text = "tp=4,pp=4,dp=1,vp=2,schedule=interleaved"
    last = parts_of(text, rank=3, global_batch=16)
    head = priced(ask(cluster_name="h100-80", nodes=2, kernels="te"), text, kind="head")
    assert last["logits"] == head.memory.saved_bytes  # the last chunk runs backward as soon as forward is done


@given(st.sampled_from([1, 2, 4]), st.sampled_from(["none", "full", "selective[core_attn]"]))
def test_more_tp_in_place_of_dp_never_needs_more_under_zero_1(tp, drop):
    wide, narrow = (sum(parts_of(f"tp={size},dp={8 // size},pp=2,recompute={drop}").values()) for size in (tp, 2 * tp))
    assert narrow <= wide
