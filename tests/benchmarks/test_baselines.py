"""The formulas of other cost models give what their published code gives, and rules of thumb choose as they say."""

from dataclasses import replace
from typing import Any

import pytest

from autoshard.calibration.measured_run import MeasuredRun, run_of
from autoshard.calibration.rows import MeasuredRow
from benchmarks.baselines import calculon, llm_analysis
from benchmarks.baselines.rules import at_random, most_data_parallelism, node_wide

GPT3 = {"layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96}
MEGATRON_22B = {"layers": 48, "hidden": 6144, "ffn": 24576, "heads": 64}
MEGATRON_1T = {"layers": 128, "hidden": 25600, "ffn": 102400, "heads": 160}
LLAMA = {"layers": 32, "hidden": 4096, "ffn": 11008, "heads": 32, "vocab": 32000, "gated_mlp": True}
NARROW = {"layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000, "gated_mlp": True}


def ran(arch: dict[str, Any], layout: tuple[int, int, int], batch: int, **more: Any) -> MeasuredRun:
    """A run of a layout (tp, pp, dp) on whole nodes of A100."""
    tp, pp, dp = layout
    row: dict[str, Any] = {
        "id": "x", "platform": "a100-80", "model": "own", "arch": {"vocab": 64, "gated_mlp": False, **arch},
        "seq_len": 2048, "global_batch_seqs": batch, "micro_batch": 1, "chips": tp * pp * dp, "tp": tp, "pp": pp,
        "dp": dp, "vp": 1, "sp": False, "recompute": "none", "sharding": "none", "precision": "bf16",
        "kernels": "megatron", **more,
    }  # fmt: skip
    return run_of(MeasuredRow.read(row))


SELECTIVE = {"recompute": "selective[core_attn]", "sp": True}
ONE_T = {"recompute": "full", "sp": True, "sharding": "ZeRO-1", "micro_batch": 4}


@pytest.mark.parametrize(
    ("run", "published_s"),
    [  # calculon-ai/calculon caa4b11 with systems/a100_80g.json: validation/seqsel/fig7, its example, dp hidden
        (ran(GPT3, (8, 8, 1), 64, recompute="full", vp=3), 18.0288),
        (ran(GPT3, (8, 8, 1), 64, **SELECTIVE, vp=3), 13.6381),
        (ran(GPT3, (8, 8, 1), 64, recompute="selective[core_attn]", vp=3), 13.8423),
        (ran(MEGATRON_22B, (8, 1, 1), 4, **SELECTIVE, micro_batch=4), 1.1367),
        (ran(MEGATRON_1T, (4, 64, 12), 3072, **ONE_T), 131.8231),
        (ran(GPT3, (8, 8, 16), 1024, **SELECTIVE), 14.6659),
    ],
)
def test_calculon_takes_what_its_own_code_says(run: MeasuredRun, published_s: float):
    """Its file says 2,048 GB/s of memory, the chip 2,039; and there is a vocabulary of 64 here."""
    assert calculon.seconds(run) == pytest.approx(published_s, rel=0.002)


@pytest.mark.parametrize(
    ("run", "published_s"),
    [  # cli99/llm-analysis d841e40, training() with ZeRO-1, FLOPs efficiency 0.5 and memory efficiency 0.9
        (ran(LLAMA, (1, 1, 8), 64, sharding="ZeRO-1", kernels="torch_flash"), 4.560304),
        (ran({**LLAMA, "ffn": 16384, "gated_mlp": False}, (8, 2, 4), 128, sharding="ZeRO-1", kernels="torch_flash",
             sp=True, micro_batch=4), 1.442709),
        (ran({**GPT3, "vocab": 50304}, (8, 8, 1), 64, sharding="ZeRO-1", kernels="torch_flash", recompute="full"),
         20.728043),
        (ran(NARROW, (4, 2, 4), 64, sharding="ZeRO-1", kernels="torch_flash", recompute="full", sp=True, seq_len=4096,
             micro_batch=2, platform="h100-80"), 1.273652),
    ],
)  # fmt: skip
def test_llm_analysis_takes_what_its_own_code_says_and_a_bubble(run: MeasuredRun, published_s: float):
    at = run.candidate
    forward_s, again_s = llm_analysis.forward_seconds(run)
    without_bubble = llm_analysis.seconds(run) - (at.pp - 1) * (3 * forward_s + again_s)
    assert without_bubble == pytest.approx(published_s, rel=0.0005)
    assert (llm_analysis.seconds(run) > without_bubble) == (at.pp > 1)


def test_rules_of_thumb_choose_as_they_say():
    run = ran({**GPT3, "kv_heads": 4}, (4, 1, 8), 64)
    layouts = [{"tp": 1, "pp": 1, "dp": 32}, {"tp": 4, "pp": 2, "dp": 4}, {"tp": 4, "pp": 1, "dp": 8}]
    runs = [replace(run, candidate=replace(run.candidate, **one)) for one in layouts]
    assert (node_wide(runs), most_data_parallelism(runs), at_random(runs)) == ([2], [0], [0, 1, 2])
