import functools
from collections import Counter
from dataclasses import replace

import pytest

from autoshard.graph.decoder import decoder_graph
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.recompute import recompute
from autoshard.layout.layout import Layout
from autoshard.layout.natural import natural_sharding
from autoshard.spec.kernels import kernels_names, load_kernels
from autoshard.spec.mesh import ATOMS
from autoshard.spec.model_catalogue import load_model, model_names
from autoshard.spec.workload import Precision, Workload

DENSE = ("llama3-8b", "gpt2-xl", "gpt-neox-20b", "qwen3-8b")
EXPERTS = ("edp", "cp")
EVERYONE = ("edp", "ep", "cp")
TP = ("kv", "rep")


@functools.cache
def graph_of(model, kernels="te"):
    workload = Workload(seq_len=2048, global_batch=64, precision=Precision.named("bf16"))
    return decoder_graph(load_model(model), workload, load_kernels(kernels), micro_batch=1)


def sharded(model, *, sp=True, keeps=False, kind="layer", kernels="te", drop=()):
    block = graph_of(model, kernels).block(kind)
    if drop is None or drop:
        block = recompute(block, load_kernels(kernels), drop)
    return block, natural_sharding(block, sequence_parallel=sp, keeps_gathered=keeps)


def counted(sharding, passes="FIW"):
    """How often each Collective stands in some passes."""
    return Counter(str(message.collective) for message in sharding.messages if message.pass_ in passes)


def over(counter, axis):
    return {name: count for name, count in counter.items() if name.endswith(f"/{axis}")}


@pytest.mark.parametrize("model", DENSE)
class TestAMegatronBlockComesOut:
    def test_with_gathered_inputs_kept_there_are_4_gathers_and_4_scatters(self, model):
        _, sharding = sharded(model, keeps=True)
        assert over(counted(sharding), "tp") == {"all_gather seq/tp": 4, "reduce_scatter seq/tp": 4}
        assert over(counted(sharding, "F"), "tp") == {"all_gather seq/tp": 2, "reduce_scatter seq/tp": 2}
        assert not counted(sharding, "W")

    def test_without_keeping_them_weight_gradients_gather_the_inputs_again(self, model):
        _, sharding = sharded(model)
        assert over(counted(sharding), "tp") == {"all_gather seq/tp": 6, "reduce_scatter seq/tp": 4}
        assert counted(sharding, "W") == {"all_gather seq/tp": 2}

    def test_without_sequence_parallelism_there_are_2_sums_forward_and_2_backward(self, model):
        for keeps in (False, True):
            _, sharding = sharded(model, sp=False, keeps=keeps)
            assert over(counted(sharding, "F"), "tp") == {"all_reduce /tp": 2}
            assert over(counted(sharding, "I"), "tp") == {"all_reduce /tp": 2}
            assert not counted(sharding, "W")

    def test_gradients_of_keys_and_values_are_summed_over_their_replicas(self, model):
        _, sharding = sharded(model)
        assert over(counted(sharding), "rep") == {"all_reduce /rep": 2}
        summed = {message.tensor[0] for message in sharding.messages if message.collective.atoms == ("rep",)}
        assert summed == {"k", "v"}

    def test_keys_and_values_go_around_the_ring_and_their_gradients_with_them(self, model):
        _, sharding = sharded(model)
        assert over(counted(sharding, "F"), "cp") == {"permute kv_seq/cp": 2}
        assert over(counted(sharding, "I"), "cp") == {"permute kv_seq/cp": 4}


@pytest.mark.parametrize("model", model_names())
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", ["embed", "layer", "head"])
class TestEveryCard:
    def test_messages_speak_of_tensors_and_atoms_that_there_are(self, model, sp, kind):
        block, sharding = sharded(model, sp=sp, kind=kind)
        for message in sharding.messages:
            tensor, collective = block.tensors[message.tensor], message.collective
            # no atom cuts twice, and all dims are the tensor's
            Layout(dims=tuple((dim, message.cuts.get(dim, ())) for dim in tensor.dims))
            assert {dim for dim, atoms in message.cuts.items() if atoms} <= set(tensor.dims)
            assert set(collective.atoms) <= set(ATOMS) - {"pp"}
            assert len(set(collective.atoms)) == len(collective.atoms) > 0
            assert (collective.kind == "all_reduce") == (collective.dim is None)
            cutting = {atom for atoms in message.cuts.values() for atom in atoms}
            if collective.kind in ("all_gather", "reduce_scatter", "all_reduce"):
                assert not cutting & set(collective.atoms), "the message is stated where it is largest"
            if collective.dim:
                assert collective.dim in tensor.dims

    def test_no_logits_are_ever_sent(self, model, sp, kind):
        block, sharding = sharded(model, sp=sp, kind=kind)
        assert not [found for found in sharding.messages if "vocab" in block.tensors[found.tensor].dims]

    def test_every_weight_is_cut_and_awaits_every_atom_that_does_not_cut_it_or_repeat_its_work(self, model, sp, kind):
        block, sharding = sharded(model, sp=sp, kind=kind)
        assert {tensor.name for tensor in block.parameters} == set(sharding.parameter_cuts)
        for tensor in block.parameters:
            cut = {atom for atoms in sharding.parameter_cuts[tensor.name].values() for atom in atoms}
            pending = sharding.parameter_pending[tensor.name]
            assert not cut & set(pending), tensor.name
            assert cut | set(pending) >= set(EVERYONE), f"each rank saw other tokens than {tensor.name} needs"

    def test_every_operation_cuts_with_each_atom_once(self, model, sp, kind):
        _, sharding = sharded(model, sp=sp, kind=kind)
        for name, cuts in sharding.op_cuts.items():
            if "slots" not in cuts:  # a dispatch sees tokens and slots, each in its own cut
                cutting = [atom for atoms in cuts.values() for atom in atoms]
                assert len(set(cutting)) == len(cutting), name


@pytest.mark.parametrize("kernels", kernels_names())
@pytest.mark.parametrize("drop", [(), None])
def test_whatever_is_kept_has_a_cut(kernels, drop):
    for model in (*DENSE, "mixtral-8x7b"):
        block, sharding = sharded(model, kernels=kernels, drop=drop, keeps=load_kernels(kernels).keeps_gathered)
        for entry in block.saved:
            assert set(sharding.saved_cuts(entry)) <= set(entry.tensor.dims)


def test_what_is_kept_as_gathered_is_whole_over_tp_and_else_a_piece():
    for keeps, cut in ((True, ("cp",)), (False, ("cp", *TP))):
        block, sharding = sharded("llama3-8b", keeps=keeps)
        entry = next(entry for entry in block.saved if entry.storage == "attn_norm")
        assert sharding.saved_cuts(entry)["seq"] == cut


def test_norms_await_tp_where_each_rank_saw_its_own_piece_of_the_sequence():
    for sp, pending in ((True, (*EVERYONE, *TP)), (False, EVERYONE)):
        _, layer = sharded("llama3-8b", sp=sp)
        _, head = sharded("llama3-8b", sp=sp, kind="head")
        assert layer.parameter_pending["attn_norm.weight"] == pending
        assert layer.parameter_pending["mlp_norm.weight"] == pending
        assert head.parameter_pending["final_norm.weight"] == pending
        assert layer.parameter_pending["q.weight"] == EVERYONE


def test_a_bias_takes_the_gradient_that_is_summed_for_its_norm_anyway():
    for sp, pending in ((True, (*EVERYONE, *TP)), (False, EVERYONE)):
        for kind, name in (("layer", "attn_norm"), ("head", "final_norm")):
            _, sharding = sharded("gpt2-xl", sp=sp, kind=kind)
            assert sharding.parameter_pending[f"{name}.bias"] == pending
            assert sharding.parameter_pending[f"{name}.weight"] == pending


def test_norms_of_heads_await_the_atoms_that_cut_the_heads():
    _, sharding = sharded("qwen3-8b", sp=False)
    assert sharding.parameter_pending["q_norm.weight"] == (*EVERYONE, *TP)
    assert sharding.parameter_pending["k_norm.weight"] == (*EVERYONE, "kv")


def test_the_loss_sums_one_number_a_token():
    block, sharding = sharded("llama3-8b", sp=False, kind="head")
    forward = [message for message in sharding.messages if message.pass_ == "F"]
    assert [str(message.collective) for message in forward] == ["all_reduce /tp"] * 3
    assert {block.tensors[message.tensor].dims for message in forward} == {("batch", "seq")}


class TestExperts:
    def test_tokens_go_to_their_experts_and_back_in_both_directions(self):
        for sp in (False, True):
            _, sharding = sharded("mixtral-8x7b", sp=sp)
            assert over(counted(sharding, "F"), "ep") == {"all_to_all experts/ep": 2}
            assert over(counted(sharding, "I"), "ep") == {"all_to_all experts/ep": 2}

    def test_weights_of_experts_await_only_the_ranks_that_hold_the_same_experts(self):
        _, sharding = sharded("mixtral-8x7b")
        for name in ("gate", "up", "down"):
            assert sharding.parameter_pending[f"{name}.weight"] == EXPERTS
            assert sharding.parameter_cuts[f"{name}.weight"]["experts"] == ("ep",)
        assert sharding.parameter_pending["q.weight"] == EVERYONE

    def test_only_weights_that_meet_the_gathered_tokens_gather_them_again(self):
        _, sharding = sharded("mixtral-8x7b")
        again = [message.tensor for message in sharding.messages if message.pass_ == "W"]
        assert again == ["attn_in"], "the router's weights read the piece of the sequence"

    def test_kept_tokens_stay_a_piece_because_only_the_forward_reads_them_gathered(self):
        block, sharding = sharded("mixtral-8x7b", keeps=True)
        entry = next(entry for entry in block.saved if entry.storage == "mlp_norm")
        assert sharding.saved_cuts(entry)["seq"] == ("cp", *TP)


class TestRecompute:
    def test_full_recompute_repeats_the_messages_of_the_forward(self):
        for sp in (False, True):
            _, plain = sharded("llama3-8b", sp=sp)
            _, full = sharded("llama3-8b", sp=sp, drop=None)
            assert counted(full, "I") == counted(plain, "I") + counted(plain, "F")
            assert counted(full, "F") == counted(plain, "F")
            assert counted(full, "W") == counted(plain, "W")

    def test_where_clones_end_at_the_last_kept_tensor_the_last_sum_is_not_repeated(self):
        _, plain = sharded("llama3-8b", kernels="torch_cuda", keeps=True)
        _, full = sharded("llama3-8b", kernels="torch_cuda", keeps=True, drop=None)
        repeated = counted(full, "I") - counted(plain, "I")
        assert over(repeated, "tp") == {"all_gather seq/tp": 2, "reduce_scatter seq/tp": 1}

    def test_a_clone_that_reads_a_gathered_tensor_gathers_it_again_unless_it_is_kept(self):
        for keeps, gathers in ((False, 1), (True, 0)):
            _, plain = sharded("llama3-8b", keeps=keeps)
            _, selective = sharded("llama3-8b", keeps=keeps, drop=("mlp",))
            more = over(counted(selective, "I") - counted(plain, "I"), "tp")
            # the module runs to its end, so its sum is scattered again too
            assert (
                more == {"all_gather seq/tp": gathers, "reduce_scatter seq/tp": 1}
                if gathers
                else {"reduce_scatter seq/tp": 1}
            )

    def test_attention_alone_repeats_its_ring_and_nothing_over_tp(self):
        _, plain = sharded("llama3-8b")
        _, selective = sharded("llama3-8b", drop=("core_attn",))
        assert counted(selective, "I") - counted(plain, "I") == {"permute kv_seq/cp": 2}


def test_delivers_change_nothing_but_the_cut():
    block, sharding = sharded("llama3-8b")
    for op in block.select("micro_batch", "F"):
        if isinstance(op.kind, Deliver) and not op.kind.rename and op.inputs[0] in sharding.tensor_cuts:
            assert replace(block.tensors[op.inputs[0]], name="") == replace(block.tensors[op.outputs[0]], name="")
            assert sharding.tensor_cuts[op.inputs[0]] == sharding.tensor_cuts[op.outputs[0]]
