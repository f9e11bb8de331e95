"""Configurations that vendors publish: keys that say something of time and memory, written anew, with sources."""

from dataclasses import dataclass

_NXDT = "https://github.com/aws-neuron/neuronx-distributed-training/blob/9169aa0/examples/conf/"
_MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/d98e8a6/"
_TITAN = "https://github.com/pytorch/torchtitan/blob/"
_BRIDGE = "https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/067f987/src/megatron/bridge/recipes/llama/h100/llama3.py"
_NEMO = "https://github.com/NVIDIA/NeMo/blob/8cfedd7/nemo/collections/llm/recipes/"
_ACCELERATE = "https://github.com/huggingface/accelerate/blob/16cb6eb/examples/"
_DEEPSPEED = "https://github.com/deepspeedai/DeepSpeedExamples/blob/45b4b71/training/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A configuration, and what is read from it: options are what a user has to type."""

    file: str
    source: str
    text: str
    program: str
    model: str
    cluster: str
    nodes: int
    seq_len: int
    global_batch: int
    candidate: str
    precision: str = "bf16"
    function: str = ""
    options: tuple[tuple[str, object], ...] = ()
    unread: tuple[str, ...] = ()


PUBLISHED = (
    Published(
        file="hf_llama3_70B_config.yaml",
        source=_NXDT + "hf_llama3_70B_config.yaml",
        program="nxdt", model="llama3-70b", cluster="trn1.32xlarge", nodes=16, seq_len=8192, global_batch=1024,
        candidate="tp=32,pp=8,dp=2,recompute=selective[CoreAttention,LlamaMLP]",
        text="""
trainer: {devices: 32, num_nodes: 16, max_steps: 30000}
exp_manager: {name: hf_llama, checkpoint_callback_params: {save_top_k: 1}}
distributed_strategy:
  tensor_model_parallel_size: 32
  pipeline_model_parallel_size: 8
  virtual_pipeline_model_parallel_size: 1
  context_parallel_size: 1
  zero1: True
  sequence_parallel: True
  kv_replicator: 4
data: {micro_batch_size: 1, global_batch_size: 1024}
model:
  model_config: config.json
  encoder_seq_length: 8192
  max_position_embeddings: 8192
  num_layers: 80
  hidden_size: 8192
  rope_theta: 500000.0
  activations_checkpoint_granularity: selective
  activations_checkpoint_recompute: [CoreAttention, LlamaMLP]
  fusions: {softmax: True, flash_attention: True}
  optim: {name: adamw, lr: 0.000015}
precision: {type: mixed_precision}
""",
    ),
    Published(
        file="hf_llama3_70B_trn2_config.yaml",
        source=_NXDT + "hf_llama3_70B_trn2_config.yaml",
        program="nxdt", model="llama3-70b", cluster="trn2.48xlarge", nodes=8, seq_len=8192, global_batch=1024,
        candidate="tp=32,pp=4,dp=4,recompute=selective[ActivationMultiplyMLP,LlamaRMSNorm],stages=19/21*2/19,lnc=2",
        text="""
trainer: {devices: 64, lnc: 2, num_nodes: 8}
distributed_strategy: {tensor_model_parallel_size: 32, pipeline_model_parallel_size: 4, zero1: True,
  virtual_pipeline_model_parallel_size: 1, sequence_parallel: True, kv_replicator: 4}
data: {micro_batch_size: 1, global_batch_size: 1024}
model:
  encoder_seq_length: 8192
  max_position_embeddings: 8192
  num_layers: 80
  hidden_size: 8192
  rope_theta: 500000.0
  pipeline_cuts: ["model.layers.18", "model.layers.39", "model.layers.60"]
  activations_checkpoint_granularity: selective
  activations_checkpoint_recompute: [LlamaRMSNorm, ActivationMultiplyMLP]
  fusions: {flash_attention: True}
precision: {type: mixed_precision}
""",
    ),
    Published(
        file="hf_llama3.1_405B_trn1_config.yaml",
        source=_NXDT + "hf_llama3.1_405B_trn1_config.yaml",
        program="nxdt", model="llama3.1-405b", cluster="trn1.32xlarge", nodes=64, seq_len=8192, global_batch=256,
        candidate="tp=32,pp=32,dp=2,recompute=full,stages=3*2/4*30",
        text="""
trainer: {devices: 32, num_nodes: 64}
distributed_strategy: {tensor_model_parallel_size: 32, pipeline_model_parallel_size: 32, zero1: True,
  virtual_pipeline_model_parallel_size: 1, sequence_parallel: True, kv_replicator: 4}
data: {micro_batch_size: 1, global_batch_size: 256}
model:
  encoder_seq_length: 8192
  max_position_embeddings: 131072
  num_layers: 126
  hidden_size: 16384
  activations_checkpoint_granularity: full
  activations_checkpoint_recompute: null
  fusions: {flash_attention: True}
precision: {type: mixed_precision}
""",
    ),
    Published(
        file="train_gpt3_175b_distributed.sh",
        source=_MEGATRON + "examples/gpt3/train_gpt3_175b_distributed.sh",
        program="megatron", model="gpt3-175b", cluster="h100-80", nodes=16, seq_len=2048, global_batch=1536,
        precision="fp16,gradients=fp16", candidate="tp=8,pp=16,dp=1,sp=false,zero=0,kernels=te",
        unread=("step_batch_size_schedule = 0:16 12B:1536",),
        text="""#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=1
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DATA_PATH=$5 #<Specify path and file prefix>_text_document
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --step-batch-size-schedule "0:16 12B:1536"
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
)
MODEL_PARALLEL_ARGS=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} --data-path $DATA_PATH
""",
    ),
    Published(
        file="train_mixtral_8x7b_distributed.sh",
        source=_MEGATRON + "examples/mixtral/train_mixtral_8x7b_distributed.sh",
        program="megatron", model="mixtral-8x7b", cluster="h100-80", nodes=4, seq_len=4096, global_batch=256,
        candidate="tp=1,pp=4,ep=8,dp=8,kernels=mcore",
        text="""#!/bin/bash
NNODES=${SLURM_NNODES:-"1"}
MODEL_ARGS=(--disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32
    --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention
    --num-query-groups 8 --rotary-base 1000000)
MOE_ARGS=(--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --overlap-param-gather --overlap-grad-reduce)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 256 --bf16)
MODEL_PARALLEL_ARGS=(--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
    --use-distributed-optimizer --sequence-parallel)
if [ -n "${WANDB_API_KEY}" ]; then
    echo logging
fi
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]}
""",
    ),
    Published(
        file="gpt3_mcore_te_tp2_pp2.yaml",
        source=_MEGATRON + "tests/functional_tests/test_cases/gpt/gpt3_mcore_te_tp2_pp2/model_config.yaml",
        program="megatron", model="gpt3_mcore_te_tp2_pp2", cluster="h100-80", nodes=1, seq_len=1024, global_batch=32,
        candidate="tp=2,pp=2,dp=2,mbs=4,sp=false,zero=0,kernels=te",
        text="""
ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --train-iters: 50
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --bf16: true
TEST_TYPE: regular
""",
    ),
    Published(
        file="llama3.py", function="llama3_70b_pretrain_32gpu_h100_bf16_config",
        source=_BRIDGE,
        program="bridge", model="llama3-70b", cluster="h100-80", nodes=4, seq_len=8192, global_batch=512,
        candidate="tp=4,pp=4,cp=2,dp=1,vp=5,schedule=interleaved,kernels=mcore,cp_order=zigzag",
        text="""
def llama3_70b_pretrain_32gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-70B").get_model_config()
    cfg.dataset.seq_length = 8192
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = 8192
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.model.recompute_granularity = None
    cfg.ddp.overlap_grad_reduce = True
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.grad_reduce_in_fp32 = True
    return cfg
""",
    ),
    Published(
        file="llama3_8b.py", function="llama3_8b_pretrain_2gpu_h100_bf16_config",
        source=_BRIDGE,
        program="bridge", model="llama3-8b", cluster="h100-80", nodes=1, seq_len=8192, global_batch=512,
        candidate="tp=1,pp=1,cp=2,dp=1,kernels=mcore,cp_order=zigzag",
        text="""
def llama3_8b_pretrain_2gpu_h100_bf16_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = False
    cfg.model.seq_length = 8192
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    cfg.ddp.overlap_grad_reduce = True
    return cfg
""",
    ),
    Published(
        file="llama3_70b.py", function="pretrain_recipe",
        source=_NEMO + "llama3_70b.py",
        program="bridge", model="llama3-70b", cluster="h100-80", nodes=4, seq_len=8192, global_batch=512,
        candidate="tp=4,pp=4,cp=2,dp=1,vp=5,schedule=interleaved,kernels=mcore,cp_order=zigzag",
        text='''
def model():
    return run.Config(LlamaModel, config=run.Config(Llama3Config70B))

def trainer(tensor_parallelism: int = 4, pipeline_parallelism: int = 4, virtual_pipeline_parallelism: int = 5,
            context_parallelism: int = 2, sequence_parallelism: bool = True, num_nodes: int = 4,
            num_gpus_per_node: int = 8):
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        pipeline_model_parallel_size=pipeline_parallelism,
        virtual_pipeline_model_parallel_size=virtual_pipeline_parallelism,
        context_parallel_size=context_parallelism,
        sequence_parallel=sequence_parallelism,
    )
    plugins = bf16_mixed()
    return run.Config(nl.Trainer, devices=num_gpus_per_node, num_nodes=num_nodes, plugins=plugins, strategy=strategy)

def pretrain_recipe(num_nodes: int = 1, num_gpus_per_node: int = 8):
    """Set up pre-training."""
    return run.Partial(
        pretrain,
        model=model(),
        trainer=trainer(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
    )
''',
    ),
    Published(
        file="llama3_70b.toml",
        source=_TITAN + "9810191^/torchtitan/models/llama3/train_configs/llama3_70b.toml",
        program="torchtitan", model="llama3.1-70b", cluster="a100-80", nodes=8, seq_len=8192, global_batch=64,
        candidate="tp=8,pp=1,dp=8,mbs=8,zero=3,recompute=full,kernels=torch_cuda",
        text="""# NOTE: this toml config is a preset for 64 A100 GPUs.
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"
[training]
local_batch_size = 8
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
[compile]
enable=false
""",
    ),
    Published(
        file="config_registry.py", function="llama3_405b", options=(("nodes", 64),),
        source=_TITAN + "b5bcd76/torchtitan/models/llama3/config_registry.py",
        program="torchtitan", model="llama3.1-405b", cluster="h100-80", nodes=64, seq_len=8192, global_batch=128,
        precision="bf16,products=fp8",
        candidate="tp=8,pp=1,dp=64,mbs=2,zero=3,recompute=full,kernels=torch_async_tp",
        text="""
def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(model_spec=model_spec, training=TrainingConfig(max_context_length=8192))

def llama3_405b() -> Trainer.Config:
    compile_config = CompileConfig(enable=True, enable_async_tensor_parallel=True)
    model_spec = model_registry(
        "405B", converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"])],
    )
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-405B",
        model_spec=model_spec,
        optimizer=default_adamw(lr=8e-5),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192, steps=3000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8),
        activation_checkpoint=FullAC.Config(),
        compile=compile_config,
    )
""",
    ),
    Published(
        file="tp_hsdp.yaml", options=(("model", "llama3-8b"), ("seq_len", 8192), ("global_batch", 32)),
        source=_ACCELERATE + "torch_native_parallelism/configs/tp_hsdp.yaml",
        program="accelerate", model="llama3-8b", cluster="h100-80", nodes=1, seq_len=8192, global_batch=32,
        candidate="tp=2,pp=1,dp=4,sp=false,zero=3,zero_group=2,kernels=torch_cuda",
        text="""
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_activation_checkpointing: false, fsdp_offload_params: false, fsdp_reshard_after_forward: true,
  fsdp_version: 2}
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config: {parallelism_config_cp_size: 1, parallelism_config_dp_replicate_size: 2,
  parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2}
""",
    ),
    Published(
        file="fsdp.yaml", options=(("model", "llama3-8b"), ("seq_len", 8192), ("global_batch", 32)),
        source=_ACCELERATE + "config_yaml_templates/fsdp.yaml",
        program="accelerate", model="llama3-8b", cluster="h100-80", nodes=1, seq_len=8192, global_batch=32,
        candidate="tp=1,pp=1,dp=2,zero=3,kernels=torch_cuda",
        text="""
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config: {fsdp_activation_checkpointing: false, fsdp_sharding_strategy: FULL_SHARD, fsdp_use_orig_params: true}
""",
    ),
    Published(
        file="bf16_full.json", options=(("model", "llama3-8b"), ("seq_len", 8192)),
        source=_DEEPSPEED + "bf16_master_weight/configs/bf16_full.json",
        program="deepspeed", model="llama3-8b", cluster="h100-80", nodes=1, seq_len=8192, global_batch=32,
        precision="bf16-sr,gradients=bf16,moments=bf16", candidate="tp=1,pp=1,dp=8,mbs=4,zero=3,kernels=torch_cuda",
        text="""{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
"zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": 5e7}}""",
    ),
    Published(
        file="ds_config.json", options=(("model", "gpt2-xl"), ("seq_len", 1024)),
        source=_DEEPSPEED + "pipeline_parallelism/ds_config.json",
        program="deepspeed", model="gpt2-xl", cluster="h100-80", nodes=1, seq_len=1024, global_batch=256,
        precision="fp32", candidate="tp=1,pp=1,dp=8,mbs=8,zero=0,kernels=torch_cuda",
        text="""{"train_batch_size" : 256, "train_micro_batch_size_per_gpu" : 8,
"optimizer": {"type": "Adam", "params": {"lr": 0.001}}, "steps_per_print" : 10, "wall_clock_breakdown" : false}""",
    ),
)  # fmt: skip
