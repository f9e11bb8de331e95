"""What has to be compiled before the first step."""

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.compiling import compiling
from autoshard.cost.step import StageLayers
from autoshard.plan.recompute import Recompute
from autoshard.schedule.schedule import Schedule
from autoshard.spec.kernels import load_kernels
from tests.cost.cases import ask, predicted_of

NXD = load_kernels("nxd")


def stages_of(*counts):
    last = len(counts) - 1
    return tuple(
        StageLayers.of(count, Recompute(), is_first=number == 0, is_last=number == last)
        for number, count in enumerate(counts)
    )


def graphs(schedule, *counts):
    found = compiling(schedule, stages_of(*counts), NXD)
    assert found
    assert found.compile_s == found.num_graphs * NXD.seconds_per_graph
    return found.num_graphs


def test_without_a_pipeline_there_is_one_graph_of_work_and_one_that_updates():
    assert graphs(Schedule(builder="1f1b", num_ranks=1, num_micro_batches=4), 8) == 2


@given(st.integers(3, 16), st.integers(1, 5))
def test_equal_stages_share_their_graphs(pp, layers):
    schedule = Schedule(builder="1f1b", num_ranks=pp, num_micro_batches=pp)
    # first, middle and last: forward, backward and update; to send and to receive, forward and backward
    assert graphs(schedule, *[layers] * pp) == 3 * 3 + 4


def test_stages_of_another_size_and_chunks_have_graphs_of_their_own():
    schedule = Schedule(builder="1f1b", num_ranks=4, num_micro_batches=4)
    assert graphs(schedule, 2, 3, 2, 2) == graphs(schedule, 2, 2, 2, 2) + 3
    chunks = Schedule(builder="interleaved", num_ranks=2, num_chunks=2, num_micro_batches=4)
    # three kinds of stages, two kinds of ranks
    assert graphs(chunks, 2, 2, 2, 2) == 3 * 2 + 2 + 4


def test_a_split_backward_is_two_graphs():
    whole, split = (Schedule(builder=name, num_ranks=3, num_micro_batches=4) for name in ("1f1b", "zb_h1"))
    assert graphs(split, 1, 1, 1) == graphs(whole, 1, 1, 1) + 3


@pytest.mark.parametrize(("cluster", "compiles"), [("trn1.32xlarge", True), ("h100-80", False)])
def test_only_neuron_compiles_ahead(cluster, compiles):
    prediction = predicted_of(ask("llama3-8b", cluster, 4), "tp=8,pp=4")
    assert (prediction.compiling is not None) == compiles
