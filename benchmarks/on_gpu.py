"""Layers as large as those of a billion-parameter Llama on one GPU: the torch engine beside a plain compiled loop."""

# pyright: basic
# torch's own signatures are only partly typed.

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoshard.engine.base import Batch, Run
from autoshard.engine.programs import graph_of
from autoshard.engine.torch.engine import build
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.runtime.data.batches import synthetic_step
from autoshard.runtime.launch import Placing, launch
from autoshard.search.request import Request, plan_at
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision, Workload
from benchmarks import plain_llama
from benchmarks.result import Extra

PAIRS, WARM_UP = 15, 3
SIZES: Mapping[str, Any] = {"hidden": 2048, "ffn": 8192, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64}


def layers_of(sizes: Mapping[str, Any] = SIZES, seq_len: int = 4096) -> Plan:
    """Return the plan of four such layers in BF16 on one rank."""
    model = replace(load_model("tiny-llama"), **sizes, num_layers=4, vocab=2048)
    workload = Workload(seq_len=seq_len, global_batch=8, precision=Precision.named("bf16"))
    request = Request(model=model, cluster=load_cluster("local", ranks=1), workload=workload, engines=("torch",))
    return plan_at(request, Candidate.parse("tp=1,pp=1,dp=1,mbs=2"))


def speeds(plan: Plan, device: str = "cuda", backend: str = "inductor", pairs: int = PAIRS) -> Mapping[str, Extra]:
    """Run both turn by turn on one device; return what each reaches, and its share of the peak where that is known."""

    def body(_: Callable[[Any], None]) -> Sequence[tuple[float, float]]:
        with tempfile.TemporaryDirectory() as folder:
            mode = "compiled" if backend == "inductor" else "generated"
            engine = build(plan, Run(folder=Path(folder), training=Training(steps=1), device=device, mode=mode))
        batches = synthetic_step(plan)
        plain = compiled(plan.model, plan.workload.seq_len, device, backend)
        taken = [
            (_taken_s(lambda given: engine.step(given, 3e-4), batches), _taken_s(plain, batches))
            for _ in range(WARM_UP + pairs)
        ]
        return taken[WARM_UP:]

    with tempfile.TemporaryDirectory() as folder:
        found = launch(None, 1, body, show=lambda _: None, placing=Placing(folder=Path(folder), device=device))
    tokens = plan.workload.seq_len * plan.workload.global_batch
    rates = graph_of(plan).model_flops_per_token() * tokens / np.median(np.array(found), axis=0)
    peak = peak_flops_per_s(torch.cuda.get_device_name() if device == "cuda" else "")
    extras: dict[str, Extra] = {"gpu_speed": round(float(rates[0] / rates[1]), 3)}
    for name, rate in zip(("ours", "plain"), map(float, rates), strict=True):
        extras |= {f"gpu_{name}_tflops": rate / 1e12, f"gpu_{name}_mfu": rate / peak if peak else None}
    return extras


def compiled(model: ModelSpec, seq_len: int, device: str, backend: str) -> plain_llama.Step:
    """A plain loop in mixed precision under ``torch.compile``."""
    module = plain_llama.PlainLlama(model, seq_len).to(device)
    cos, sin = module.turns
    module.turns = (cos.to(device), sin.to(device))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3, (0.9, 0.95), 1e-8, 0.1, fused=True)
    whole = torch.compile(module, backend=backend)

    def step(batches: Sequence[Batch]) -> None:
        for batch in batches:
            tokens, labels = (torch.from_numpy(batch[name]).to(device) for name in ("tokens", "labels"))
            with torch.autocast(device, torch.bfloat16):
                loss = plain_llama.loss(whole(tokens), labels) / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), plain_llama.CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_flops_per_s(device_name: str) -> float | None:
    """Return the peak of a device by the name that its driver gives, if the catalogue has its chip.

    >>> peak_flops_per_s("NVIDIA H200"), peak_flops_per_s("a toaster")
    (989500000000000.0, None)
    """
    words = device_name.lower().replace("-", " ").split()
    chips = (load_cluster(name).chip for name in cluster_names())
    return next((chip.matrix_flops_per_s["bf16"] for chip in chips if chip.name.split("-")[0] in words), None)


def _taken_s(step: Callable[[Sequence[Batch]], object], batches: Sequence[Batch]) -> float:
    start_s = time.perf_counter()
    step(batches)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - start_s
