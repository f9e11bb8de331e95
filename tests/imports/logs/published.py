"""Logs that people have published: what their reports say, in the forms of the programs, with sources.

Only numbers are taken over, and of each log a few reports. Where a source does not name the machine, or the whole
configuration, what is taken for it is said.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MEGATRON_ARGUMENTS = "------------------------ arguments ------------------------"
END = "-------------------- end of arguments ---------------------"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLog:
    """A log, the configuration with which it is read, and what is read of it; or why it is refused."""

    name: str
    source: str
    program: str
    text: str
    config: tuple[str, str] = ("", "")  # a name and a text
    model: tuple[str, str] = ("", "")  # the same of a config.json
    options: str = ""  # as typed
    steps: str = ""
    time_s: float = 0.0
    memory_gib: float | None = None
    candidate: str = ""
    refused: str = ""


def _stored(what: str, number: int) -> str:
    """A source whose repository its store does not name."""
    return f"{what}; text {number} of a store of public repositories"


def titan(day: str, reports: Iterable[tuple[str, int, float, int]], first: Sequence[str] = ()) -> str:
    """Reports of torchtitan: time of day, step, memory and tokens per second."""
    lines = [f"[rank0]:[titan] {day} {text}" for text in first]
    lines += [
        f"[rank0]:[titan] {day} {clock} - root - INFO - step: {step:2}  loss:  8.0000  memory: {gib:5.2f}GiB(30.00%)  "
        f"tps: {tps:,}  tflops: 400.00  mfu: 40.00%"
        for clock, step, gib, tps in reports
    ]
    return "".join(f"{line}\n" for line in lines)


def arguments(values: dict[str, object]) -> str:
    """The arguments as Megatron-LM prints them."""
    lines = [f"  {name} {'.' * max(2, 48 - len(name))} {value}" for name, value in values.items()]
    return "\n".join([MEGATRON_ARGUMENTS, *lines, END]) + "\n"


def megatron(milliseconds: Iterable[float], batch: int, first: int = 1, more: str = "", skipped: int = 0) -> str:
    """Reports of Megatron-LM, one for each iteration; ``more`` goes to the end of each line."""
    return "".join(
        f" iteration {number:8}/    1000 | consumed samples: {number * batch:12} | "
        f"elapsed time per iteration (ms): {ms} | learning rate: 1.000E-04 | "
        f"global batch size: {batch:5} | lm loss: 8.000000E+00 | loss scale: 1.0 | "
        f"number of skipped iterations: {skipped:3} | number of nan iterations:   0 |{more}\n"
        for number, ms in enumerate(milliseconds, first)
    )


LLAMA_TOML = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[compile]
enable = true
"""
FLOAT8_TOML = LLAMA_TOML.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]')
DEBUG_CONFIG = """{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 16,
"num_key_value_heads": 16, "intermediate_size": 768, "vocab_size": 2048, "max_position_embeddings": 2048,
"rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false, "hidden_act": "silu"}"""
GPT2_SMALL = """{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
"vocab_size": 50257, "activation_function": "gelu_new", "tie_word_embeddings": true}"""
NEMO_YAML = """trainer: {{devices: 8, num_nodes: 1, precision: bf16}}
model: {{num_layers: 32, hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8,
  encoder_seq_length: 8192, micro_batch_size: {mbs}, global_batch_size: {gbs}, tensor_model_parallel_size: 1,
  pipeline_model_parallel_size: 1, context_parallel_size: {cp}, use_distributed_optimizer: True,
  overlap_grad_reduce: True}}
"""
_AO = "https://github.com/pytorch/ao/blob/25a8c59/docs/source/pretraining.rst"
_AGAIN = "recompute=selective[act,attn_add,attn_norm,k,k_rotary,mlp_norm,o,product,q_rotary,up]"
_ON_H100 = "--nodes 1 --cluster h100-96"  # 28.78 % are 27.34 GiB there
_DEEPLINK = "https://github.com/DeepLink-org/AIChipBenchmark/tree/main/llm"
GPT_13B: dict[str, object] = {
    "accumulate_allreduce_grads_in_fp32": False, "bf16": False, "checkpoint_activations": True,
    "checkpoint_num_layers": 1, "ffn_hidden_size": 20480, "fp16": True, "global_batch_size": 1024,
    "hidden_size": 5120, "kv_channels": 128, "layernorm_epsilon": 1e-05, "max_position_embeddings": 2048,
    "micro_batch_size": 1, "num_attention_heads": 40, "num_layers": 40,
    "num_layers_per_virtual_pipeline_stage": None, "pipeline_model_parallel_size": 4, "seq_length": 2048,
    "tensor_model_parallel_size": 2, "tokenizer_type": "GPT2BPETokenizer",
    "virtual_pipeline_model_parallel_size": None, "world_size": 8,
}  # fmt: skip

LOGS = (
    PublishedLog(
        name="titan-h200.log",
        source=_stored("PyTorch benchmarks on 8 H200, run 2025-02-13", 19093018932),
        program="torchtitan", steps="10..100", time_s=65536 / (7054 * 8), memory_gib=49.59,
        candidate=f"tp=1,pp=1,dp=8,zero=3,{_AGAIN},kernels=torch_cuda",
        text=titan("2025-02-13", [
            ("11:33:35,026", 1, 42.08, 1478), ("11:33:45,521", 10, 49.59, 7026), ("11:33:57,093", 20, 49.59, 7080),
            ("11:34:20,249", 40, 49.59, 7072), ("11:34:43,479", 60, 49.59, 7051), ("11:34:55,115", 70, 49.59, 7042),
            ("11:35:30,360", 100, 49.59, 7057),
        ], [
            "11:33:12,138 - root - INFO - CUDA capacity: NVIDIA H200 with 139.83GiB memory",
            "11:33:12,140 - root - INFO - Building 1-D device mesh with ['dp_shard'], [8]",
            "11:33:28,973 - root - INFO - Building llama3 8B with ModelArgs(dim=4096, n_layers=32, n_heads=32)",
            "11:33:29,157 - root - INFO - Applied selective activation checkpointing to the model",
            "11:33:29,482 - root - INFO - Training starts at step 1, with local batch size 1, global batch size 8, "
            "sequence length 8192, total steps 100 (warmup 200)",
        ]),
    ),
    PublishedLog(
        name="titan-bf16.log", source=_AO, program="torchtitan", steps="10..40", time_s=65536 / (6310.5 * 8),
        memory_gib=30.89, config=("llama3_8b.toml", LLAMA_TOML), options=_ON_H100,
        candidate=f"tp=1,pp=1,dp=8,zero=3,{_AGAIN},kernels=torch_compiled",
        text=titan("2025-06-04", [
            ("11:02:37,404", 1, 27.22, 595), ("11:02:49,027", 10, 30.89, 6344), ("11:03:01,988", 20, 30.89, 6321),
            ("11:03:14,991", 30, 30.89, 6300), ("11:03:28,013", 40, 30.89, 6291),
        ]),
    ),
    PublishedLog(
        name="titan-rowwise.log", source=_AO, program="torchtitan", steps="10..30", time_s=65536 / (7022 * 8),
        memory_gib=30.99, config=("float8.toml", FLOAT8_TOML), options=_ON_H100,
        candidate=f"tp=1,pp=1,dp=8,zero=3,{_AGAIN},kernels=torch_compiled",
        text=titan("2025-06-04", [
            ("08:51:48,074", 1, 27.34, 375), ("08:51:58,557", 10, 30.99, 7034), ("08:52:10,224", 20, 30.99, 7022),
            ("08:52:21,904", 30, 30.99, 7014),
        ]),
    ),
    PublishedLog(
        name="titan-tensorwise.log", source=_AO, program="torchtitan", steps="10..40", time_s=65536 / (7640 * 8),
        memory_gib=30.91, config=("float8.toml", FLOAT8_TOML), options=_ON_H100,
        candidate=f"tp=1,pp=1,dp=8,zero=3,{_AGAIN},kernels=torch_compiled",
        text=titan("2025-06-04", [
            ("10:52:19,648", 1, 27.28, 557), ("10:52:29,475", 10, 30.91, 7503), ("10:52:40,166", 20, 30.91, 7663),
            ("10:52:50,885", 30, 30.91, 7643), ("10:53:01,613", 40, 30.91, 7637),
        ]),
    ),
    PublishedLog(  # llama3_8b.toml and 8 ranks are the defaults of run_train.sh
        name="titan-eager.log", source="https://github.com/pytorch/torchtitan/pull/1287", program="torchtitan",
        steps="210..250", time_s=65536 / (5864 * 8), memory_gib=49.66,
        config=("eager.toml", LLAMA_TOML.replace("enable = true", "enable = false")), options=_ON_H100,
        candidate=f"tp=1,pp=1,dp=8,zero=3,{_AGAIN},kernels=torch_cuda",
        text=titan("2025-06-16", [
            ("22:30:50,322", 200, 49.66, 5856), ("22:31:04,970", 210, 49.66, 5593), ("22:31:18,934", 220, 49.66, 5868),
            ("22:31:32,895", 230, 49.66, 5869), ("22:31:46,869", 240, 49.66, 5864), ("22:32:00,846", 250, 49.66, 5862),
        ]),
    ),
    PublishedLog(
        name="titan-debug.log",
        source=_stored("tests on 8 H200, run 2025-11-25", 39298784851),
        program="torchtitan", steps="2..10", time_s=131072 / (338287 * 8), memory_gib=1.34,
        model=("debugmodel.json", DEBUG_CONFIG),
        candidate=f"tp=1,pp=1,dp=8,mbs=8,zero=3,{_AGAIN},kernels=torch_cuda",
        text=titan("2025-11-25", [
            ("19:45:01,441", 1, 1.21, 5756), ("19:45:01,496", 2, 1.34, 301092), ("19:45:01,542", 3, 1.34, 359546),
            ("19:45:01,589", 4, 1.34, 347712), ("19:45:01,638", 5, 1.34, 338287), ("19:45:01,690", 6, 1.34, 317373),
            ("19:45:01,740", 7, 1.34, 329413), ("19:45:01,785", 8, 1.34, 364703), ("19:45:01,832", 9, 1.34, 351177),
            ("19:45:01,883", 10, 1.34, 324245),
        ], [
            "19:44:55,287 - root - INFO - Building 1-D device mesh with ['dp_shard'], [8]",
            "19:44:58,537 - root - INFO - Building llama3 debugmodel with TransformerModelArgs(dim=256, n_layers=6)",
            "19:44:58,547 - root - INFO - CUDA capacity: NVIDIA H200 with 139.81GiB memory",
            "19:44:58,595 - root - INFO - Applied selective activation checkpointing to the model",
            "19:44:58,838 - root - INFO - Trainer is initialized with local batch size 8, global batch size 64, "
            "gradient accumulation steps 1, sequence length 2048, total steps 10 (warmup 2)",
        ]),
    ),
    PublishedLog(  # 142 TFLOP/s of each of 8 devices: A100
        name="megatron-2021.log", source=_stored("Megatron-LM on 8 devices, run 2021-09-08", 6137091336),
        program="Megatron-LM", options="--cluster a100-80", steps="2..10", time_s=192.6679,
        candidate="tp=2,pp=4,dp=1,sp=false,zero=0,recompute=full,kernels=megatron",
        text=arguments(GPT_13B) + megatron(
            [201212.4, 188590.1, 188879.7, 190863.1, 192769.9, 192465.4, 192667.9, 192854.6, 192785.9, 192930.3],
            1024, skipped=1,
        ),
    ),
    PublishedLog(  # 153 TFLOP/s of each of 64 devices: A100
        name="gpt-175b.log", source=f"{_DEEPLINK}/GPT3", program="Megatron-DeepSpeed",
        config=("train.sh",
                "torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 96 --hidden-size 12288 "
                "--num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
                "--global-batch-size 1536 --fp16 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
                "--use-flash-attn\n"),
        options="--cluster a100-80", steps="6..10", time_s=346.4305,
        candidate="tp=8,pp=8,dp=1,sp=false,zero=0,kernels=te",
        text="".join(
            megatron([ms], 1536, number, f" consumed tokens: 15728640 | samples per second: {sps} | "
                     f"tokens per gpu per second (tgs): {tgs} | TFLOPs: 153.38 |")
            for number, (ms, sps, tgs) in enumerate([
                (344656.1, 4.457, 142.612), (347319.2, 4.422, 141.518), (345333.7, 4.448, 142.332),
                (346430.5, 4.434, 141.881), (347071.6, 4.426, 141.619), (344835.7, 4.454, 142.537)], 5)
        ),
    ),
    PublishedLog(
        name="nemo-8b.log", source=f"{_DEEPLINK}/LLaMa-V3",
        program="NeMo", config=("llama.yaml", NEMO_YAML.format(gbs=128, mbs=1, cp=2)),
        options="--model llama3-8b", refused="is too short: 3 steps in 3 reports behind the warm-up",
        text="".join(
            f"[2025-11-20T{clock}+08:00] retraining/0 Training epoch 0, iteration {step}/99 | lr: 1.4e-05 | "
            f"global_batch_size: 128 | global_step: {step} | reduced_train_loss: 6.2 | "
            f"train_step_timing in s: {time} | tokens_per_sec_per_gpu: 1.073e+04 | consumed_samples: 12544\n"
            for clock, step, time in (("14:55:23", 97, 12.22), ("14:55:35", 98, 12.21), ("14:55:47", 99, 12.21))
        ),
    ),
    PublishedLog(
        name="nxdt-gpt.log",
        source="https://github.com/aws-neuron/aws-neuron-sdk/blob/72825d5/libraries/nxd-training/tutorials/"
        "megatron_gpt_pretraining.rst",
        program="NeMo or NxD Training", config=("megatron_gpt.yaml",
            "trainer: {devices: 32, num_nodes: 8}\n"
            "distributed_strategy: {tensor_model_parallel_size: 8, pipeline_model_parallel_size: 1, zero1: True}\n"
            "data: {micro_batch_size: 1, global_batch_size: 128}\n"
            "model: {encoder_seq_length: 2048, num_layers: 32, hidden_size: 4096, num_attention_heads: 32}\n"),
        options="--model gpt3-6.7b", refused="3 reports without seconds or rates, and too few for a clock of 1 s",
        text="".join(
            f"    Epoch 0:   0%|          | {step}/301501 [{clock}<1573:03:24, 18.79s/it, loss=7.75, v_num=3-16, "
            f"reduced_train_loss=7.560, global_step={step - 1}.0, consumed_samples=24064.0]\n"
            for clock, step in (("59:12", 189), ("59:30", 190), ("59:48", 191))
        ),
    ),
    PublishedLog(
        name="bert-squad.log", source="https://github.com/eth-cscs/pytorch-training/tree/main/bert_squad",
        program="DeepSpeed", config=("ds.json", '{"train_batch_size": 512, "zero_optimization": {"stage": 1}}'),
        options="--nodes 1 --model bert-base", refused="is not a known model",
        text="".join(
            f"[2022-08-29 {clock}] [INFO] [logging.py:68:log_dist] [Rank 0] step={step}, skipped=17, lr=[5e-05], "
            f"mom=[(0.9, 0.999)]\n[2022-08-29 {clock}] [INFO] [timer.py:198:stop] 0/{step}, "
            f"RunningAvgSamplesPerSec=230.8, CurrSamplesPerSec={rate}, MemAllocated=0.36GB, MaxMemAllocated=15.06GB\n"
            for clock, step, rate in (
                ("06:58:56,121", 20, 227.481), ("06:59:18,633", 30, 227.45), ("06:59:41,140", 40, 227.722))
        ),
    ),
    PublishedLog(  # batch 512 by its hello-world.yaml; no chip named: an A100 is taken
        name="gpt2-small.log", source="https://github.com/stanford-crfm/mistral/blob/main/docs/tutorials/deepspeed.rst",
        program="DeepSpeed",
        config=("z1.json", '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, '
                '"fp16": {"enabled": true}, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1, '
                '"reduce_scatter": true, "reduce_bucket_size": 2e8, "overlap_comm": true}}'),
        model=("gpt2.json", GPT2_SMALL), options="--nodes 2 --cluster a100-40 --seq-len 1024",
        steps="180..190", time_s=(10.827 + 10.761) / 20, candidate="tp=1,pp=1,dp=16,mbs=4,kernels=torch_cuda",
        text="".join(
            f"machine1: [2021-07-01 {clock}] [INFO] [logging.py:60:log_dist] [Rank 0] step={step}, skipped=17, "
            f"lr=[0.0003], mom=[[0.9, 0.95]]\n"
            f"machine1: [2021-07-01 {clock}] [INFO] [timer.py:154:stop] 0/{8 * step}, SamplesPerSec={rate}\n"
            for clock, step, rate in (
                ("01:24:59,832", 150, 463.864), ("01:25:23,771", 160, 464.628), ("01:25:34,665", 170, 465.259),
                ("01:25:45,492", 180, 465.978), ("01:25:56,253", 190, 466.77))
        ),
    ),
    PublishedLog(
        name="nemo-b200.log",
        source=_stored("benchmarks of NeMo on 8 B200, run 2025-10-01", 39769813321),
        program="NeMo", config=("llama3_8b.yaml", NEMO_YAML.format(gbs=128, mbs=2, cp=1)),
        options="--model llama3-8b --cluster b200", steps="45..49", time_s=6.071, memory_gib=115792977920 / 2**30,
        candidate="tp=1,pp=1,dp=8,mbs=2,kernels=mcore",
        text="".join(
            f"Training epoch 0, iteration {step}/99 | lr: 6.897e-06 | global_batch_size: 128 | global_step: {step} | "
            f"max_memory_reserved: 127785762816 | max_memory_allocated: 115792977920 | reduced_train_loss: 11.96 | "
            f"train_step_timing in s: {time} | TFLOPS_per_GPU: 1.249e+03 | consumed_samples: {(step + 1) * 128}\n"
            for step, time in enumerate((6.08, 6.061, 6.082, 6.071, 6.06), 45)
        ),
    ),
    PublishedLog(
        name="mixtral.log", source="https://github.com/NVIDIA/Megatron-LM/issues/756", program="Megatron-LM",
        refused="prints no configuration. Type --config FILE",
        text=megatron([5630.1, 5410.6, 5364.1], 128, 2) + megatron([5450.5, 5538.9, 5410.9], 128, 57)
        + megatron([5523.5, 5540.0], 128, 99),
    ),
    PublishedLog(
        name="neox.log", source="https://github.com/deepspeedai/DeepSpeed/issues/3742", program="Megatron-LM",
        refused="prints no configuration. Type --config FILE",
        text="".join(
            f" samples/sec: {rate} | iteration {step:8}/   10000 | elapsed time per iteration (ms): {ms} | "
            f"learning rate: 1E-06 | lm_loss: 1.118885E+01 | number of skipped iterations:   0 |\n"
            for step, ms, rate in ((15, 3825.7, 8.364), (20, 4301.7, 7.439), (34, 4103.1, 7.799))
        ),
    ),
    PublishedLog(
        name="deepseek.log",
        source=_stored("measurements of torchtitan, run 2025-10-30", 15672625489),
        program="torchtitan",
        config=("deepseek_16b.toml", LLAMA_TOML.replace("llama3", "deepseek_v3").replace("8B", "16B")),
        options="--nodes 1", refused="--model: missing",
        text=titan("2025-10-30", [
            ("20:34:24,804", 1, 37.96, 1689), ("20:34:38,183", 10, 52.53, 11023), ("20:34:52,342", 20, 52.53, 11572),
            ("20:35:06,466", 30, 52.53, 11601), ("20:35:20,681", 40, 52.53, 11527),
        ]),
    ),
)  # fmt: skip
