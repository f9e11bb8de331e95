"""What NxD is told of a plan: golden files of the cases that its vendor documents, and what each part is for."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autoshard.engine.nxd.lowering import RecomputedLayers, lowering_of
from autoshard.errors import InputError
from autoshard.plan.environment import environment
from autoshard.plan.plan import Plan
from autoshard.spec.record import encode
from tests.plan.nxd.test_match import planned

# cited: aws-neuron/neuronx-distributed-training examples/conf (Llama-3 70B on trn1, with context parallelism, on trn2;
# Mixtral 8x7B) and aws-neuron/aws-neuron-sdk, the tutorials of Llama-2 70B and 13B on 32 nodes of trn1.
DOCUMENTED: Mapping[str, Any] = {
    "llama3-70b-16-trn1": ("llama3-70b", "trn1.32xlarge", "tp=32,pp=8,dp=2,recompute=selective[LlamaMLP]", 8192),
    "llama3-70b-16-trn1-cp2": (
        "llama3-70b", "trn1.32xlarge", "tp=32,pp=8,cp=2,dp=1,recompute=selective[LlamaMLP]", 8192,
    ),
    "llama3-70b-8-trn2": (
        "llama3-70b", "trn2.48xlarge",
        "tp=32,pp=4,dp=4,stages=19/21/21/19,recompute=selective[LlamaRMSNorm,ActivationMultiplyMLP]", 8192,
    ),
    "llama2-70b-32-trn1-tp8": ("llama2-70b", "trn1.32xlarge", "tp=8,pp=8,dp=16,kernels=nxd_core,recompute=full", 4096),
    "llama2-70b-32-trn1-tp32": ("llama2-70b", "trn1.32xlarge", "tp=32,pp=4,dp=8,kernels=nxd_core,recompute=full", 4096),
    "mixtral-8x7b-8-trn1": (
        "mixtral-8x7b", "trn1.32xlarge", "tp=32,pp=4,dp=2,kernels=nxd_core,recompute=full", 4096, "bf16", 2.0,
    ),
    "llama2-13b-32-trn1": ("llama2-13b", "trn1.32xlarge", "tp=8,pp=4,dp=32,kernels=nxd_core,recompute=full", 4096),
}  # fmt: skip


def tp8(text: str = "tp=8,pp=4,dp=2") -> Plan:
    return planned("llama2-13b", "trn1.32xlarge", text, 4096)


@pytest.mark.parametrize("name", list(DOCUMENTED))
def test_the_documented_cases(name: str, golden: Callable[[str, str], None]) -> None:
    lowering = lowering_of(planned(*DOCUMENTED[name]))
    golden(f"nxd/{name}.yaml", yaml.safe_dump(encode(lowering), default_flow_style=None, sort_keys=False, width=120))


def test_the_limit_of_the_norm_reaches_zero_1() -> None:
    # NxD's trainer passes grad_clipping on to ZeRO-1, but not max_grad_norm.
    plan = tp8()
    clipped = replace(plan, workload=replace(plan.workload, clip_norm=0.25))
    assert lowering_of(clipped).optimizer["max_norm"] == 0.25
    assert "max_norm" not in lowering_of(replace(clipped, zero=0)).optimizer
    assert lowering_of(replace(clipped, zero=0)).config["optimizer_config"]["max_grad_norm"] == 0.25


def test_masters_and_sums_follow_the_precision() -> None:
    plan = tp8()
    mixed = lowering_of(plan).config["mixed_precision_config"]
    assert mixed["use_master_weights"] and mixed["use_fp32_grad_acc"]
    alone = planned("llama2-13b", "trn1.32xlarge", "tp=8,pp=4,dp=2", 4096, "fp32")
    used = {name for name, value in lowering_of(alone).config["mixed_precision_config"].items() if value}
    assert used == {"use_master_weights_in_ckpt"}  # of checkpoints that are not used


def test_each_layer_says_what_it_computes_again() -> None:
    full = lowering_of(tp8("tp=8,pp=4,dp=2,recompute=full:3/none*3"))
    assert full.recompute == (RecomputedLayers(num_layers=3, runs=(("",),)), RecomputedLayers(num_layers=37, runs=()))
    assert full.config["activation_checkpoint_config"] == "Recomputed"
    (norms,) = lowering_of(tp8("tp=8,pp=4,dp=2,recompute=selective[LlamaRMSNorm,ActivationMultiplyMLP]")).recompute
    assert norms.runs == (("act", "product"), ("attn_norm",), ("mlp_norm",))
    (mlp,) = lowering_of(tp8("tp=8,pp=4,dp=2,recompute=selective[LlamaMLP]")).recompute
    assert mlp.runs == (("up", "gate", "act", "product", "down"),)
    routed = planned("mixtral-8x7b", "trn1.32xlarge", "tp=8,pp=4,dp=2,recompute=selective[LlamaMLP]", 4096, "bf16", 2.0)
    assert lowering_of(routed).recompute[0].runs == mlp.runs
    assert lowering_of(tp8()).config["activation_checkpoint_config"] is None


def test_the_environment_says_formats_buckets_and_cores() -> None:
    plan = tp8()
    found = environment(plan)
    assert found["XLA_DOWNCAST_BF16"] == "0" and found["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "0"
    assert found["ALL_GATHER_REDUCE_SCATTER_BUCKET_CAP_MB"] == "130" and found["FI_PROVIDER"] == "efa"
    assert "NEURON_LOGICAL_NC_CONFIG" not in found
    without = replace(plan.workload.precision, masters=None)
    rounded = environment(replace(plan, workload=replace(plan.workload, precision=without)))
    assert rounded["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"
    lnc2 = environment(planned(*DOCUMENTED["llama3-70b-8-trn2"]))
    assert lnc2["NEURON_LOGICAL_NC_CONFIG"] == lnc2["NEURON_RT_VIRTUAL_CORE_SIZE"] == "2"
    alone = environment(planned("llama3-8b", "trn1.32xlarge", "tp=8,pp=1,dp=4"))
    assert "FI_PROVIDER" not in alone and "--auto-cast none" in alone["NEURON_CC_FLAGS"]


def test_what_is_not_lowered_is_refused_before_anything_starts() -> None:
    with pytest.raises(InputError, match="the table is empty"):
        lowering_of(replace(tp8(), strategies={}))
    plan = tp8()
    layer = plan.strategies["layer"]
    line = layer["attn_out"].replace("F reduce_scatter seq/tp", "F all_reduce /tp, slice seq/kv")
    with pytest.raises(InputError, match="attn_out: RowParallelLinear sends F reduce_scatter"):
        lowering_of(replace(plan, strategies={**plan.strategies, "layer": {**layer, "attn_out": line}}))
