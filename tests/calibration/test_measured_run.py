"""From a row to a question: every column has its place, what is left open is assumed and told."""

from typing import Any

import pytest

from autoshard.calibration.measured_run import MeasuredRun, run_of, words
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.errors import InputError
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster_catalogue import cluster_names
from autoshard.spec.kernels import kernels_names
from autoshard.spec.workload import Precision
from tests.calibration.measured_cases import ARCH, DATA, SMALL

NEURON = {"framework": "neuronx-distributed", "platform": "trn1", "chips": None, "nodes": 1, "dp": 8}


def made(**change: Any) -> MeasuredRun:
    return run_of(MeasuredRow.read({**SMALL, **change}))


def test_every_column_has_its_place():
    run = made(recompute="full", sharding="none", precision="mixed FP16", sp=False, micro_batch=2)
    assert str(run.candidate) == "tp=2,pp=2,dp=2,mbs=2,sp=false,zero=0,recompute=full,kernels=mcore"
    assert (run.cluster.name, run.cluster.num_ranks) == ("h100-80", 8)
    assert (run.workload.seq_len, run.workload.global_batch, run.workload.precision.weights) == (256, 16, "fp16")
    model = run.model
    assert (model.num_layers, model.hidden, model.ffn, model.num_heads, model.num_kv_heads) == (4, 512, 1024, 8, 4)
    assert (model.vocab, model.gated_mlp, model.tied_embeddings, model.norm) == (1000, True, False, "rms")
    assert run.assumed.keys() == {"arch", "platform"}
    chunks, ring = made(vp=2, pipeline_schedule="interleaved 1F1B"), made(cp=2, dp=1)
    assert (chunks.candidate.vp, chunks.candidate.schedule) == (2, "interleaved")
    assert made(vp=2).candidate.schedule == "interleaved", "1F1B of several chunks"
    assert (ring.candidate.cp, ring.candidate.cp_order, ring.assumed["cp_kind"]) == (2, "zigzag", "ring")


def test_every_row_of_this_repository_is_understood_whatever_was_measured():
    for row in measured_rows(DATA).rows.values():
        run = run_of(row)
        assert run == run_of(row.unmeasured) and run.cluster.num_ranks == run.candidate.num_ranks


def test_every_word_means_something_that_exists():
    assert {word.means for word in words("platform")} <= {*cluster_names()}
    assert {word.means for column in ("framework", "kernels") for word in words(column)} <= {*kernels_names()}
    assert {word.means for word in words("sharding")} == {"0", "1", "3"}
    for word in words("recompute"):
        assert str(Recompute.parse(word.means)).split("[")[0] == word.means.split("[")[0]
    for word in words("precision"):
        assert made(precision=word.says[0]).workload.precision.weights in ("bf16", "fp16", "fp32")


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("Autocast:BF16+FP32Optimizer", "bf16 bf16 fp32 fp32 fp32 None"),
        ("BF16+SR", "bf16 bf16 bf16 None bf16 None"),
        ("mixed FP16", "fp16 fp16 fp16 fp32 fp32 None"),
        ("float8 compile asyncTP", "bf16 bf16 fp32 fp32 fp32 fp8"),
        (None, "bf16 bf16 fp32 fp32 fp32 None"),
    ],
)
def test_precisions(text: str | None, formats: str):
    found: Precision = made(precision=text).workload.precision
    parts = (found.weights, found.activations, found.gradients, found.masters, found.moments, found.products)
    assert " ".join(map(str, parts)) == formats


@pytest.mark.parametrize(
    ("text", "framework", "meant"),
    [
        ("full (uniform, 1 layer)", "neuronx-nemo-megatron", "full"),
        ("selective (core attention)", "Megatron-LM", "selective[attend]"),
        ("selective", "Megatron-LM", "selective[attend]"),
        ("selective[CoreAttention,LlamaMLP]", "neuronx-distributed", "selective[CoreAttention,LlamaMLP]"),
        ("full:3", None, "full:3"),
        (" Unknown ", None, "none"),
    ],
)
def test_recomputes(text: str, framework: str | None, meant: str):
    run = made(recompute=text, framework=framework)
    assert [str(one) for one in run.candidate.recompute] == [meant]
    assert ("recompute" in run.assumed) == ("nknown" in text)


def test_torchtitan_keeps_every_second_product():
    ((policy,),) = {
        made(recompute=text, framework="torchtitan").candidate.recompute for text in ("selective", "per-op selective")
    }
    assert {"k", "o", "up"} <= set(policy.ops)
    assert not {"q", "v", "attend", "gate", "down"} & set(policy.ops)


def test_kernels_follow_the_framework():
    assert made().candidate.kernels == "mcore"
    assert made(framework="Megatron-LM + TransformerEngine 2.11").candidate.kernels is None, "what h100-80 usually runs"
    assert made(framework="Megatron-LM").candidate.kernels == "megatron"
    titan = made(framework="torchtitan", precision="bf16")
    assert (titan.candidate.kernels, "compile" in titan.assumed["framework"]) == ("torch_compiled", True)
    assert "usual" in made(framework="my own").assumed["framework"]


@pytest.mark.parametrize(
    ("precision", "kernels", "products"),
    [
        ("bf16 eager", "torch_cuda", None),
        ("float8 compile", "torch_compiled", "fp8"),
        ("float8 compile asyncTP", "torch_async_tp", "fp8"),
    ],
)
def test_the_format_of_a_torchtitan_run_says_how_its_kernels_were_made(precision: str, kernels: str, products: Any):
    run = made(framework="torchtitan", precision=precision)
    assert (run.candidate.kernels, run.workload.precision.products) == (kernels, products)
    assert "framework" not in run.assumed, "the format says it"
    assert ("products" in run.assumed.get("precision", "")) == (products is not None)
    assert made(precision=precision).candidate.kernels == "mcore", "of no other framework"


@pytest.mark.parametrize(("seq_len", "kernels"), [(8191, "nxd_core"), (8192, None)])
def test_flash_attention_on_neuron_comes_with_8192_tokens(seq_len: int, kernels: str | None):
    run = made(**NEURON, seq_len=seq_len)
    assert run.candidate.kernels == kernels
    assert ("flash" in run.assumed.get("framework", "")) == (kernels is not None)
    assert made(**{**NEURON, "cp": 2, "dp": 4}, seq_len=4096).candidate.cp_order == "contiguous"


def test_runs_of_one_publisher_are_placed_on_its_machine():
    named = made(framework="Megatron-DeepSpeed", platform="a100")
    assert named.cluster.name == "a100-800g" and "800" in named.assumed["platform"]
    assert made(framework="Megatron-LM", platform="a100").cluster.name == "a100-80"
    assert made(framework="torchtitan").cluster.name == "h100-96"
    assert made(platform="h200").assumed["platform"] and "platform" not in made(platform="h100-80").assumed


def test_what_is_left_open_is_assumed_and_told():
    open_ = ("micro_batch", "pp", "cp", "ep", "vp", "dp", "sp", "recompute", "sharding", "precision", "framework")
    run = made(**dict.fromkeys([*open_, "pipeline_schedule", "nodes"]))
    assert str(run.candidate) == "tp=2,pp=1,dp=4"
    assert run.cluster.num_nodes == 1
    told = {"dp": "4", "sp": "true", "micro_batch": "1", "recompute": "none", "sharding": "zero=1"}
    assert told.items() <= run.assumed.items()
    assert run.assumed.keys() == {*told, "arch", "platform", "pp", "cp", "ep", "precision", "framework"}


def test_an_architecture_is_completed():
    run = made(arch={"layers": 2, "hidden": 1024, "gated_mlp": False})
    model = run.model
    assert (model.ffn, model.num_heads, model.num_kv_heads, model.vocab) == (4096, 8, 8, 50304)
    assert (model.norm, model.positions, model.qkv_bias, model.tied_embeddings) == ("layer", "learned", True, True)
    names = {"arch", "arch.ffn", "arch.heads", "arch.kv_heads", "arch.vocab", "arch.tied_embed"}
    assert {name for name in run.assumed if name.startswith("arch")} == names
    llama = made(arch={"layers": 2, "hidden": 4096}).model
    assert (llama.ffn, llama.gated_mlp, llama.tied_embeddings) == (11008, True, False)


def test_experts_and_cards():
    run = made(arch={**ARCH, "experts": 4}, ep=2, dp=2)
    assert (run.model.num_experts, run.model.experts_per_token, run.candidate.ep) == (4, 2, 2)
    assert run.assumed["arch.experts_per_token"] == "2"
    run = made(arch=None, model="llama3-8b")
    assert (run.model.hidden, run.assumed["arch"]) == (4096, "the model card llama3-8b")


@pytest.mark.parametrize(
    ("change", "num_ranks"),
    [
        ({"chips": 2, "tp": 2, "pp": 1, "dp": 1}, 2),  # a part of a node has only its chips
        ({"platform": "trn1", "chips": 2, "nodes": 1, "tp": 4, "pp": 1, "dp": 1}, 4),
        ({"nodes": 2, "chips": None, "dp": 4}, 16),
        ({"platform": "trn2", "lnc": 1, "chips": 16, "tp": 128, "pp": 1, "dp": 1}, 128),
        ({"platform": "trn2", "chips": 16, "tp": 64, "pp": 1, "dp": 1}, 64),
    ],
)
def test_chips_nodes_and_logical_cores(change: dict[str, Any], num_ranks: int):
    assert made(**change).cluster.num_ranks == num_ranks


def test_a_run_that_our_schedules_cannot_do_gets_the_nearest_shape():
    odd = made(global_batch_seqs=17)
    assert (odd.workload.global_batch, odd.assumed["global_batch_seqs"]) == (18, "18")
    rough = made(vp=2, pipeline_schedule="interleaved 1F1B", global_batch_seqs=6)
    assert (rough.candidate.vp, rough.candidate.schedule) == (1, "1f1b")
    assert "micro-batches" in rough.assumed["vp"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dp": 3}, "dp: tp*pp*cp*dp is 12, but 1 x h100-80 has 8 ranks"),
        ({"platform": "zork"}, "platform: cannot read 'zork'."),
        ({"recompute": "some"}, "recompute: 'some' is not a recompute."),
        ({"chips": 9}, "chips: 9 chips on 1 nodes; a node of h100-80 has 8"),
        ({"lnc": 2}, "lnc: h100-80 has no logical NeuronCore configuration."),
        ({"arch": None}, "arch: its architecture is not known"),
        ({"arch": {"layers": 4}, "model": None}, "arch: its architecture is not known"),
        ({"arch": {**ARCH, "mamba": True}}, "arch: its architecture has mamba, which autoshard does not model"),
        ({"sharding": "zork"}, "sharding: cannot read 'zork'. "),
        ({"precision": "zork"}, "precision: cannot read 'zork'. "),
        ({"pipeline_schedule": "1f2b"}, "pipeline_schedule: cannot read '1f2b'. Did you mean 1f1b?"),
        ({"arch": {**ARCH, "layers": "4"}}, "arch.layers: expected a whole number, found '4'"),
        ({"arch": {**ARCH, "kv_heads": 3}}, "arch.kv_heads: 8 query heads cannot share 3"),
        ({"seq_len": 2**40}, "seq_len: must be at most"),
    ],
)
def test_wrong_columns_are_faults(change: dict[str, Any], says: str):
    with pytest.raises(InputError) as caught:
        made(**change)
    assert str(caught.value.faults[0]).startswith(says)


def test_all_faults_of_a_row_come_at_once():
    with pytest.raises(InputError) as caught:
        made(recompute="x", sharding="x", precision="x", arch={**ARCH, "layers": 0})
    assert [fault.where for fault in caught.value.faults] == ["arch.layers", "precision", "recompute", "sharding"]
