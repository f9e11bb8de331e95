"""What a training step of a sharded module takes beside the same step as people shard it by hand with PyTorch alone."""

# pyright: basic
# torch's own signatures are only partly typed.

import gc
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import autoshard
from autoshard.runtime.launch import Placing, launch
from benchmarks import plain_llama
from benchmarks.measure import yardstick_s
from benchmarks.result import Extra, Result
from benchmarks.runtime_vs_plain import SEQ_LEN, SEQUENCES, Compared, ratios_of, shape, spent_s

RANKS, PAIRS, WARM_UP = 4, 11, 3
BAR = 1.0  # of the speed of plain PyTorch
SAME_LOSS = 1e-4  # after all steps, in FP32
_MARK = "the measured step"
MODES: Mapping[str, bool] = {"generated": False, "compiled": True}

Step = Callable[[], torch.Tensor]  # forward, backward, update; the loss of the batch, or of this rank's part


class TrainedLlama(nn.Module):
    """A Llama that returns the loss of a batch, as modules of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = plain_llama.PlainLlama(shape(), SEQ_LEN)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens."""
        return plain_llama.loss(self.model(tokens), labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mesh of four ranks, how people train the module on it, and whether this is compared compiled, too."""

    mesh: Mapping[str, int]
    by_hand: Callable[[TrainedLlama, Mapping[str, int], bool], Step]
    compiles: bool = True


def data_parallel(module: TrainedLlama, _: Mapping[str, int], compiled: bool) -> Step:
    """DistributedDataParallel over all ranks."""
    whole = DistributedDataParallel(module)
    return _stepping(torch.compile(whole) if compiled else whole, batch(RANKS, dist.get_rank()))


def fully_sharded(module: TrainedLlama, sizes: Mapping[str, int], compiled: bool) -> Step:
    """``parallelize_module`` inside groups, and over them FSDP2 with a unit for each layer."""
    assert not compiled, "compiled, such layers have other gradients than as they are"
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    plain_llama.parallelize(module.model, mesh["tp"])
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    return _stepping(module, batch(sizes["dp"], mesh["dp"].get_local_rank()), loss_parallel)


def sharded(module: TrainedLlama, sizes: Mapping[str, int], compiled: bool) -> Step:
    """The module in the layouts that autoshard chooses on this mesh."""
    whole = batch()
    return _stepping(autoshard.shard(module, whole, sizes, compile=compiled, batch="dp"), whole)


CASES: Mapping[str, Case] = {
    "ddp": Case(mesh={"dp": 4}, by_hand=data_parallel),
    "tp_fsdp2": Case(mesh={"dp": 2, "tp": 2}, by_hand=fully_sharded, compiles=False),
}


def batch(parts: int = 1, part: int = 0) -> Sequence[torch.Tensor]:
    """Return tokens and labels of the sequences of a part."""
    tokens = torch.randint(shape().vocab, (SEQUENCES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    rows = tokens.chunk(parts)[part]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _stepping(
    module: Any, inputs: Sequence[torch.Tensor], context: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Step:
    weights = list(module.parameters())
    kinds = [[weight for weight in weights if isinstance(weight, DTensor) == cut] for cut in (True, False)]
    groups = [{"params": kind} for kind in kinds if kind]  # AdamW takes DTensors and plain tensors in groups apart
    optimizer = torch.optim.AdamW(groups, 1e-3, fused=True)

    def step() -> torch.Tensor:
        with context():
            loss = module(*inputs)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss.detach()

    return step


@dataclass(frozen=True, slots=True)
class Sides:
    """What both sides of a case reached: the most bytes of a rank in a step, or the loss at the end."""

    ours: float
    by_hand: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A case: by mode and clock seconds by hand / ours, by mode the losses, and the bytes without compilation."""

    ratios: Mapping[str, Compared]
    losses: Mapping[str, Sides]
    peak_bytes: Sides


def measured(case: Case, pairs: int = PAIRS, modes: Mapping[str, bool] = MODES) -> Measured:
    """Train by both in the same ranks, turn by turn; then by each alone, for the memory."""
    makers = (sharded, case.by_hand)
    modes = {mode: compiled for mode, compiled in modes.items() if case.compiles or not compiled}

    def turns(_: Callable[[Any], None]) -> tuple[Sequence[Sequence[tuple[float, float]]], Sequence[float]]:
        steps = [_made(make, case.mesh, compiled) for compiled in modes.values() for make in makers]
        seconds = [[spent_s(step) for step in steps] for _ in range(pairs + WARM_UP)][WARM_UP:]
        return seconds, [_mean(step()) for step in steps]

    seconds, losses = _on_ranks(turns)
    peaks = [_on_ranks(lambda _, make=make: _peak_bytes(make, case.mesh)) for make in makers]
    return Measured(
        ratios=ratios_of(seconds, modes),
        losses={mode: Sides(*losses[2 * number : 2 * number + 2]) for number, mode in enumerate(modes)},
        peak_bytes=Sides(*peaks),
    )


def _on_ranks(body: Callable[[Any], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return launch(None, RANKS, body, show=lambda _: None, placing=Placing(folder=Path(folder)))


def _made(make: Callable[..., Step], mesh: Mapping[str, int], compiled: bool) -> Step:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # of torch, about what it compiles
    return make(TrainedLlama(), mesh, compiled)


def _mean(loss: torch.Tensor) -> float:
    """Return the mean over all ranks: those by hand have the loss of their part each."""
    total = loss.to(torch.float64)
    dist.all_reduce(total)
    return float(total) / RANKS


def _peak_bytes(make: Callable[..., Step], mesh: Mapping[str, int]) -> float:
    """Return the most bytes that torch's allocator has given out in a step, with those since the module was made."""
    gc.collect()  # what this process was forked with, and would free in a step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = _made(make, mesh, False)
        for _ in range(WARM_UP):
            step()
        with record_function(_MARK):
            step()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    begin_ns = next(event.start_ns() for event in events if event.name() == _MARK)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")  # pyright: ignore
    times_ns, held_bytes = np.array([time for time, _ in changes]), np.cumsum([size for _, size in changes])
    most = torch.tensor(float(held_bytes[times_ns >= begin_ns].max()), dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def run() -> Result:
    """Measure every case."""
    return judge({name: measured(case) for name, case in CASES.items()})


def judge(cases: Mapping[str, Measured]) -> Result:
    """A sharded module must be as fast as by hand, by the clock, hold no more, and learn the same."""
    extras: dict[str, Extra] = {}
    for name, case in cases.items():
        for mode, compared in case.ratios.items():
            low, high = compared.interval
            extras |= {f"{name}_{mode}": round(compared.median, 3)}
            extras |= {f"{name}_{mode}_low": round(low, 3), f"{name}_{mode}_high": round(high, 3)}
        extras |= {f"{name}_peak_mb": round(case.peak_bytes.ours / 1e6, 1)}
        extras |= {f"{name}_by_hand_peak_mb": round(case.peak_bytes.by_hand / 1e6, 1)}
        extras |= {
            f"{name}_{mode}_loss_difference": abs(sides.ours - sides.by_hand) for mode, sides in case.losses.items()
        }
    judged = [compared for case in cases.values() for mode, compared in case.ratios.items() if mode.endswith("_wall")]
    pairs = [sides for case in cases.values() for sides in case.losses.values()]
    slowest = min(judged, key=lambda compared: compared.median)
    return Result(
        name="sharded_vs_plain",
        value=round(slowest.median, 3),
        unit="of the speed of plain PyTorch, in the slowest case",
        bar=BAR,
        holds=all(compared.interval[1] >= BAR for compared in judged)
        and all(case.peak_bytes.ours <= case.peak_bytes.by_hand for case in cases.values())
        and all(abs(sides.ours - sides.by_hand) <= SAME_LOSS for sides in pairs),
        extras={**extras, "pairs": len(slowest.ratios), "yardstick_s": yardstick_s()},
    )
