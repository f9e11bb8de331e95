"""How long tracing a layer of a torch module and solving it exactly take, on two and three axes, with less memory."""

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from benchmarks.measure import yardstick_s
from benchmarks.result import Result

ROUNDS = 3
BAR_BYTES = 300_000_000  # beyond torch and transformers
_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """A layer on a mesh of 8 H100 a node, and how long tracing and solving may take."""

    model: str
    nodes: int
    mesh: str
    bar_s: float
    memory_share: float | None = None  # of what the solution without a limit keeps


CASES: Mapping[str, LayerCase] = {
    "llama_8x8": LayerCase(model="llama", nodes=8, mesh="dp=8,tp=8", bar_s=2.0),
    "llama_8x4x8": LayerCase(model="llama", nodes=32, mesh="dp=8,cp=4,tp=8", bar_s=4.0),
    "llama_8x8_half_memory": LayerCase(model="llama", nodes=8, mesh="dp=8,tp=8", bar_s=10.0, memory_share=0.5),
    "llama_8x4x8_half_memory": LayerCase(model="llama", nodes=32, mesh="dp=8,cp=4,tp=8", bar_s=10.0, memory_share=0.5),
    "vit_large_8x8": LayerCase(model="vit", nodes=8, mesh="dp=8,tp=8", bar_s=2.0),
    "bert_large_8x8": LayerCase(model="bert", nodes=8, mesh="dp=8,tp=8", bar_s=2.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedCase:
    """The least CPU seconds of a case, and what its solution is worth."""

    cpu_s: float
    gap: float
    fits: bool


def run() -> Result:
    """Trace and solve every case in turns; torch and transformers are imported before."""
    layers = {name: make() for name, make in _layers().items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES
    found = {name: _solved(case, *layers[case.model]) for name, case in CASES.items()}
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT_BYTES
    return judge(found, (before, peak_bytes), yardstick_s())


def judge(found: Mapping[str, SolvedCase], peaks_bytes: tuple[int, int], loop_s: float) -> Result:
    """Take the case that needs most of its bar; every solution must be proven and fit.

    The peaks of memory are those after imports, and at the end.
    """
    imports_bytes, peak_bytes = peaks_bytes
    shares = {name: one.cpu_s / CASES[name].bar_s for name, one in found.items()}
    worst = max(shares, key=lambda name: shares[name])
    return Result(
        name="shard_module",
        value=round(shares[worst], 3),
        unit="of the CPU seconds allowed",
        bar=1.0,
        holds=shares[worst] <= 1.0
        and all(one.fits and one.gap <= 1e-9 for one in found.values())
        and peak_bytes - imports_bytes <= BAR_BYTES,
        extras={
            "worst": worst,
            **{f"{name}_s": round(one.cpu_s, 3) for name, one in found.items()},
            **{f"{name}_bar_s": CASES[name].bar_s for name in found},
            "largest_gap": max(one.gap for one in found.values()),
            "imports_bytes": imports_bytes,
            "peak_bytes": peak_bytes,
            "yardstick_s": loop_s,
        },
    )


def _solved(case: LayerCase, module: Any, inputs: Sequence[Any]) -> SolvedCase:
    from autoshard.modules.shard import ModuleSharding, shard_module
    from autoshard.spec.cluster_catalogue import load_cluster

    cluster = load_cluster("h100-80", case.nodes)
    share, more = case.memory_share, dict[str, Any](batch="dp")
    if share:
        more["memory_bytes"] = share * shard_module(module, inputs, cluster, case.mesh, batch="dp").solution.kept_bytes
    times, found = list[float](), list[ModuleSharding]()
    for _ in range(ROUNDS):
        before = time.process_time()
        found.append(shard_module(module, inputs, cluster, case.mesh, **more))
        times.append(time.process_time() - before)
    solution = found[-1].solution
    return SolvedCase(cpu_s=min(times), gap=solution.gap, fits=solution.fits)


def _layers() -> Mapping[str, Callable[[], tuple[Any, Sequence[Any]]]]:
    """Return layers of Hugging Face models without weights, with their inputs."""
    import torch
    from transformers import BertConfig, LlamaConfig, ViTConfig
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
    from transformers.models.vit.modeling_vit import ViTLayer

    def config(kind: Any, **sizes: int) -> Any:
        return kind(**sizes, attn_implementation="sdpa")

    class First(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module | None = None) -> None:
            super().__init__()
            self.layer, self.rotary = layer, rotary

        def forward(self, x: Any, positions: Any = None) -> Any:
            more = {"position_embeddings": self.rotary(x, positions)} if self.rotary else {}
            found: Any = self.layer(x, **more)
            return cast(Any, found[0]) if isinstance(found, tuple) else found

    def llama() -> tuple[Any, Sequence[Any]]:
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        made = config(LlamaConfig, **sizes, num_hidden_layers=1)
        with torch.device("meta"):
            module = First(LlamaDecoderLayer(made, 0), LlamaRotaryEmbedding(made)).eval()
            return module, (torch.empty(8, 8192, 4096, requires_grad=True), torch.arange(8192)[None])

    def encoder(kind: Any, layer: Any, tokens: int) -> tuple[Any, Sequence[Any]]:
        made = config(kind, hidden_size=1024, intermediate_size=4096, num_attention_heads=16)
        with torch.device("meta"):
            return First(layer(made)).eval(), (torch.empty(64, tokens, 1024, requires_grad=True),)

    return {
        "llama": llama,
        "vit": lambda: encoder(ViTConfig, ViTLayer, 197),
        "bert": lambda: encoder(BertConfig, BertLayer, 512),
    }
