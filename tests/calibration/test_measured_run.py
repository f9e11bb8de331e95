"""From a row to a question: every column has its place; what is left open is assumed and said."""

from typing import Any

import pytest

from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import MeasuredRow, measured_rows
from autoshard.calibration.words import translated
from autoshard.errors import InputError
from autoshard.plan.candidate import parse_pins
from tests.calibration.measured_cases import ARCH, DATA, SMALL

NEURON = {"framework": "neuronx-distributed", "platform": "trn1", "chips": None, "nodes": 1, "dp": 8}
TITAN = {"framework": "torchtitan"}
MIXTURE = {"arch": {**ARCH, "experts": 4}}


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
    assert run.assumed.keys() == {"arch", "platform", "precision"}


def test_every_row_of_this_repository_is_understood_whatever_was_measured():
    for row in measured_rows(DATA).rows.values():
        run = run_of(row)
        assert run == run_of(row.unmeasured) and run.cluster.num_ranks == run.candidate.num_ranks


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
    found = made(precision=text).workload.precision
    names = ("weights", "activations", "gradients", "masters", "moments", "products")
    assert " ".join(str(getattr(found, name)) for name in names) == formats


@pytest.mark.parametrize(
    ("change", "layout", "assumed"),
    [
        (
            {"vp": 2, "pipeline_schedule": "interleaved 1F1B"},
            "vp=2,schedule=interleaved,kernels=mcore",
            "pipeline_schedule",
        ),
        ({"vp": 2}, "vp=2,schedule=interleaved,kernels=mcore", ""),  # 1F1B of several chunks
        ({"cp": 2, "dp": 1}, "cp=2,dp=1,cp_order=zigzag,kernels=mcore", "cp_kind"),
        ({"recompute": "full (uniform, 1 layer)"}, "recompute=full,kernels=mcore", ""),
        ({"recompute": "selective (core attention)"}, "recompute=selective[attend],kernels=mcore", ""),
        ({"recompute": "full:3", "framework": None}, "recompute=full:3", "framework"),
        ({"recompute": " Unknown "}, "kernels=mcore", "recompute"),
        ({"framework": "Megatron-LM + TransformerEngine 2.11"}, "kernels=te", ""),
        ({"framework": "Megatron-LM"}, "kernels=megatron", ""),
        ({"framework": "my own"}, "", "framework"),
        ({**TITAN, "precision": "bf16"}, "kernels=torch_compiled", "framework"),
        # the format of a run of torchtitan, and of no other framework, says how its kernels were made
        ({**TITAN, "precision": "bf16 eager"}, "kernels=torch_cuda", "precision"),
        ({**TITAN, "precision": "float8 compile asyncTP"}, "kernels=torch_async_tp", "precision"),
        ({"precision": "bf16 eager"}, "kernels=mcore", "precision"),
        # flash attention on Neuron comes with 8192 tokens
        ({**NEURON, "seq_len": 8191}, "dp=8,kernels=nxd_core", "framework"),
        ({**NEURON, "seq_len": 8192}, "dp=8", ""),
        ({**NEURON, "cp": 2, "dp": 4, "seq_len": 4096}, "cp=2,dp=4,kernels=nxd_core", "framework cp_kind"),
        # experts per token, where a row does not say
        (
            {"arch": {**ARCH, "experts": 4}, "ep": 2},
            "ep=2,kernels=mcore,fold=none",
            "arch.experts_per_token expert_imbalance",
        ),
        # ranks of tp hold experts of their own where groups for cut experts are too many
        ({**MIXTURE, "ep": 4}, "ep=2,kernels=mcore,fold=tp", "arch.experts_per_token expert_imbalance etp"),
        (
            {**MIXTURE, "ep": 2, "framework": "Megatron-Core via Pai-Megatron-Patch"},
            "kernels=mcore,fold=tp",
            "arch.experts_per_token expert_imbalance etp",
        ),
        (
            {**MIXTURE, "ep": 2, "inferred": {"routing": "forced balance, stated"}},
            "ep=2,kernels=mcore,fold=none",
            "arch.experts_per_token expert_imbalance",
        ),
        # a library that a note names
        (
            {**MIXTURE, "ep": 2, "inferred": {"overlap": "zero overlap; DeepEP"}},
            "ep=2,kernels=mcore+deepep,fold=none",
            "arch.experts_per_token expert_imbalance kernels",
        ),
        (
            {**MIXTURE, "ep": 2, "inferred": {"overlap": "all-to-all dispatcher, no DeepEP"}},
            "ep=2,kernels=mcore,fold=none",
            "arch.experts_per_token expert_imbalance",
        ),
        (
            {**MIXTURE, "ep": 2, "inferred": {"dispatcher": "HybridEP, 16 SMs"}},
            "ep=2,kernels=mcore+hybridep,fold=none",
            "arch.experts_per_token expert_imbalance kernels",
        ),
        ({**NEURON, "seq_len": 8192, "framework": NEURON["framework"] + " DeepEP"}, "dp=8", ""),
        (
            {"recompute": "selective: layernorm, moe activation"},
            "recompute=selective[act,attn_norm,mlp_norm,product],kernels=mcore",
            "",
        ),
        # where the embedding and the head count as layers
        ({"arch": {**ARCH, "layers": 2}, "pp": 4, "tp": 1}, "tp=1,pp=4,stages=0/1*2/0,kernels=mcore", "stages"),
        ({"arch": {**ARCH, "layers": 3}, "pp": 4, "tp": 1}, "tp=1,pp=4,stages=1*3/0,kernels=mcore", "stages"),
        # a run that our schedules cannot do gets the nearest shape
        ({"global_batch_seqs": 17}, "kernels=mcore", "global_batch_seqs"),
        ({"vp": 2, "global_batch_seqs": 6}, "kernels=mcore", "vp"),
    ],
)
def test_words_of_publishers_mean_a_layout_and_what_they_leave_open_is_assumed(
    change: dict[str, Any], layout: str, assumed: str
):
    run = made(**change)
    expected = {**dict(parse_pins("tp=2,pp=2,dp=2")), **(dict(parse_pins(layout)) if layout else {})}
    assert dict(parse_pins(str(run.candidate))) == expected
    assert run.assumed.keys() - {"arch", "platform"} == {*assumed.split()}


def test_torchtitan_keeps_every_second_product():
    ((policy,),) = {made(**TITAN, recompute=text).candidate.recompute for text in ("selective", "per-op selective")}
    assert {"k", "o", "up"} <= set(policy.ops)
    assert not {"q", "v", "attend", "gate", "down"} & set(policy.ops)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({"precision": "FP8 (tensorwise)"}, {"precision": "bf16,products=fp8"}),
        ({"precision": "Autocast:BF16+SR"}, {"precision": "bf16-sr,gradients=bf16,moments=bf16"}),
        ({"precision": "fp16,gradients=fp32"}, {"precision": "fp16,gradients=fp32"}),
        ({"platform": "DGX-H100"}, {"platform": "h100-80"}),
        ({"platform": "A100 SXM4 40GB"}, {"platform": "a100-40"}),
        ({"sharding": "Distributed Optimizer (ZeRO-1)"}, {"sharding": "ZeRO-1"}),
        ({"sharding": "FSDP"}, {"sharding": "ZeRO-3"}),
        ({"recompute": "Selective (core_attn)"}, {"recompute": "selective[attend]"}),
        ({"framework": "TransformerEngine with Flash-Attention 2"}, {"kernels": "te", "flash_attention": True}),
        ({**NEURON, "flash_attention": True, "seq_len": 4096}, {"kernels": "nxd"}),
        ({**NEURON, "flash_attention": False, "seq_len": 8192}, {"kernels": "nxd_core"}),
        ({"framework_version": "Neuron 2.3-2.5 (by date)"}, {"release": "2.5"}),
    ],
)
def test_words_become_those_of_the_format_and_stay_beside_it(change: dict[str, Any], own: dict[str, object]):
    found, _, faults = translated(MeasuredRow.read({**SMALL, **change}))
    assert not faults and {column: getattr(found, column) for column in own} == own
    kept = {column: text for column, text in change.items() if column in own and text != own[column]}
    assert kept.items() <= (found.published or {}).items()
    again, assumed, _ = translated(found)
    assert again == found and not {"precision", "sharding", "recompute"} & assumed.keys()


def test_words_that_nobody_knows_leave_the_row_to_what_is_known():
    found = made(sharding="zork", pipeline_schedule="1f2b", framework="zork")
    assert found.assumed["sharding"] == "ZeRO-1: 'zork' is not known"
    assert found.assumed["pipeline_schedule"] == "1f1b: '1f2b' is not known"
    assert found.candidate == made(sharding=None, pipeline_schedule=None, framework=None).candidate


def test_the_rows_of_this_repository_are_in_the_words_of_the_format():
    for row in measured_rows(DATA).rows.values():
        found, assumed, _ = translated(row)
        assert found == row and assumed.keys() <= {"platform"}, row.id


def test_runs_of_one_publisher_are_placed_on_its_machine():
    named = made(framework="Megatron-DeepSpeed", platform="a100")
    assert named.cluster.name == "a100-800g" and "800" in named.assumed["platform"]
    assert made(framework="Megatron-LM", platform="a100").cluster.name == "a100-80"
    assert made(**TITAN).cluster.name == "h100-96"
    assert made(platform="h200").assumed["platform"] and "platform" not in made(platform="h100-80").assumed


def test_a_row_states_its_own_network_or_a_note_counts_its_links():
    def port(**change: Any) -> float:
        return made(nodes=2, chips=16, dp=4, **change).cluster.links[-1].bandwidth_bytes_per_s

    assert port() == 50e9, "400 Gb/s for each GPU of a DGX"
    assert port(network_gbps=400) == pytest.approx(400e9 / 8 / 8)
    noted = {"inferred": {"platform": "Jean Zay: 8x A100 80GB SXM, 4 Omni-Path 100 Gb/s links a node"}}
    assert port(**noted) == pytest.approx(400e9 / 8 / 8) and port(network_gbps=800, **noted) == pytest.approx(
        800e9 / 64
    )
    assert "4 Omni-Path 100 Gb/s" in made(**noted).assumed["network_gbps"]
    with pytest.raises(InputError, match="network_gbps: must be positive"):
        made(network_gbps=-1)


def test_a_program_that_balances_its_stages_gives_the_head_the_room_of_its_layers():
    found = made(framework="nanotron", arch={**ARCH, "layers": 16, "vocab": 8000}, tp=1, pp=4)
    # A layer has 2 x 512 x (512 + 256) + 3 x 512 x 1024 weights in products, the head 8000 x 512: 1.73 layers. So a
    # share is 4.43 layers, and stages end with layers 5, 9 and 14.
    assert found.candidate.stages == (5, 4, 5, 2) and "fills its share" in found.assumed["stages"]
    with pytest.raises(InputError, match="32 stages for 16 layers"):
        made(framework="nanotron", arch={**ARCH, "layers": 16}, tp=1, pp=32, dp=1, nodes=4, chips=32)
    assert made(framework="nanotron", tp=2, pp=1, dp=4).candidate.stages is None
    assert made(framework="Megatron-LM", pp=4, tp=1).candidate.stages is None


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


def test_what_is_left_open_is_assumed_and_said():
    open_ = ("micro_batch", "pp", "cp", "ep", "vp", "dp", "sp", "recompute", "sharding", "precision", "framework")
    run = made(**dict.fromkeys([*open_, "pipeline_schedule", "nodes"]))
    assert str(run.candidate) == "tp=2,pp=1,dp=4" and run.cluster.num_nodes == 1
    said = {"dp": "4", "sp": "true", "micro_batch": "1", "recompute": "none", "sharding": "zero=1"}
    assert said.items() <= run.assumed.items()
    assert run.assumed.keys() == {*said, "arch", "platform", "pp", "cp", "ep", "precision", "framework"}


def test_an_architecture_is_completed_or_that_of_a_card():
    run = made(arch={"layers": 2, "hidden": 1024, "gated_mlp": False})
    model = run.model
    assert (model.ffn, model.num_heads, model.num_kv_heads, model.vocab) == (4096, 8, 8, 50304)
    assert (model.norm, model.positions, model.qkv_bias, model.tied_embeddings) == ("layer", "learned", True, True)
    names = {"arch", "arch.ffn", "arch.heads", "arch.kv_heads", "arch.vocab", "arch.tied_embed"}
    assert {name for name in run.assumed if name.startswith("arch")} == names
    llama = made(arch={"layers": 2, "hidden": 4096}).model
    assert (llama.ffn, llama.gated_mlp, llama.tied_embeddings) == (11008, True, False)
    known = made(arch=None, model="llama3-8b")
    assert (known.model.hidden, known.assumed["arch"]) == (4096, "the model card llama3-8b")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dp": 3}, "dp: tp*pp*cp*dp is 12, but 1 x h100-80 has 8 ranks"),
        ({"platform": "zork"}, "platform: cannot read 'zork'."),
        ({"recompute": "some"}, "recompute: cannot read 'some'. Known: full"),
        ({"recompute": "full (block, 4 layers)"}, "recompute: cannot read 'full (block, 4 layers)'."),
        ({"precision": "INT4"}, "precision: cannot read 'INT4'."),
        (
            {"precision": "NVFP4 + BF16"},
            "precision: cannot read 'NVFP4 + BF16'. No cluster here states the rate of FP4",
        ),
        ({"chips": 9}, "chips: 9 chips on 1 node; a node of h100-80 has 8"),
        ({"lnc": 2}, "lnc: h100-80 has no logical NeuronCore configuration."),
        ({"arch": None}, "arch: its architecture is not known"),
        ({"arch": {**ARCH, "mamba": True}}, "arch: its architecture has mamba, which autoshard does not model"),
        ({"kernels": "zork"}, "kernels: there is no table 'zork'."),
        ({"release": "Neuron 2.18"}, "release: must be a number such as 2.18.0"),
        ({"arch": {**ARCH, "layers": "4"}}, "arch.layers: expected a whole number, found '4'"),
        ({"arch": {**ARCH, "kv_heads": 3}}, "arch.kv_heads: 8 query heads cannot share 3"),
        ({"seq_len": 2**40}, "seq_len: must be at most"),
    ],
)
def test_wrong_columns_are_faults(change: dict[str, Any], says: str):
    with pytest.raises(InputError) as caught:
        made(**change)
    assert str(caught.value.faults[0]).startswith(says)
