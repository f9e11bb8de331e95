"""What is compared on a GPU: layers of published sizes as the torch engine runs them, and as people write them."""

# pyright: basic
# torch's own signatures are only partly typed.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoshard.engine.programs import graph_of
from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.formats import Formats
from autoshard.errors import InputError
from autoshard.graph.block import OpGraph
from autoshard.graph.op import Array
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Batch, EngineMode, Run
from autoshard.runtime.data.batches import synthetic_step
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision, Workload
from benchmarks.gpu.device import Device
from benchmarks.gpu.plain import plain_step

ROOM = 0.88  # of a GPU's memory that a subject may fill: plain PyTorch has FP32 logits beside what is predicted of ours
_SCALE = 0.02  # of weights, as they are initialised
_DRAWN = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of a published model is run: so many of its layers, its vocabulary or less, and a sequence."""

    layers: int
    seq_len: int = 8192
    vocab: int | None = None  # that of the model


# The most first; what fits is taken. GPUs of 80 GB hold eight layers of 8B with its whole vocabulary.
CHOICES: Mapping[str, Sequence[Sizes]] = {
    "llama3-8b": (
        Sizes(layers=8), Sizes(layers=6), Sizes(layers=4), Sizes(layers=2), Sizes(layers=2, vocab=32_000),
        Sizes(layers=1, vocab=32_000), Sizes(layers=1, vocab=32_000, seq_len=2048),
    ),
    "mixtral-8x7b": (Sizes(layers=2), Sizes(layers=1), Sizes(layers=1, seq_len=4096)),
}  # fmt: skip
_TINY: Mapping[str, Any] = {"hidden": 64, "ffn": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab": 256}


def model_of(card: str, sizes: Sizes, device: Device) -> ModelSpec:
    """Return some layers of a model; in a dry run layers as tiny as they can be."""
    whole = load_model(card)
    tiny = {**_TINY, "num_layers": 2, **({"num_experts": 4} if whole.num_experts else {})} if device.dry else {}
    vocab = sizes.vocab or whole.vocab
    made = {"num_layers": sizes.layers, "vocab": vocab, **tiny}
    name = f"{card}-{made['num_layers']}-layers" + (f"-vocab-{made['vocab']}" if made["vocab"] != whole.vocab else "")
    return replace(whole, name=name, **made)


def plan_of(model: ModelSpec, device: Device, seq_len: int, layout: str = "tp=1,pp=1,dp=1", sequences: int = 2) -> Plan:
    """Return the plan of a layout on this machine in BF16, with the kernels of the torch engine on GPUs."""
    candidate = Candidate.parse(f"{layout},kernels=torch_engine_gpu")
    workload = Workload(
        seq_len=32 if device.dry else seq_len,
        global_batch=sequences,
        precision=Precision.named("bf16"),
        expert_imbalance=0.0,
    )
    request = Request(model=model, cluster=device.node(candidate.num_ranks), workload=workload, engines=("torch",))
    return plan_at(request, candidate, even_refused=True)


def fitting(
    card: str, device: Device, most_layers: int = 8, layout: str = "tp=1,pp=1,dp=1", sequences: int = 2
) -> Plan:
    """Return the plan of the largest choice that is predicted to fit; a pipeline needs a layer for each stage."""
    stages = Candidate.parse(layout).pp
    for sizes in CHOICES[card]:
        if not stages <= sizes.layers <= most_layers:
            continue
        plan = plan_of(model_of(card, sizes, device), device, sizes.seq_len, layout, sequences)
        assert plan.prediction, "a plan that was made has its prediction"
        if plan.prediction.peak_bytes <= ROOM * device.node_type.chip.memory_bytes:
            return plan
    raise InputError.of(card, "not even one of its layers fits in the memory of this GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A training step, and the tensors of its state, whose memory it gives up while others are measured."""

    name: str
    step: Callable[[], object]
    numbers: Callable[[], Sequence[torch.Tensor]]  # weights, and what is updated in their place
    zeros: Callable[[], Sequence[torch.Tensor]]  # moments and sums

    def park(self) -> None:
        """Give the memory of the state to others; its numbers are lost."""
        for one in (*self.numbers(), *self.zeros()):
            one.untyped_storage().resize_(0)

    @contextmanager
    def there(self, device: Device) -> Iterator[None]:
        """Take memory for the state while it is measured: numbers as large as those of a new model."""
        try:
            for one in self.numbers():
                _resized(one).normal_(0.0, _SCALE)
            for one in self.zeros():
                _resized(one).zero_()
            yield
            device.wait()
        finally:
            self.park()
            device.free()


def _resized(tensor: torch.Tensor) -> torch.Tensor:
    size = int((tensor.storage_offset() + tensor.numel()) * tensor.itemsize)
    if int(tensor.untyped_storage().nbytes()) < size:
        tensor.untyped_storage().resize_(size)
    return tensor.detach()


def ours(plan: Plan, mode: EngineMode, device: Device) -> Subject:
    """Return the torch engine in a mode, parked."""
    engine, batches = engine_of(plan, mode, device), synthetic_step(plan)
    flats = engine.store.flats

    def step() -> None:
        report = engine.step(batches, 3e-4)
        assert report.updated, f"the step was not taken: loss {report.loss}, norm {report.norm}"

    found = Subject(
        name=mode,
        step=step,
        numbers=lambda: [one for flat in flats for one in (flat.values, flat.master) if one is not None],
        zeros=lambda: [one for flat in flats for one in (flat.sums, *flat.moments)],
    )
    found.park()
    return found


def engine_of(plan: Plan, mode: EngineMode, device: Device) -> TorchEngine:
    """Return the torch engine with weights that repeat few numbers, until others take their place: it starts sooner."""
    run = Run(folder=Path(), training=Training(steps=1), mode=mode)
    return TorchEngine(plan, repeated_weights(graph_of(plan)), Formats(device=device.torch), run)


def repeated_weights(graph: OpGraph) -> Callable[[str], Array]:
    """Return a function from names to whole weights whose rows are all the same, and take no memory of the host."""
    row = np.random.default_rng(0).standard_normal(_DRAWN, dtype=np.float32) * np.float32(_SCALE)

    def whole(name: str) -> Array:
        kind, _, parameter = name.split(".", 2)
        tensor = next(one for one in graph.block(kind).parameters if one.name == parameter)
        shape = [graph.sizes[dim] for dim in tensor.dims]
        return np.broadcast_to(row[: shape[-1]], shape)

    return whole


def plain(plan: Plan, device: Device) -> Subject:
    """Return plain PyTorch for the same model and batch, compiled as a whole, parked."""
    batches: Sequence[Batch] = synthetic_step(plan)
    run = plain_step(plan.model, plan.workload.seq_len, device.torch, "eager" if device.dry else "inductor")
    found = Subject(name="plain", step=lambda: run.step(batches), numbers=run.numbers, zeros=run.moments)
    found.park()
    return found
