"""Measured rows for tests: small, wrong, and every word that published rows have."""

from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
FILES = sorted(DATA.glob("*.jsonl"))

ARCH = {"layers": 4, "hidden": 512, "ffn": 1024, "heads": 8, "kv_heads": 4, "vocab": 1000, "gated_mlp": True,
        "tied_embed": False}  # fmt: skip
SMALL: dict[str, Any] = {
    "id": "small", "group": "g", "platform": "h100", "model": "own", "arch": ARCH, "seq_len": 256,
    "global_batch_seqs": 16, "micro_batch": 1, "nodes": 1, "chips": 8, "tp": 2, "pp": 2, "vp": 1, "cp": 1, "ep": 1,
    "dp": 2, "sp": True, "recompute": "none", "sharding": "ZeRO-1", "precision": "BF16", "pipeline_schedule": "1F1B",
    "framework": "Megatron-Core", "step_time_s": 1.0, "peak_memory_gib": 10.0,
}  # fmt: skip

# Every distinct text of the published rows this was made for; also of sets that are not part of the repository.
RECOMPUTES = (
    "full", "full (uniform)", "full (uniform, 1 layer)", "none", "selective", "selective (core attention)",
    "per-op selective", "selective[CoreAttention]", "selective[CoreAttention,LlamaMLP]", "unknown", None,
)  # fmt: skip
PRECISIONS = (
    "Autocast:BF16+FP32Optimizer", "Autocast:BF16+SR", "BF16+SR", "mixed FP16", "fp16 mixed", "BF16", "float8 compile",
    "float8 compile asyncTP", "bf16 eager", "bf16 compile", "bf16 vanilla TP", "bf16 async TP", None,
    "bf16, fp32 gradient accumulation, fp32 master weights and Adam states",
)  # fmt: skip
SHARDINGS = ("none", "ZeRO-1", "FSDP2 (ZeRO-3)", "none or ZeRO-1 (see script)", None)
SCHEDULES = ("1F1B", "interleaved 1F1B", None)
FRAMEWORKS = (
    "neuronx-distributed", "neuronx-nemo-megatron", "aws-neuron-reference-for-megatron-lm", "torchtitan", "Megatron-LM",
    "Megatron-Core", "Megatron-DeepSpeed",
    "Megatron-LM + TransformerEngine 2.11 (flash attention, fused cross-entropy; CP is all-to-all)",
)  # fmt: skip
PLATFORMS = ("trn1", "a100", "h100", "h200", "b200")
