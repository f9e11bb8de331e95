"""What the solver's tables send, keep and leave pending, for every card: people know these numbers."""

import functools
from collections import Counter
from dataclasses import replace

import pytest

from autoshard.layout.layout import Layout
from autoshard.layout.lower import lower
from autoshard.plan.lowering import ATOMS, NOMINAL_PRICE, lowered, nominal_sizes
from autoshard.plan.recompute import Recompute
from autoshard.search.bound.space import recompute_choices
from autoshard.spec.model_catalogue import load_model
from tests.cost.cases import EVERYONE, ask, candidate_of, distinct_models
from tests.slower import rest_is_slow
from tests.tabled import blocks_of

TP = ("kv", "rep")


@functools.cache
def sharded(model, *, sp=True, kind="layer", kernels="te", drop="none", without=()):
    """A block of a model at the tp at which keys and values have copies, if there is such a tp."""
    spec = load_model(model)
    tp = 2 * spec.num_kv_heads if spec.queries_per_kv_head > 1 else 4
    question = ask(model, "trn1.32xlarge", 1, kernels=kernels, seq_len=min(spec.max_positions, 2048))
    candidate = candidate_of(question, f"tp={tp},sp={str(sp).lower()}")
    solved = blocks_of(question, candidate, "nxd")
    blocks = replace(solved, atoms=frozenset({*EVERYONE} - {*without}) | solved.atoms & {*TP})
    found = blocks.block(kind, Recompute.parse(drop))
    return found.block, found.sharding


def counted(sharding, passes="FIW"):
    """How often each Collective stands in some passes."""
    return Counter(str(message.collective) for message in sharding.messages if message.pass_ in passes)


def over(counter, axis):
    return {name: count for name, count in counter.items() if name.endswith(f"/{axis}")}


@pytest.mark.parametrize("model", rest_is_slow(reversed(distinct_models()), 4, 4))
@pytest.mark.parametrize("sp", [False, True])
def test_messages_and_weights_speak_of_tensors_and_atoms_that_there_are(model, sp):
    for kind in ("embed", *load_model(model).layer_counts, "head"):
        block, sharding = sharded(model, sp=sp, kind=kind)
        for message in sharding.messages:
            tensor, collective = block.tensors[message.tensor], message.collective
            # no atom cuts twice, and all dims are the tensor's
            Layout(dims=tuple((dim, message.cuts.get(dim, ())) for dim in tensor.dims))
            assert set(message.cuts) <= set(tensor.dims) and set(collective.atoms) <= set(ATOMS)
            cutting = {atom for atoms in message.cuts.values() for atom in atoms}
            if collective.kind in ("all_gather", "reduce_scatter", "all_reduce"):
                assert not cutting & set(collective.atoms), "the message is stated where it is largest"
            assert not collective.dim or collective.dim in tensor.dims
        few = load_model(model).vocab < 1000  # for whom two messages cost more than all logits in one
        assert few or not [name for name in counted(sharding) if name.startswith("all_gather vocab")]
        assert {tensor.name for tensor in block.parameters} == set(sharding.parameter_cuts)
        for name, cuts in sharding.parameter_cuts.items():
            cut, pending = {atom for atoms in cuts.values() for atom in atoms}, set(sharding.parameter_pending[name])
            assert not cut & pending, name
            everyone = {*EVERYONE} - ({"cp"} if load_model(model).has_linear_layers else set())  # for which cp is 1
            assert cut | pending >= everyone, f"each rank saw other tokens than {name} needs"


@pytest.mark.parametrize(
    ("kernels", "drop", "repeated"),
    [
        # clones end at the last kept tensor, so that the last sum is not repeated
        ("torch_cuda", "full", {"all_gather seq/tp": 2, "reduce_scatter seq/tp": 1, "permute kv_seq/cp": 2}),
        # a clone that reads a gathered tensor gathers it again; the module runs to its end: its sum is scattered again
        ("te", "selective[mlp]", {"all_gather seq/tp": 1, "reduce_scatter seq/tp": 1}),
        ("te", "selective[core_attn]", {"permute kv_seq/cp": 2}),
    ],
)
def test_recompute_repeats_the_messages_of_what_it_runs_again(kernels, drop, repeated):
    (_, plain), (_, again) = sharded("llama3-8b", kernels=kernels), sharded("llama3-8b", kernels=kernels, drop=drop)
    assert counted(again, "I") - counted(plain, "I") == repeated


@pytest.mark.parametrize(
    ("model", "cluster", "kernels"),
    [
        ("tiny-deepseek", "h100-80", "torch_cuda"),
        ("tiny-mixtral", "h100-80", "mcore"),
        ("llama3-8b", "trn1.32xlarge", "nxd_core"),
    ],
)
def test_a_shared_forward_pass_ends_in_the_program_of_a_lowering_from_the_start(model, cluster, kernels):
    question = replace(ask(model, cluster, 1), kernels=kernels)
    step, blocks = question.step, blocks_of(question, candidate_of(question, "tp=2"), question.cluster.engine)
    facts = (nominal_sizes(blocks.atoms), NOMINAL_PRICE)
    for kind in step.model.layer_counts:
        cutting, lengths = blocks.cut_of(kind), set[int]()
        keeps, boundary = step.platform.keeps_gathered, cutting.boundary
        for (drop,) in recompute_choices(kernels, question.cluster):
            shared = lowered(step, kind, drop, cutting, blocks.atoms)
            block = step.block(kind, drop.on_device)
            assert shared == lower(block, cutting.block(kind), *facts, boundary=boundary, keeps_gathered=keeps)
            lengths.add(len(shared.instructions))
        assert len(lengths) > 2, "kinds of recompute differ"
