"""What a rank holds and runs, read off a plan: its blocks, their passes, its parts of tensors, its first weights."""

import subprocess
import sys
from dataclasses import MISSING, fields, replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import autoshard.engine.initial as initial
from autoshard.engine.initial import DrawnWeight, InitialWeights
from autoshard.engine.programs import graph_of, programs_of, read_by, written_by
from autoshard.engine.rows import works_by_rows
from autoshard.errors import InputError
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.layout.layout import Layout
from autoshard.layout.program import Communicate, Compute, Given
from autoshard.run.placement import MeshRank, dims_of, placed_boxes
from autoshard.spec.mesh import Mesh
from autoshard.spec.model_catalogue import load_model
from tests.engine.small_models import OPTIONS, graph_of as small_graph, reduced, small_models
from tests.ranks.cases import llama, plan_of
from tests.ranks.shares import Held, assemble

MODELS = small_models()
TEXTS = (
    "tp=2,pp=1,dp=2", "tp=1,pp=1,cp=2,dp=1,recompute=full", "tp=2,pp=1,dp=1,sp=false",
    "tp=1,pp=2,dp=1,schedule=zb_h1,recompute=full",
)  # fmt: skip


def test_every_option_of_a_model_has_a_small_model_and_every_small_model_another_graph():
    plain = reduced(load_model("tiny-llama"))
    # In rows of tests/ranks/matrix.py and tests/modules.
    untried = {"traced", "hidden_dropout", "attention_dropout", "drops_embeddings"}
    options = {field.name for field in fields(plain) if field.default is not MISSING} - untried
    tried = {name for option in OPTIONS.values() for name, setting in option.items() if setting != getattr(plain, name)}
    assert not options - tried, "give each option a row in OPTIONS of tests/engine/small_models.py"
    graph = small_graph(plain)
    assert {name for name in OPTIONS if small_graph(MODELS[name]) == graph} == {"no option"}, "without effect"


def test_stages_hold_their_blocks_in_order():
    programs = programs_of(plan_of("tp=1,pp=2,dp=1,stages=1/3", llama(num_layers=4)))
    expected = [["embed.0", "layer.0"], ["layer.1", "layer.2", "layer.3", "head.0"]]
    assert [list(stage) for stage in programs.stages] == expected


def test_layers_run_the_table_of_their_recompute():
    (stage,) = programs_of(plan_of("tp=1,pp=1,dp=1,recompute=full:1", llama(num_layers=4))).stages
    assert [parts.block.recompute for parts in stage.values()] == ["none", "full", "none", "none", "none", "none"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_passes_are_the_whole_program_and_none_waits_for_a_later_one(text):
    for parts in (parts for stage in programs_of(plan_of(text, llama())).stages for parts in stage.values()):
        both, again = (*parts.forward, *parts.backward), [one for one in parts.forward if works_by_rows(one)]
        twice = {one.op.name for one in both if isinstance(one, Compute) and sum(one is other for other in both) > 1}
        assert twice == ({"logits_fp32", "shifted", "power"} if again else set())
        assert set(map(id, both)) == set(map(id, parts.program.instructions))
        assert not any(isinstance(one, Given) and one.value.tensor.startswith("d.") for one in parts.forward)
        inputs, weights = parts.instructions("I"), parts.instructions("W")
        assert (*inputs, *weights) == parts.backward
        for kind, entries in (("F", parts.forward), ("I", inputs), ("W", weights)):
            assert all(one.op.pass_ == kind for one in entries if isinstance(one, Compute) and one not in again)
            assert all((one.pass_ == "F") == (kind == "F") for one in entries if isinstance(one, Communicate))
        again = {entry.op.name for entry in parts.backward if isinstance(entry, Compute) and entry.op.again}
        assert again <= {entry.op.name for entry in inputs if isinstance(entry, Compute)}
        assert parts.handed_back is None or parts.handed_back in parts.results("I")
        assert all(tensor.endswith(".weight.sum") for tensor in parts.results("W"))


@pytest.mark.parametrize("text", TEXTS[::3])
def test_a_gradient_is_added_to_its_sum_as_soon_as_it_is_made(text):
    for parts in (parts for stage in programs_of(plan_of(text, llama())).stages for parts in stage.values()):
        for entries in (parts.instructions("I"), parts.instructions("W")):
            for number, entry in enumerate(entries):
                if isinstance(entry, Compute) and isinstance(entry.op.kind, Accumulate):
                    total, gradient = read_by(entry)
                    assert any(total in written_by(other) for other in entries[:number])
                    assert gradient in written_by(entries[number - 1])


def test_experts_that_drop_nothing_have_a_slot_for_every_token():
    sizes = graph_of(plan_of("tp=1,pp=1,dp=1", llama(num_experts=8, experts_per_token=2))).sizes
    assert sizes["slots"] == sizes["batch"] * sizes["seq"]


def test_a_plan_that_cannot_be_executed_is_refused():
    plan = plan_of("tp=2,pp=1,dp=1", llama())
    line = plan.strategies["layer"]["attn_out"].replace("F reduce_scatter seq/tp", "F all_reduce /tp")
    tables = {**plan.strategies, "layer": {**plan.strategies["layer"], "attn_out": line}}
    for other, message in (
        (replace(plan, strategies={}), "strategies: the table is empty"),
        (replace(plan, mesh=Mesh.parse("pp=1,dp=1,cp=1,tp=2 on 0-1")), "mesh: dp and tp must be written in parts"),
        (replace(plan, strategies=tables), "attn_out"),
    ):
        with pytest.raises(InputError, match=message):
            programs_of(other)


def test_reading_plans_and_names_needs_no_torch():
    modules = "engine.hf_names, engine.nxd.shards, engine.programs, run.placement, run.protocol, run.activity"
    imports = ", ".join(f"autoshard.{module}" for module in modules.split(", "))
    code = f"import sys, {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- parts of tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["0-11", "11-0"])
@given(
    text=st.sampled_from(
        ["[batch/dp, seq/cp.tp, hidden]", "[batch, seq/tp.cp, hidden/edp]", "[batch/kv, seq, hidden/cp]"]
    ),
    sizes=st.tuples(*[st.integers(1, 9)] * 3),
)
def test_blocks_of_all_ranks_make_the_whole(ranks, text, sizes):
    layout, mesh = Layout.parse(text), Mesh.parse(f"pp=1,edp=2,ep=1,cp=3,kv=2,rep=1 on {ranks}")
    whole = np.arange(float(np.prod(sizes))).reshape(sizes)
    first = MeshRank(mesh=mesh, rank=0, sizes=dict(zip(dims_of(layout), sizes, strict=True)))
    places = [first.at(rank) for rank in range(mesh.num_ranks)]
    held = [Held(bounds=rank.bounds(layout), array=rank.block(whole, layout)) for rank in places]
    assert all(part.array.shape == rank.shape(layout) for part, rank in zip(held, places, strict=True))
    np.testing.assert_array_equal(assemble(sizes, held), whole)


def test_a_range_of_a_block_lies_where_the_block_does():
    found = list(placed_boxes(((2, 4), (3, 6)), 1, 5))
    assert found == [((2, 4), (1, 2), slice(0, 2)), ((3, 3), (1, 2), slice(2, 4))]


# -- first weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["experts and all else", "tied", "learned positions"])
def test_norms_and_biases_begin_without_effect_and_all_else_as_it_is_drawn(name):
    graph = small_graph(MODELS[name])
    weights, again, other = (InitialWeights(graph=graph, seed=seed) for seed in (0, 0, 1))
    drawn: list[float] = []
    for instance, block in graph.instances():
        for tensor in block.parameters:
            whole = f"{instance}.{tensor.name}"
            values = np.asarray(weights(whole))
            assert values.shape == tuple(graph.sizes[dim] for dim in tensor.dims)
            if values.ndim == 1 or tensor.name.endswith(".bias"):
                assert (values == (not tensor.name.endswith(".bias"))).all()
            else:
                assert 0.015 < values.std() < 0.025
                assert np.array_equal(values, again(whole)) and not np.array_equal(values, other(whole))
                assert len(np.unique(values)) > 0.99 * values.size
                drawn.append(values.flat[0])
    assert len(drawn) - len(set(drawn)) == MODELS[name].tied_embeddings


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.data())
def test_any_part_of_a_drawn_weight_is_that_part_of_the_whole(shape, data):
    """In small chunks, which parts begin and end inside."""
    weight = DrawnWeight(shape=(61, *shape), seeds=(7, 3), threads=data.draw(st.integers(1, 3)))
    ends = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in weight.shape]
    box = tuple(slice(*bounds) for bounds in ends[: data.draw(st.integers(0, len(ends)))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "_CHUNK", 128)
        initial._drawn.cache_clear()
        np.testing.assert_array_equal(weight[box], np.asarray(replace(weight, threads=1))[box])
    initial._drawn.cache_clear()
