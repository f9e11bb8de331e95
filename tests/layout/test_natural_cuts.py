import functools
from dataclasses import replace

import pytest

from autoshard.graph.decoder import decoder_graph
from autoshard.graph.recompute import recompute
from autoshard.layout.layout import Layout
from autoshard.layout.legal import cut_operations, faults
from autoshard.layout.lower import lower
from autoshard.layout.natural import natural_sharding
from autoshard.layout.natural_cuts import natural_boundary, natural_cuts
from autoshard.layout.redistribute import bytes_price
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import ATOMS
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import Precision, Workload

SIZES = dict.fromkeys((atom for atom in ATOMS if atom != "pp"), 2)


@functools.cache
def block_of(model, kind):
    workload = Workload(seq_len=64, global_batch=8, precision=Precision.named("bf16"))
    return decoder_graph(load_model(model), workload, load_kernels("te"), micro_batch=8).block(kind)


@pytest.mark.parametrize("model", model_names())
@pytest.mark.parametrize("kind", ["embed", "layer", "head"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
class TestEveryCard:
    def test_every_forward_operation_is_cut_legally(self, model, kind, sequence_parallel):
        block = block_of(model, kind)
        cuts = natural_cuts(block, sequence_parallel)
        assert list(cuts) == [op.name for op in cut_operations(block)]
        assert not faults(block, cuts, list(SIZES))

    def test_only_dims_that_are_tied_or_follow_a_queue_differ_from_the_natural_sharding(
        self, model, kind, sequence_parallel
    ):
        block = block_of(model, kind)
        natural = natural_sharding(block, sequence_parallel=sequence_parallel, keeps_gathered=True).op_cuts
        for name, cuts in natural_cuts(block, sequence_parallel).items():
            op = block.op(name)
            if not op.kind.tied_dims() and not op.kind.whole_dims():
                assert cuts == {dim: atoms for dim, atoms in natural[name].items() if atoms}


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "mixtral-8x7b"])
@pytest.mark.parametrize("kind", ["embed", "layer", "head"])
def test_it_can_be_lowered(model, kind):
    block = block_of(model, kind)
    options = {"boundary": natural_boundary(True), "keeps_gathered": True}
    program = lower(block, natural_cuts(block, True), SIZES, bytes_price(1.0, SIZES), **options)
    assert {f"{tensor.name}.sum" for tensor in block.parameters} <= set(program.results)


def test_keys_lie_on_the_ranks_as_queries_do():
    cuts = natural_cuts(block_of("llama3-8b", "layer"), True)
    assert cuts["attend"] == {
        "batch": ("edp", "ep"), "seq": ("cp",), "kv_seq": ("cp",), "kv_heads": ("kv",), "q_group": ("rep",)
    }  # fmt: skip


@pytest.mark.parametrize("name", ["queue", "dispatch", "combine"])
def test_slots_belong_to_the_tokens_of_a_rank(name):
    for sequence_parallel in (False, True):
        cuts = natural_cuts(block_of("mixtral-8x7b", "layer"), sequence_parallel)[name]
        assert cuts == {"batch": ("edp", "ep"), "seq": ("cp",), "slots": ("edp", "ep", "cp")}


def test_experts_are_cut_where_they_compute():
    cuts = natural_cuts(block_of("mixtral-8x7b", "layer"), True)["up"]
    assert cuts["experts"] == ("ep",) and cuts["slots"] == ("edp", "cp")


def test_clones_need_no_cuts_of_their_own():
    block = block_of("llama3-8b", "layer")
    assert natural_cuts(recompute(block, load_kernels("te"), None), True) == natural_cuts(block, True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_boundary_is_where_residual_additions_are_cut(sequence_parallel):
    added = natural_cuts(block_of("llama3-8b", "layer"), sequence_parallel)["mlp_add"]
    boundary = natural_boundary(sequence_parallel)
    assert {dim: set(atoms) for dim, atoms in added.items()} == {dim: set(atoms) for dim, atoms in boundary.items()}
    text = "[batch/dp, seq/cp.tp, hidden]" if sequence_parallel else "[batch/dp, seq/cp, hidden]"
    assert dict(Layout.parse(text).dims) == {**boundary, "hidden": ()}


def test_names_of_operations_do_not_matter():
    block = block_of("mixtral-8x7b", "layer")
    renamed = {op.name: f"op{number}" for number, op in enumerate(block.ops)}
    ops = tuple(replace(op, name=renamed[op.name], source=renamed.get(op.source, op.source)) for op in block.ops)
    fused = tuple(replace(group, ops=tuple(renamed[name] for name in group.ops)) for group in block.fused)
    cuts = natural_cuts(replace(block, ops=ops, fused=fused), True)
    assert cuts == {renamed[name]: found for name, found in natural_cuts(block, True).items()}
