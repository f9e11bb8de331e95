import subprocess
import sys
from dataclasses import replace

import pytest

from autoshard.engine.programs import graph_of, programs_of, read_by, written_by
from autoshard.errors import InputError
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.program import Communicate, Compute, Given
from autoshard.plan.candidate import Candidate
from autoshard.search.request import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.mesh import Mesh
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload


def plan_of(text, **changes):
    candidate = Candidate.parse(text)
    model = replace(load_model("tiny-llama"), **changes)
    workload = Workload(seq_len=16, global_batch=8, precision=Precision.named("bf16"))
    cluster = load_cluster("local", ranks=candidate.num_ranks)
    return plan_at(Request(model=model, cluster=cluster, workload=workload, engines=("torch",)), candidate)


def test_stages_hold_their_blocks_in_order():
    programs = programs_of(plan_of("tp=1,pp=2,dp=1,stages=1/3"))
    assert [list(stage) for stage in programs.stages] == [
        ["embed.0", "layer.0"],
        ["layer.1", "layer.2", "layer.3", "head.0"],
    ]


def test_layers_run_the_table_of_their_recompute():
    (stage,) = programs_of(plan_of("tp=1,pp=1,dp=1,recompute=full:1")).stages
    assert [parts.block.recompute for parts in stage.values()] == ["none", "full", "none", "none", "none", "none"]


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,pp=1,dp=2",
        "tp=1,pp=1,cp=2,dp=1,recompute=full",
        "tp=2,pp=1,dp=1,sp=false",
        "tp=1,pp=2,dp=1,schedule=zb_h1,recompute=full",
    ],
)
def test_the_passes_are_the_whole_program_and_the_first_does_not_wait_for_gradients(text):
    for parts in (parts for stage in programs_of(plan_of(text)).stages for parts in stage.values()):
        both = (*parts.forward, *parts.backward)
        assert len(both) == len(parts.program.instructions)
        assert set(map(id, both)) == set(map(id, parts.program.instructions))
        for entry in parts.forward:
            assert not isinstance(entry, Compute) or entry.op.pass_ == "F"
            assert not isinstance(entry, Communicate) or entry.pass_ == "F"
            assert not isinstance(entry, Given) or not entry.value.tensor.startswith("d.")
        for entry in parts.backward:
            assert not isinstance(entry, Compute) or entry.op.pass_ in "IW"
            assert not isinstance(entry, Communicate) or entry.pass_ in "IW"
        again = {entry.op.name for entry in parts.backward if isinstance(entry, Compute) and entry.op.again}
        assert again <= {entry.op.name for entry in parts.instructions("I") if isinstance(entry, Compute)}


@pytest.mark.parametrize("text", ["tp=2,pp=1,dp=2", "tp=1,pp=2,dp=1,schedule=zb_h1"])
def test_a_gradient_is_added_to_its_sum_as_soon_as_it_is_made(text):
    for stage in programs_of(plan_of(text)).stages:
        for parts in stage.values():
            for entries in (parts.instructions("I"), parts.instructions("W")):
                for number, entry in enumerate(entries):
                    if isinstance(entry, Compute) and isinstance(entry.op.kind, Accumulate):
                        total, gradient = read_by(entry)
                        assert written_by(entries[number - 1]) == (total,)
                        assert gradient in written_by(entries[number - 2])


def test_blocks_know_what_they_hand_on_and_back():
    (stage,) = programs_of(plan_of("tp=2,pp=1,dp=1")).stages
    ends = {name: (parts.handed_on, parts.handed_back) for name, parts in stage.items()}
    assert ends["embed.0"] == ("embed_add" if "embed_add" in ends else "embed", None)
    assert ends["layer.0"] == ("mlp_add", "block_in.d0")
    assert ends["head.0"] == ("loss", "head_in.d0")


def test_experts_that_drop_nothing_have_a_slot_for_every_token():
    plan = plan_of("tp=1,pp=1,dp=1", num_experts=8, experts_per_token=2)
    sizes = graph_of(plan).sizes
    assert sizes["slots"] == sizes["batch"] * sizes["seq"]


def test_a_plan_without_a_table_is_refused():
    with pytest.raises(InputError, match="strategies: the table is empty"):
        programs_of(replace(plan_of("tp=1,pp=2,dp=2"), strategies={}))


@pytest.mark.parametrize("text", ["tp=2,pp=1,dp=2", "tp=1,pp=1,cp=2,dp=1,recompute=full", "tp=2,pp=1,dp=1,sp=false"])
def test_i_does_not_wait_for_w_and_makes_what_is_handed_back(text):
    (stage,) = programs_of(plan_of(text)).stages
    for parts in stage.values():
        inputs, weights = parts.instructions("I"), parts.instructions("W")
        assert (*inputs, *weights) == parts.instructions("B")
        assert all(entry.op.pass_ != "W" for entry in inputs if isinstance(entry, Compute))
        assert all(entry.op.pass_ == "W" for entry in weights if isinstance(entry, Compute))
        assert parts.handed_back is None or parts.handed_back in parts.made("I")
        assert set(parts.made("I")) | set(parts.made("W")) == set(parts.made("B"))
        assert all(tensor.endswith(".weight.sum") for tensor in parts.made("W"))
    assert {"q.weight.sum", "down.weight.sum"} <= set(stage["layer.0"].made("W"))
    assert "attn_norm.weight.sum" in stage["layer.0"].made("I")


def test_an_axis_in_one_piece_is_refused_because_layouts_name_its_parts():
    plan = replace(plan_of("tp=2,pp=1,dp=1"), mesh=Mesh.parse("pp=1,dp=1,cp=1,tp=2 on 0-1"))
    with pytest.raises(InputError, match="mesh: dp and tp must be written in parts"):
        programs_of(plan)


def test_a_line_that_cannot_be_executed_is_refused():
    plan = plan_of("tp=2,pp=1,dp=1")
    line = plan.strategies["layer"]["attn_out"].replace("F reduce_scatter seq/tp", "F all_reduce /tp")
    tables = {**plan.strategies, "layer": {**plan.strategies["layer"], "attn_out": line}}
    with pytest.raises(InputError, match="attn_out"):
        programs_of(replace(plan, strategies=tables))


def test_reading_a_plan_needs_no_torch():
    code = "import sys, autoshard.engine.programs, autoshard.engine.placement; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
