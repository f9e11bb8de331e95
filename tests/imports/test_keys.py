"""Keys with their meanings, one by one: what a program's table reads from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoshard.errors import InputError
from autoshard.imports.answer import fitting_question
from autoshard.imports.imported import imported_run
from autoshard.imports.programs.megatron_model import written_model
from autoshard.imports.programs.megatron_stages import stages_of_layout
from autoshard.imports.question import ImportOptions, imported_question
from autoshard.imports.table import number, truth, whole_number, words
from autoshard.plan.recompute import Recompute
from autoshard.spec.model_parts import Router
from autoshard.spec.recipe import Pins

NXDT = {"zero1": True}
MEGATRON = {"num_layers": 32, "hidden_size": 4096}
BRIDGE: dict[str, Any] = {"model.tensor_model_parallel_size": 2}
TITAN: dict[str, Any] = {"training": {"seq_len": 2048}}
ACCELERATE = {"distributed_type": "FSDP"}
DEEPSPEED = {"train_batch_size": 8}

READ = [
    (NXDT, {"precision": {"type": "manual", "master_weights": True, "fp32_grad_acc": False}}, "work.precision",
     "bf16,gradients=bf16"),
    (NXDT, {"precision": {"type": "manual", "fp32_grad_acc": True}}, "work.precision", "bf16,masters=none"),
    (NXDT, {"precision": {"type": "bf16SR"}}, "work.precision", "bf16-sr,gradients=bf16,moments=bf16"),
    (NXDT, {"trainer": {"lnc": 1}}, "cluster.lnc", 1),
    (NXDT, {"trainer": {"devices": 128}}, "cluster.lnc", 1),
    (NXDT, {"normalization": "layernorm"}, "model.norm", "layer"),
    (NXDT, {"position_embedding_type": "rope"}, "model.positions", "rotary"),
    (NXDT, {"activation": "swiglu"}, "model.gated", True),
    (NXDT, {"has_bias": False}, "model.bias", False),
    (NXDT, {"moe": {"capacity_factor": 2.0, "dropless": False}}, "work.expert_capacity", 2.0),
    (NXDT, {"moe": {"capacity_factor": 2.0, "dropless": True}}, "work.expert_capacity", None),
    (MEGATRON, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
     "layout.recompute", (Recompute(kind="full", num_layers=4),)),
    (MEGATRON, {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe_act"]}, "layout.recompute",
     (Recompute(kind="selective", ops=("mlp", "mlp_act")),)),
    (MEGATRON, {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "shared_experts"]},
     "layout.recompute", (Recompute(kind="selective", ops=("mla_up_proj", "shared_experts")),)),
    (MEGATRON, {"recompute_activations": True}, "layout.recompute",
     (Recompute(kind="selective", ops=("core_attn",)),)),
    (MEGATRON, {"activations_checkpoint_granularity": "full", "activations_checkpoint_method": "block",
                "activations_checkpoint_num_layers": 2}, "layout.recompute", (Recompute(kind="full", num_layers=2),)),
    (MEGATRON, {"use_torch_fsdp2": True}, "layout.zero", 3),
    (MEGATRON, {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"}, "layout.zero", 1),
    (MEGATRON, {"use_megatron_fsdp": True}, "layout.zero", 3),
    (MEGATRON, {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "no_shard"}, "layout.zero", 0),
    (BRIDGE, {"ddp": {"use_megatron_fsdp": True}}, "layout.zero", 0),
    (MEGATRON, {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, "layout.zero", 1),
    (MEGATRON, {"num_virtual_stages_per_pipeline_rank": 3}, "layout.vp", 3),
    (MEGATRON, {"num_layers_per_virtual_pipeline_stage": 4}, "layout.layers_per_stage", 4),
    (MEGATRON, {"pipeline_model_parallel_layout": [["embedding", "decoder"], ["decoder", "loss"]]}, "layout.stages",
     (1, 1)),
    (MEGATRON, {"pipeline_model_parallel_layout": "Et*3|(tt|)*29,m|L"}, "layout.stages", (3, *[2] * 28, 1, 1, 0)),
    (MEGATRON, {"pipeline_model_parallel_layout": [["embedding"], ["decoder"], ["decoder", "mtp", "loss"]]},
     "layout.stages", (0, 1, 1)),
    (TITAN, {"parallelism": {"fsdp_reshard_after_forward": "never"}}, "layout.zero", 1),
    (TITAN, {"parallelism": {"fsdp_reshard_after_forward": "never", "pipeline_parallel_degree": 2}}, "layout.zero", 3),
    (TITAN, {"parallelism": {"fsdp_reshard_after_forward": "always"}}, "layout.zero", 3),
    (MEGATRON, {"cp_comm_type": "a2a"}, "layout.cp_kind", "all_to_all"),
    (MEGATRON, {"num_distributed_optimizer_instances": 2}, "layout.replicas", 2),
    (MEGATRON, {"fp16": True, "accumulate_allreduce_grads_in_fp32": True}, "work.precision", "fp16"),
    (MEGATRON, {"bf16": True, "fp8_format": "hybrid", "grad_reduce_in_bf16": True}, "work.precision",
     "bf16,gradients=bf16,products=fp8"),
    (MEGATRON, {"moe_expert_capacity_factor": 1.5}, "work.expert_capacity", 1.5),
    (MEGATRON, {"moe_aux_loss_coeff": 0.02, "moe_router_topk": 8}, "work.router_balance_loss", 0.0025),
    (MEGATRON, {"moe_aux_loss_coeff": 0.02}, "work.router_balance_loss", 0.01),
    (MEGATRON, {"moe_aux_loss_coeff": 0.02, "moe_router_load_balancing_type": "seq_aux_loss"},
     "work.router_balance_over", "sequence"),
    (MEGATRON, {"moe_aux_loss_coeff": [0.0, 0.02], "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
     "work.router_balance_over", "sequence"),
    (MEGATRON, {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}, "model.router",
     Router(scores="sigmoid", correction=True)),
    (MEGATRON, {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
     "work.router_bias_speed", 0.001),
    (MEGATRON, {"moe_router_score_function": "softmax", "moe_router_num_groups": None}, "model.router", None),
    (MEGATRON, {"moe_router_pre_softmax": True, "moe_router_num_groups": 8}, "model.router", Router(normalised=False)),
    (MEGATRON, {"moe_router_score_function": "sqrtsoftplus"}, "model.unmodelled", ["moe_router_score_function"]),
    (MEGATRON, {"moe_shared_expert_intermediate_size": 1408}, "model.shared_ffn", 1408),
    (MEGATRON, {"moe_z_loss_coeff": "1e-3"}, "work.router_z_loss", 0.001),
    (MEGATRON, {"padded_vocab_size": 201088}, "model.vocab_size", 201088),
    (MEGATRON, {"add_qkv_bias": True, "swiglu": True}, "model.qkv_bias", True),
    (MEGATRON, {"qk_layernorm": True, "swiglu": True}, "model.qk_norm", True),
    (TITAN, {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}, "layout.every", 2),
    (TITAN, {"activation_checkpoint": None}, "layout.recompute", (Recompute(),)),
    (TITAN, {"activation_checkpoint": {"mode": "none"}}, "layout.recompute", (Recompute(),)),
    (TITAN, {"parallelism": {"pipeline_parallel_schedule": "ZBVZeroBubble"}}, "layout.schedule", "zb_v"),
    (TITAN, {"parallelism": {"context_parallel_load_balancer": None}}, "layout.cp_order", "contiguous"),
    (TITAN, {"training": {"seq_len": 2048, "global_batch_size": 64}}, "work.global_batch", 64),
    (TITAN, {"float8": {"enable_float8_linear": True}}, "work.precision", "bf16,products=fp8"),
    (TITAN, {"training": {"seq_len": 2048, "mixed_precision_param": "float32"}}, "work.precision", "fp32"),
    (ACCELERATE, {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}, "layout.zero", 1),
    (MEGATRON, {"moe_token_dispatcher_type": "alltoall", "overlap_grad_reduce": True}, "layout.kernels", "mcore"),
    (MEGATRON, {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}, "layout.kernels", "te+deepep"),
    (MEGATRON, {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep",
                "overlap_grad_reduce": True}, "layout.kernels", "mcore+hybridep"),
    (ACCELERATE, {"fsdp_config": {"sharding_strategy": 3}}, "layout.zero", 0),
    (ACCELERATE, {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "layout.shards_in_node", True),
    (ACCELERATE, {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, "layout.zero", 1),
    (ACCELERATE, {"distributed_type": "DEEPSPEED", "deepspeed_config": {"gradient_accumulation_steps": 4}},
     "work.accumulation", 4),
    (ACCELERATE, {"fsdp_config": {"fsdp_reshard_after_forward": False}}, "layout.zero", 1),
    (DEEPSPEED, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "layout.weight_group", 8),
    (DEEPSPEED, {"fp16": {"enabled": True}}, "work.precision", "fp16,gradients=fp16"),
    (DEEPSPEED, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "work.precision", "bf16"),
    (DEEPSPEED, {"torch_autocast": {"enabled": True}}, "work.precision", "fp32,products=bf16"),
    (DEEPSPEED, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "work.precision",
     "bf16,gradients=bf16,masters=none"),
    (ACCELERATE, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "layout.kernels", "torch_compiled"),
    (DEEPSPEED, {"tensor_parallel": {"autotp_size": 2}}, "layout.tp", 2),
    (DEEPSPEED, {"pipeline": {"stages": 4}}, "layout.pp", 4),
    (DEEPSPEED, {"bf16": {"enabled": "auto"}}, "work.precision", "fp32"),
    (DEEPSPEED, {"activation_checkpointing": {"number_checkpoints": 4}}, "layout.recompute",
     (Recompute(kind="full"),)),
]  # fmt: skip

UNREAD = [
    (MEGATRON, {"nnodes": "1:4"}, "nnodes = 1:4"),
    (NXDT, {"precision": {"type": "fp4"}}, "precision.type: fp4"),
    (MEGATRON, {"recompute_granularity": "selective", "recompute_modules": "mhc"}, "recompute_modules: mhc"),
    (
        MEGATRON,
        {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "global_aux_loss"},
        "moe_router_load_balancing_type = global_aux_loss",
    ),
    (MEGATRON, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, "exp_avg_dtype = bf16"),
    (
        MEGATRON,
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "uccl"},
        "moe_flex_dispatcher_backend = uccl",
    ),
    (TITAN, {"parallelism": {"pipeline_parallel_schedule": "LoopedBFS"}}, "pipeline_parallel_schedule: LoopedBFS"),
    (TITAN, {"activation_checkpoint": {"mode": "memory_budget"}}, "activation_checkpoint: memory_budget"),
    (ACCELERATE, {"mixed_precision": "int8"}, "mixed_precision: int8"),
    (MEGATRON, {"optimizer": "sgd"}, "optimizer = sgd, priced as AdamW"),
    (TITAN, {"optimizer": {"name": "Muon"}}, "optimizer.name = Muon, priced as AdamW"),
    (DEEPSPEED, {"optimizer": {"type": "OneBitAdam"}}, "optimizer.type = OneBitAdam, priced as AdamW"),
    (NXDT, {"model": {"optim": {"name": "adafactor"}}}, "optim.name = adafactor, priced as AdamW"),
]

UNREAD += [
    (TITAN, {"parallelism": {"fsdp_reshard_after_forward": "always", "pipeline_parallel_degree": 2}},
     "fsdp_reshard_after_forward = always, priced as default"),
    (TITAN, {"parallelism": {"fsdp_reshard_after_forward": "sometimes"}}, "fsdp_reshard_after_forward = sometimes"),
]  # fmt: skip

# Keys among many that change nothing, whose values do.
UNREAD += [
    (MEGATRON, {"attention_backend": "unfused"}, "attention_backend = unfused"),
    (MEGATRON, {"cp_comm_type": "allgather"}, "cp_comm_type = allgather, priced as p2p"),
    (MEGATRON, {"cp_comm_type": ["a2a", "p2p"]}, "cp_comm_type = a2a p2p, priced as p2p"),
    (MEGATRON, {"transformer_impl": "local"}, "transformer_impl = local"),
    (MEGATRON, {"fp8_param_gather": True}, "fp8_param_gather = True"),
    (BRIDGE, {"optimizer": {"optimizer_cpu_offload": True}}, "optimizer.optimizer_cpu_offload = True"),
    (BRIDGE, {"comm_overlap": {"tp_comm_overlap": True}}, "comm_overlap.tp_comm_overlap = True"),
    (BRIDGE, {"comm_overlap": {"overlap_moe_expert_parallel_comm": True}},
     "comm_overlap.overlap_moe_expert_parallel_comm = True"),
    (BRIDGE, {"train": {"rampup_batch_size": [32, 32, 1000]}}, "train.rampup_batch_size = [32, 32, 1000]"),
    (BRIDGE, {"ddp": {"outer_dp_sharding_strategy": "optim"}}, "ddp.outer_dp_sharding_strategy = optim"),
    (TITAN, {"training": {"seq_len": 2048, "mixed_precision_reduce": "bfloat16"}},
     "training.mixed_precision_reduce = bfloat16"),
    (TITAN, {"optimizer": {"early_step_in_backward": True}}, "optimizer.early_step_in_backward = True"),
    (TITAN, {"compile": {"enable": True, "components": ["loss"]}}, "compile.components = ['loss']"),
    (NXDT, {"model": {"moe": {"frequency": 2}}}, "model.moe.frequency = 2"),
    (DEEPSPEED, {"communication_data_type": "fp16"}, "communication_data_type = fp16"),
    (DEEPSPEED, {"torch_autocast": {"enabled": True, "dtype": "float16"}},
     "torch_autocast.dtype = float16, priced as bfloat16"),
    (ACCELERATE, {"dynamo_config": {"dynamo_backend": "CUDAGRAPHS"}}, "dynamo_backend = cudagraphs"),
    (ACCELERATE, {"use_cpu": True}, "use_cpu = True"),
]  # fmt: skip
HARMLESS = [
    (MEGATRON, {"attention_backend": "auto"}, "attention_backend"),
    (BRIDGE, {"model": {"transformer_impl": "transformer_engine"}}, "model.transformer_impl"),
    (BRIDGE, {"optimizer": {"optimizer_cpu_offload": False}}, "optimizer.optimizer_cpu_offload"),
    (TITAN, {"training": {"seq_len": 2048, "mixed_precision_reduce": "float32"}}, "training.mixed_precision_reduce"),
    (TITAN, {"compile": {"enable": True, "components": ["model", "loss"]}}, "compile.components"),
    (NXDT, {"model": {"moe": {"frequency": 1}}}, "model.moe.frequency"),
]

_FURTHER = "m of pipeline_model_parallel_layout is left out, as cards leave out what predicts further tokens"
_ZERO_2 = "ZeRO-2 is priced as ZeRO-1, which holds whole gradients and sums them once a step"
SAID = [
    (MEGATRON, {"pipeline_model_parallel_layout": "Et*3|(tt|)*29,m|L"},
     f"{_FURTHER}; stage 31, which has no other, takes a layer of stage 30"),
    (MEGATRON, {"pipeline_model_parallel_layout": "Et*3|(tt|)*29mL"}, _FURTHER),
    (TITAN, {"parallelism": {"fsdp_reshard_after_forward": "never"}}, _ZERO_2),
    (ACCELERATE, {"fsdp_config": {"fsdp_reshard_after_forward": False}}, _ZERO_2),
    (ACCELERATE, {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}}, _ZERO_2),
    (ACCELERATE, {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}, _ZERO_2),
    (DEEPSPEED, {"zero_optimization": {"stage": 2}}, _ZERO_2),
    ({"distributed_type": "MULTI_GPU"}, {"mixed_precision": "bf16"},
     "mixed_precision without FSDP keeps weights in FP32 and casts in each product; priced as weights of its format"),
    (MEGATRON, {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, _ZERO_2),
]  # fmt: skip

ADAM = [
    (MEGATRON, {"optimizer": "adam"}), (MEGATRON, {"model": {"optim": {"name": "distributed_fused_adam"}}}),
    (TITAN, {"optimizer": {"name": "AdamW"}}), (DEEPSPEED, {"optimizer": {"type": "AdamW"}}),
    (NXDT, {"model": {"optim": {"name": "adamw_fp32OptimParams"}}}),
    (NXDT, {"model": {"optim": {"name": "adamw_fp32OptState"}}}),
]  # fmt: skip


def run_of(folder: Path, *parts: dict[str, Any]):
    path = folder / "run.yaml"
    data: dict[str, Any] = {}
    for part in parts:
        data |= part
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    return imported_run(str(path))


@pytest.mark.parametrize(("base", "keys", "fact", "value"), READ, ids=lambda item: str(item)[:60])
def test_keys_mean(tmp_path: Path, base: dict[str, Any], keys: dict[str, Any], fact: str, value: object) -> None:
    assert run_of(tmp_path, base, keys).facts[fact] == value


@pytest.mark.parametrize(("base", "keys", "says"), UNREAD, ids=lambda item: str(item)[:60])
def test_values_that_are_not_known_are_named(
    tmp_path: Path, base: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    assert says in run_of(tmp_path, base, keys).unread


@pytest.mark.parametrize(("base", "keys", "path"), HARMLESS, ids=lambda item: str(item)[:60])
def test_values_that_are_priced_have_no_effect(
    tmp_path: Path, base: dict[str, Any], keys: dict[str, Any], path: str
) -> None:
    run = run_of(tmp_path, base, keys)
    assert path in run.harmless and not run.unread


@pytest.mark.parametrize(("base", "keys", "says"), SAID, ids=lambda item: str(item)[:60])
def test_what_is_priced_as_something_else_is_said(
    tmp_path: Path, base: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    assert run_of(tmp_path, base, keys).remarks == (says,)


@pytest.mark.parametrize(
    ("base", "keys", "says"),
    [
        (DEEPSPEED, {"zero_optimization": {"stage": 9}}, "there is no stage 9 of ZeRO, only 0 to 3"),
        (ACCELERATE, {"fsdp_config": {"fsdp_sharding_strategy": 9}}, "'9' is no sharding strategy. Known: "),
        (ACCELERATE, {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHRD"}}, "Did you mean FULL_SHARD"),
    ],
)
def test_a_stage_or_strategy_that_is_not_there_is_refused(
    tmp_path: Path, base: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        run_of(tmp_path, base, keys)


@pytest.mark.parametrize("layout", ["Et||tL", "Et|m|tL"])
def test_a_stage_inside_of_no_layer_is_refused(tmp_path: Path, layout: str) -> None:
    with pytest.raises(InputError, match="stage 2 has no layer"):
        run_of(tmp_path, MEGATRON, {"pipeline_model_parallel_layout": layout})


def test_a_dropout_that_no_key_states_is_the_default_of_megatron(tmp_path: Path) -> None:
    question = imported_question(run_of(tmp_path, LLAMA), ImportOptions())
    model, name = question.request.model, "llama3-8b"
    assert (model.name, model.hidden_dropout, model.attention_dropout) == (name, 0.1, 0.1)
    assert question.model_from == "the card with these sizes"
    said = "hidden dropout 0.1, attention dropout 0.1: the default of Megatron-LM"
    assert [str(line).partition(" (")[0] for line in question.assumed if "dropout" in line.what] == [said]
    stated: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    for run, options in (
        (run_of(tmp_path, LLAMA, stated), ImportOptions()),
        (run_of(tmp_path, LLAMA), ImportOptions(cluster="trn1.32xlarge")),  # whose program drops nothing
        (run_of(tmp_path, TITAN), ImportOptions(model=name)),
    ):
        question = imported_question(run, options)
        assert question.request.model.attention_dropout == question.request.model.hidden_dropout == 0
        assert not any("dropout" in line.what for line in question.assumed)


@pytest.mark.parametrize(("base", "keys"), ADAM, ids=str)
def test_adam_is_what_is_priced(tmp_path: Path, base: dict[str, Any], keys: dict[str, Any]) -> None:
    assert not [said for said in run_of(tmp_path, base, keys).unread if "optim" in said]


LLAMA = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "swiglu": True,
    "num_query_groups": 8, "normalization": "RMSNorm", "position_embedding_type": "rope", "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, "seq_length": 2048, "global_batch_size": 64, "rotary_base": 500000,
    "vocab_size": 128256, "max_position_embeddings": 8192, "bf16": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "candidate"),
    [
        ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 12,
          "num_virtual_stages_per_pipeline_rank": 2},
         "tp=1,pp=2,dp=4,vp=2,zero=0,schedule=interleaved,stages=6/10/6/10,kernels=te"),
        ({"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 5,
          "decoder_last_pipeline_num_layers": 7}, "tp=1,pp=4,dp=2,zero=0,stages=5/10*2/7,kernels=te"),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 4},
         "tp=1,pp=2,dp=4,vp=4,zero=0,schedule=interleaved,kernels=te"),
        ({"pipeline_model_parallel_size": 2, "recompute_granularity": "full", "recompute_method": "block",
          "recompute_num_layers": 16}, "tp=1,pp=2,dp=4,zero=0,recompute=full,kernels=te"),
        ({"pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True,
          "account_for_loss_in_pipeline_split": True}, "tp=1,pp=2,dp=4,zero=0,kernels=te"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*14|t*18L"},
         "tp=1,pp=2,dp=4,zero=0,stages=14/18,kernels=te"),
    ],
)  # fmt: skip
def test_stages_are_those_of_megatron(tmp_path: Path, keys: dict[str, Any], candidate: str) -> None:
    assert str(imported_question(run_of(tmp_path, LLAMA, keys), ImportOptions()).candidate) == candidate


@pytest.mark.parametrize(("embedding", "per_stage", "vp"), [(True, 4, 4), (True, 8, 2), (False, 9, 2)])
def test_layers_of_a_stage_count_the_ends_as_programs_do(
    tmp_path: Path, embedding: bool, per_stage: int, vp: int
) -> None:
    ends = dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), embedding)
    sizes = {"num_layers": 126, "pipeline_model_parallel_size": 8 if embedding else 7}
    keys = {**sizes, "num_layers_per_virtual_pipeline_stage": per_stage, **ends}
    candidate = imported_question(run_of(tmp_path, LLAMA, keys), ImportOptions()).candidate
    assert (candidate.vp, candidate.schedule) == (vp, "interleaved")
    with pytest.raises(InputError, match="pipeline ranks do not share evenly"):
        imported_question(run_of(tmp_path, LLAMA, keys, {"num_layers_per_virtual_pipeline_stage": 5}), ImportOptions())


def test_layers_of_a_stage_of_torchtitan_count_embedding_and_head(tmp_path: Path) -> None:
    cut = {"pipeline_parallel_degree": 8, "pipeline_parallel_layers_per_stage": 4}
    keys = {**TITAN, "parallelism": {**cut, "pipeline_parallel_schedule": "Interleaved1F1B"}}
    candidate = imported_question(run_of(tmp_path, keys), ImportOptions(model="llama3.1-405b")).candidate
    assert (candidate.vp, candidate.num_stages) == (4, 32)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"num_layers": 30}, "rms"), ({"num_layers": 30, "add_qkv_bias": True}, "rms"),
        ({"num_layers": 30, "qk_layernorm": True}, "rms"),
        ({"normalization": "LayerNorm", "swiglu": False, "num_query_groups": 32}, "layer"),
        ({"normalization": "LayerNorm", "swiglu": False, "num_query_groups": 32, "disable_bias_linear": False,
          "position_embedding_type": "learned_absolute", "tokenizer_type": "GPT2BPETokenizer"}, "layer"),
        ({"num_layers": 30, "num_experts": 4, "moe_router_topk": 2}, "rms"),
        # The sizes of OLMo 2, whose norms no key of Megatron says.
        ({"vocab_size": 100352, "num_query_groups": 32, "max_position_embeddings": 4096}, "rms"),
    ],
)  # fmt: skip
def test_models_that_have_no_card_are_made_of_their_sizes(tmp_path: Path, changes: dict[str, Any], kind: str) -> None:
    sizes = {key: value for key, value in LLAMA.items() if key not in ("vocab_size", "ffn_hidden_size")}
    question = imported_question(run_of(tmp_path, sizes, {"ffn_hidden_size": 11008} | changes), ImportOptions())
    assert question.request.model.norm == kind and "of which no card is" in question.model_from


CHANGES_OF_LLAMA = [
    ({"kv_channels": 256}, {"head_dim": 256}), ({"qk_layernorm": True}, {"qk_norm": True}),
    ({"add_qkv_bias": True}, {"qkv_bias": True}), ({"disable_bias_linear": False}, {"mlp_bias": True}),
    ({"normalization": "LayerNorm"}, {"norm": "layer"}), ({"swiglu": False}, {"gated_mlp": False}),
    ({"num_layers": 30, "window_size": "(512,0)"}, {"window": 512}),
    ({"num_experts": 8, "vocab_size": 32000, "moe_router_topk": 4}, {"experts_per_token": 4}),
    ({"num_experts": 8, "qk_layernorm": True}, {"qk_norm": True, "num_experts": 8}),
    ({"position_embedding_type": "learned_absolute"}, {"positions": "learned"}),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "fields"), CHANGES_OF_LLAMA, ids=str)
def test_a_card_with_the_sizes_of_a_file_is_not_taken_where_another_key_says_another_model(
    tmp_path: Path, keys: dict[str, Any], fields: dict[str, Any]
) -> None:
    question = imported_question(run_of(tmp_path, LLAMA, keys), ImportOptions())
    model = question.request.model
    assert {name: getattr(model, name) for name in fields} == fields and "of which no card is" in question.model_from
    assert imported_question(run_of(tmp_path, LLAMA), ImportOptions()).request.model.name == "llama3-8b"


def test_a_dropout_of_a_file_is_that_of_its_model_and_named_where_the_engine_has_none(tmp_path: Path) -> None:
    drops = {"hidden_dropout": 0.1, "attention_dropout": 0.0}
    question = imported_question(run_of(tmp_path, LLAMA, drops), ImportOptions())
    assert (question.request.model.hidden_dropout, question.request.model.name) == (0.1, "llama3-8b")
    assert question.model_from == "the card with these sizes, with hidden dropout 0.1"
    run = run_of(tmp_path, NXDT, {"model": drops, "num_layers": 32, "hidden_size": 4096})
    assert len(run.remarks) == 1 and run.remarks[0].startswith("hidden_dropout: ")
    assert imported_question(run, ImportOptions(model="llama3-8b")).request.model.hidden_dropout == 0


def test_the_flag_for_norms_of_queries_is_that_of_narrow_states_under_latent_attention(tmp_path: Path) -> None:
    latent = {"multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_layernorm": True}
    keys = {"group_query_attention": False, "num_query_groups": None}
    model = imported_question(run_of(tmp_path, LLAMA, keys, latent), ImportOptions()).request.model
    assert model.latent is not None and not model.qk_norm
    assert written_model({"model.latent": model.latent})["qk_layernorm"]


def test_what_is_typed_goes_before_the_file(tmp_path: Path) -> None:
    options = ImportOptions(model="llama2-7b", cluster="a100", fix=Pins("mbs=2,recompute=full"), seq_len=1024)
    question = imported_question(run_of(tmp_path, LLAMA), options, 2)
    assert str(question.candidate) == "tp=1,pp=1,dp=16,mbs=2,zero=0,recompute=full,kernels=te"
    assert question.request.workload.seq_len == 1024 and "though the file says" in question.model_from


def test_a_library_for_experts_is_left_out_of_a_dense_model_with_a_word(tmp_path: Path) -> None:
    keys = {"moe_token_dispatcher_type": "flex"}
    question = imported_question(run_of(tmp_path, LLAMA, keys), ImportOptions())
    assert question.candidate.kernels == "te"
    assert "kernels te: llama3-8b has no experts that need deepep" in [str(assumed) for assumed in question.assumed]
    mixture = run_of(tmp_path, LLAMA, keys, {"num_experts": 4, "moe_router_topk": 2})
    assert imported_question(mixture, ImportOptions()).candidate.kernels == "te+deepep"


def test_ranks_that_fill_no_nodes_and_ends_that_leave_no_even_rest_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not fill nodes of h100-80 evenly"):
        imported_question(run_of(tmp_path, LLAMA, {"nnodes": 1, "nproc_per_node": 9}), ImportOptions())
    keys = {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 6}
    with pytest.raises(InputError, match="do not fill 3 stages evenly"):
        imported_question(run_of(tmp_path, LLAMA, {"decoder_last_pipeline_num_layers": None}, keys, {"num_layers": 33}),
                    ImportOptions(model="llama3-8b", fix=Pins("pp=4")))  # fmt: skip
    with pytest.raises(InputError, match="tp must be 1 to"):
        imported_question(run_of(tmp_path, LLAMA, {"tensor_model_parallel_size": 0}), ImportOptions())


def test_words_that_are_no_values_are_refused() -> None:
    for read, value in ((whole_number, "x"), (truth, "maybe"), (number, "x"), (stages_of_layout, "t*99999999")):
        with pytest.raises(InputError):
            read(value)  # type: ignore[operator]
    assert words(("a", "b")) == ("a", "b") and whole_number(-1) == -1


def test_a_file_of_deepspeed_that_accelerate_names_decides(tmp_path: Path) -> None:
    stated = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "x": 1}
    (tmp_path / "zero.json").write_text(json.dumps(stated), encoding="utf-8")
    named = {**ACCELERATE, "distributed_type": "DEEPSPEED", "mixed_precision": "fp16"}
    run = run_of(tmp_path, named, {"deepspeed_config": {"deepspeed_config_file": "zero.json"}})
    facts = (run.facts["layout.zero"], run.facts["layout.mbs"], run.facts["work.precision"])
    assert facts == (3, 4, "bf16,gradients=bf16") and run.unread == ("x = 1",)
    absent = run_of(tmp_path, named, {"deepspeed_config": {"deepspeed_config_file": "gone/zero.json"}})
    said = "deepspeed_config.deepspeed_config_file = gone/zero.json, which is not beside the file"
    assert absent.unread == (said,) and absent.facts["layout.zero"] == 0


def test_a_balance_loss_that_the_nxd_engine_does_not_add_is_named(tmp_path: Path):
    router = {"router_aux_loss_coef": 0.02, "num_experts": 8}
    remarks = [
        run_of(tmp_path, NXDT, {"model": {"moe": {**router, "output_router_logits": adds}}}).remarks
        for adds in (True, False)
    ]
    assert "moe.router_aux_loss_coef" in str(remarks[0]) and remarks[1] == ()


NEMO: dict[str, Any] = {
    "trainer": {"devices": 8, "num_nodes": 4, "precision": "bf16"},
    "model": {
        "tensor_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 128, "encoder_seq_length": 4096,
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32,
        "num_query_groups": None, "kv_channels": None, "normalization": "rmsnorm", "bias": False,
        "activation": "fast-swiglu", "share_embeddings_and_output_weights": False, "position_embedding_type": "rope",
        "max_position_embeddings": 4096,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, {"name": "llama2-7b"}),
        ({"bias": True}, {"mlp_bias": True, "gated_mlp": True, "tied_embeddings": False}),
        ({"activation": "squared-relu"}, {"gated_mlp": False, "activation": "relu2", "mlp_bias": False}),
        ({"activation": "geglu", "share_embeddings_and_output_weights": True},
         {"gated_mlp": True, "activation": "gelu", "tied_embeddings": True}),
    ],
)  # fmt: skip
def test_the_words_of_nemo_for_a_model_are_read(
    tmp_path: Path, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    run = run_of(tmp_path, {**NEMO, "model": {**NEMO["model"], **changes}})
    model = imported_question(run, ImportOptions()).request.model
    assert {name: getattr(model, name) for name in fields} == fields and run.program.name == "bridge"


def test_the_three_batches_of_deepspeed_say_how_many_ranks_there_are(tmp_path: Path) -> None:
    batches = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    run = run_of(tmp_path, {**batches, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    question = fitting_question(run, ImportOptions(model="llama3-8b", seq_len=4096))
    assert question.request.cluster.num_ranks == 16 and not question.opens_nodes  # though it does not fit
    assert "16 ranks: the batches of the file make 16 replicas (--nodes sets it)" in map(str, question.assumed)


def test_nodes_are_not_doubled_until_a_batch_cannot_be_shared(tmp_path: Path) -> None:
    keys = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}
    question = fitting_question(run_of(tmp_path, keys), ImportOptions(model="llama3-70b", seq_len=4096))
    assert question.request.cluster.num_nodes == 1


@pytest.mark.parametrize(
    ("keys", "batch", "micro_batch", "why"),
    [
        ({**LLAMA, "global_batch_size": None, "micro_batch_size": 4}, 32, 4,
         "batch 32: dp 8 x mbs 4 x accumulation 1, as Megatron-LM does (--global-batch sets it)"),
        ({"train_batch_size": 64}, 64, 8, "micro-batch 8: batch 64 / dp 8, as DeepSpeed does (--fix mbs=N sets it)"),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 64, 2,
         "micro-batch 2: batch 64 / dp 8 / accumulation 4 (--fix mbs=N sets it)"),
        ({"train_micro_batch_size_per_gpu": 2}, 16, 2,
         "batch 16: dp 8 x mbs 2 x accumulation 1, as DeepSpeed does (--global-batch sets it)"),
        ({"training": {"seq_len": 2048}}, 64, 8, "batch 64: dp 8 x mbs 8 x accumulation 1 (--global-batch sets it)"),
    ],
)  # fmt: skip
def test_a_batch_that_a_file_leaves_open_is_what_its_program_makes_of_it(
    tmp_path: Path, keys: dict[str, Any], batch: int, micro_batch: int, why: str
) -> None:
    question = imported_question(run_of(tmp_path, keys), ImportOptions(model="llama3-8b", seq_len=2048))
    assert (question.request.workload.global_batch, question.candidate.mbs) == (batch, micro_batch)
    assert why in map(str, question.assumed)


@pytest.mark.parametrize(
    ("degrees", "nodes", "ranks", "says"),
    [
        ({"data_parallel_shard_degree": 1}, None, 2, "2 ranks: the degrees of the file make 2 ranks"),
        ({"data_parallel_shard_degree": 4, "data_parallel_replicate_degree": 2}, None, 16, "16 ranks: the degrees"),
        ({"data_parallel_shard_degree": 4}, 2, 16, "dp 8: the degrees of the file make 4, and torchtitan refuses"),
        ({"data_parallel_shard_degree": -1}, 2, 16, ""),
    ],
)
def test_a_mesh_that_is_stated_whole_says_how_many_ranks_there_are(
    tmp_path: Path, degrees: dict[str, Any], nodes: int | None, ranks: int, says: str
) -> None:
    run = run_of(tmp_path, TITAN, {"parallelism": {"tensor_parallel_degree": 2, **degrees}})
    question = fitting_question(run, ImportOptions(model="llama3.2-1b"), nodes)
    assert question.request.cluster.num_ranks == ranks
    assert any(says in str(line) for line in question.assumed) and bool(says) == any(
        "degrees" in str(line) for line in question.assumed
    )


@pytest.mark.parametrize(
    ("base", "keys"),
    [(MEGATRON, {"nproc_per_node": "gpu"}), (MEGATRON, {"trainer": {"devices": "auto"}}),
     (BRIDGE, {"trainer": {"devices": -1}}), (NXDT, {"trainer": {"devices": "auto"}})],
)  # fmt: skip
def test_all_devices_of_a_node_are_those_of_its_cluster(
    tmp_path: Path, base: dict[str, Any], keys: dict[str, Any]
) -> None:
    assert "cluster.per_node" not in run_of(tmp_path, base, keys).facts
