"""Which operations run as one kernel, and what it reads and writes: by property on every model, and by hand."""

import functools
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.kernel_run import block_kernels
from autoshard.graph.kinds.linear import Collect, Deliver, Einsum
from autoshard.graph.kinds.optimizer import Accumulate
from autoshard.plan.rules.columns import effective_names
from autoshard.spec.kernels import kernels_names
from tests.cost.cases import ask, lowered

MODELS = ("llama3-8b", "mixtral-8x7b", "gpt-neox-20b")
PRODUCTS = ("q", "k", "v", "o", "up", "gate", "down")


@functools.cache
def sharded(kernels, model="llama3-8b", kind="layer", drop="none"):
    return lowered(ask(model, "h100-80", 1, kernels=kernels, seq_len=1024), "tp=2,dp=4", kind, drop)


@st.composite
def blocks(draw):
    """Any block of any model on any table, with a kind of recompute that has an effect."""
    kinds = ("embed", "layer", "head")
    model, kernels, kind = (draw(st.sampled_from(names)) for names in (MODELS, kernels_names(), kinds))
    drops = ["none", "full", *(f"selective[{name}]" for name in effective_names(kernels))]
    return sharded(kernels, model, kind, draw(st.sampled_from(drops)) if kind == "layer" else "none")


def run_of(block, pass_, source):
    """The only kernel of a pass that runs an operation made from this one, clones and sums apart."""
    (found,) = (
        run
        for run in block.runs
        if run.pass_ == pass_
        and source in {op.source for op in run.ops}
        and not run.ops[0].again
        and not all(isinstance(op.kind, Accumulate) for op in run.ops)
    )
    return found


def names_of(run):
    return [tensor.name for _, tensor in run.touched]


@pytest.mark.slow
@given(blocks())
def test_every_operation_runs_in_one_kernel_of_its_entry_which_touches_each_tensor_once(block):
    done = [op.name for run in block.runs for op in run.ops]
    computing = [op.name for op in block.block.select("micro_batch") if not isinstance(op.kind, Deliver | Collect)]
    assert Counter(done) == Counter(computing)
    owner = {name: group for group in block.block.fused for name in group.ops}
    for run in block.runs:
        assert Counter(names_of(run)).most_common(1)[0][1] == 1, run.ops
        assert len({(owner[op.source].ops, op.pass_, op.again) for op in run.ops}) == 1
        # The weights of layers but routers, and no others, are met by products in a format of their own.
        products = [block.block.op(op.source) for op in run.ops if isinstance(op.kind, Einsum)]
        weighted = [op.name != "router" and any(name.endswith(".weight") for name in op.inputs) for op in products]
        assert run.products == (bool(weighted) and all(weighted) and block.block.kind == "layer")
        assert run.experts == any("experts" in block.block.tensors[op.inputs[0]].dims for op in products)
    for group in block.block.fused:
        passes = [(run.pass_, isinstance(run.ops[0].kind, Accumulate)) for run in block.runs
                  if run.ops[0].source in group.ops]  # fmt: skip
        assert passes.count(("F", False)) == 1, "forward is one kernel"
        assert passes.count(("W", False)) <= 1, "the weight gradients of an entry are one kernel"


@pytest.mark.parametrize(
    ("kernels", "together"),
    [
        ("te", [{"q", "k", "v"}, {"o"}, {"up", "gate"}, {"down"}]),
        ("nxd", [{"q", "k", "v"}, {"o"}, {"up", "gate"}, {"down"}]),
        ("torch_cuda", [{name} for name in PRODUCTS]),
    ],
)
def test_weights_that_are_one_tensor_have_one_kernel_in_every_pass(kernels, together):
    for names in together:
        for pass_ in "FIW":
            run = run_of(sharded(kernels), pass_, min(names))
            assert {op.source for op in run.ops if isinstance(op.kind, Einsum)} == names
            assert {*names_of(run)} >= {f"{name}.weight" for name in names} or pass_ == "W"


def test_placeholders_add_to_their_sums_without_a_kernel_or_a_gradient_between():
    block = sharded("te")
    for product in PRODUCTS:
        run = run_of(block, "W", product)
        assert f"{product}.weight.sum" in {op.name for op in run.ops}
        assert {f"{product}.weight.grad", f"{product}.weight.sum"} <= set(names_of(run)), "read and written"
        assert f"{product}.d1" not in {name for one in block.runs for name in names_of(one)}
    summed = {op.source for run in block.runs for op in run.ops if isinstance(run.ops[0].kind, Accumulate)}
    assert summed == {"attn_norm", "mlp_norm"}, "no placeholder is there for the weights of norms"


@pytest.mark.parametrize("kernels", ["nxd", "torch_cuda", "megatron"])
def test_others_make_a_gradient_and_then_add_it_to_a_sum_which_is_a_state(kernels):
    block = sharded(kernels)
    for product in ("o", "down"):
        (add,) = (run for run in block.runs if f"{product}.weight.sum" in {op.name for op in run.ops})
        assert names_of(add) == [f"{product}.weight.grad", f"{product}.d1", f"{product}.weight.sum"]
        assert f"{product}.d1" in names_of(run_of(block, "W", product))
    fresh = {tensor.name for run in block.runs for _, tensor, _ in run.fresh}
    assert not {name for name in fresh if name.endswith((".weight", ".weight.sum", ".weight.grad"))}


class TestCopies:
    @pytest.mark.parametrize(("drop", "norm_passes"), [("full", ["I", "I"]), ("selective[CoreAttention]", ["F", "I"])])
    def test_a_compiled_graph_moves_copies_of_a_clone_but_not_its_scores(self, drop, norm_passes):
        block = sharded("nxd_core", drop=drop)
        eager = block_kernels(block.block, frozenset(sharded("nxd_core").sharding.kept_cuts)).runs
        for runs, has_scores in ((block.runs, False), (eager, True)):
            for run in (run for run in runs if run.ops[0].source == "attend"):
                copies = {name for name in names_of(run) if name.startswith("attend.copy")}
                keys_and_values, scores = {"attend.copy1", "attend.copy2"}, {"attend.copy3", "attend.copy4"}
                assert (keys_and_values <= copies) == (run.pass_ == "I"), "forward keeps nothing"
                assert (scores <= copies) == (run.pass_ == "I" and has_scores)
        norms = [run for run in block.runs if run.ops[0].source == "attn_norm" and "copy0" in str(names_of(run))]
        assert [run.pass_ for run in norms] == norm_passes

    def test_what_is_kept_beside_the_graph_is_written_forward_and_read_backward(self):
        block, head = sharded("nxd"), sharded("te", kind="head")
        for pass_ in "FI":
            assert {"attend.copy1", "attend.copy2"} <= set(names_of(run_of(block, pass_, "attend")))
            assert {"mlp_norm.copy0", "mlp_norm.copy2"} <= set(names_of(run_of(block, pass_, "mlp_norm")))
            assert "logits_fp32.copy0" in names_of(run_of(head, pass_, "loss")), "what is overwritten moves as its copy"
