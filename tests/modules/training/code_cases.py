"""Steps of a decoder's code by a plan, on one rank of several, and the same steps of the plain module."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.engine.torch.engine import TorchEngine
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.kernels.philox import random_part
from autoshard.graph.kinds.dropout import dropout_keys
from autoshard.modules.decoder.reading import read_decoder
from autoshard.modules.training.engine import programs_of_code
from autoshard.modules.training.layouts import solved_tables
from autoshard.modules.training.parts import LOSS_SHARE
from autoshard.modules.training.reading import TracedCode, traced_code
from autoshard.plan.plan import Plan
from autoshard.run.protocol import EngineMode, Run
from autoshard.spec.model import ModelSpec
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision
from tests.kit import local_plan
from tests.modules.training.own_decoders import LENGTH, WORDS, Gpt, GptLayer, dropping

RATE, CLIP = 1e-2, 0.3  # below the norm of every case
_STEPS = 3
Make = Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a rank has found: by step losses and norms beside the module's own, and its worst weight at the end."""

    steps: tuple[tuple[float, float, float, float], ...]
    error: float
    weight: str

    @property
    def worst_step(self) -> float:
        """The largest relative difference of a loss or a norm."""
        return max(abs(a - b) / abs(b) for step in self.steps for a, b in (step[:2], step[2:]))


def hold(found: Sequence[Compared], *, exact: bool = True) -> None:
    """Steps of all ranks are those of the plain module to the digits of FP64, or else of FP32."""
    of_step, of_weight = (1e-12, 1e-11) if exact else (1e-5, 1e-3)
    for rank in found:
        assert rank.worst_step < of_step, rank
        assert rank.error < of_weight, f"{rank.weight} is {rank.error:.1e} off"


def plan_of(module: nn.Module, text: str, *, precision: str = "fp32") -> Plan:
    """The plan of exactly this candidate for a decoder that is read off its code."""
    return _planned(read_decoder(module, LENGTH), text, precision)


def plan_made(make: Make, text: str) -> Plan:
    """The same for a decoder that is made here, which is read off its code once for all ranks and layouts."""
    return _planned(_model_of(make), text)


@cache
def _model_of(make: Make) -> ModelSpec:
    return read_decoder(make(), LENGTH)


def _planned(model: ModelSpec, text: str, precision: str = "fp32", batch: int = 8) -> Plan:
    sizes: dict[str, Any] = {"seq_len": LENGTH, "global_batch": batch, "clip_norm": CLIP}
    return local_plan(text, model, precision=Precision.named(precision), **sizes)


def engine_of(plan: Plan, code: TracedCode, formats: Formats, mode: EngineMode) -> TorchEngine:
    programs = programs_of_code(code.graph, plan, solved_tables(code.graph, plan), code.inputs(0))
    return TorchEngine(
        plan, code.weight, formats, Run(folder=Path(), training=Training(), mode=mode), programs=programs
    )


def compared(
    make: Make,
    plan: Plan,
    mode: EngineMode = "literal",
    *,
    exact: bool = True,
    changed: Callable[[nn.Module], object] = lambda _: None,
) -> Compared:
    """Train a decoder by a plan on this rank, and the plain module beside it; in FP64 if it is to be ``exact``.

    The module is ``changed`` when it was traced.
    """
    torch.manual_seed(1)
    module, formats = make(), Formats(exact=exact)
    module = module.double() if exact else module
    code = traced_code(module, plan, formats)
    engine, generator = engine_of(plan, code, formats, mode), np.random.default_rng(0)
    optimizer, steps = adamw(module), list[tuple[float, float, float, float]]()
    changed(module)
    for _ in range(_STEPS):
        batches = list(micro_batches(plan, generator))
        report = engine.step(batches, RATE)
        steps.append((report.loss, *_step(code, optimizer, batches, report.norm)))
    error, weight = max(weight_errors(engine, code))
    return Compared(steps=tuple(steps), error=error, weight=weight)


class KeyedDropout(nn.Module):
    """Drops numbers of each sequence by its number in the run, as the layer's stream has them."""

    def __init__(self, dropped: float, stream: int) -> None:
        super().__init__()
        self.dropped, self.stream, self.samples = dropped, stream, np.arange(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [1, *x.shape[1:]]
        drawn = [
            random_part("uniform", sizes, [(0, size) for size in sizes], self.stream, torch.tensor(key))
            for key in dropout_keys(0, self.samples, "code").tolist()
        ]
        return x * (torch.cat(drawn) >= self.dropped) / (1 - self.dropped)


def compared_dropping(plan: Plan) -> Compared:
    """Train a decoder that drops numbers, beside one that drops the same numbers by itself."""

    def keyed(module: nn.Module) -> None:
        assert isinstance(module, Gpt)
        for number, layer in enumerate(module.layers):
            assert isinstance(layer, GptLayer) and isinstance(layer.drop, nn.Dropout)
            layer.drop = KeyedDropout(layer.drop.p, number)

    return compared(dropping, plan, changed=keyed)


def micro_batches(plan: Plan, generator: np.random.Generator) -> Iterator[Mapping[str, Any]]:
    """Draw the micro-batches of a step: some tokens do not count, the others have equal shares."""
    count, per_batch = plan.schedule.num_micro_batches, plan.micro_batch * plan.mesh.size("dp")
    shape = (count, per_batch, LENGTH)
    tokens, labels = (generator.integers(0, WORDS, shape) for _ in range(2))
    counted = (generator.random(shape) > 0.3).astype(np.float64)
    for number in range(count):
        yield {
            "tokens": tokens[number], "labels": labels[number], "token_weight": counted[number] / counted.sum(),
            "samples": np.arange(per_batch) + number * per_batch,
        }  # fmt: skip


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    constants = Training().adamw
    decayed = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": constants.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = constants.beta1, constants.beta2
    return torch.optim.AdamW(groups, lr=RATE, betas=betas, eps=constants.eps)


def _step(code: TracedCode, optimizer: Any, batches: list[Any], norm: float) -> tuple[float, float, float]:
    """Take a step of the plain module on the whole batch; return its loss, and both norms."""
    module = code.module
    tokens, labels, weights = (
        torch.from_numpy(np.concatenate([batch[name] for batch in batches]))
        for name in ("tokens", "labels", "token_weight")
    )
    for submodule in module.modules():
        if isinstance(submodule, KeyedDropout):
            submodule.samples = np.concatenate([batch["samples"] for batch in batches])
    if LOSS_SHARE in code.graph.blocks["head"].tensors:  # whose loss is a mean over the micro-batch
        given = (tokens, labels) if "labels" in code.arguments.values() else (tokens,)
        parts = zip(*(whole.chunk(len(batches)) for whole in given), strict=True)
        loss = torch.stack([module(*part) for part in parts]).mean()
    else:
        losses = nn.functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten(), reduction="none")
        loss = (losses * weights.flatten().to(losses.dtype)).sum()
    optimizer.zero_grad()
    loss.backward()
    own_norm = nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    optimizer.step()
    return loss.item(), norm, own_norm.item()


def weight_errors(engine: TorchEngine, code: TracedCode) -> Iterator[tuple[float, str]]:
    """Yield how far this rank's boxes of weights are from the module's, and of which weights they are."""
    for piece in engine.pieces():
        if piece.part == "weight" and piece.memory.numel():
            whole = torch.from_numpy(code.weight(piece.weight))
            box = tuple(
                slice(start, start + size) for start, size in zip(piece.offsets, piece.memory.shape, strict=True)
            )
            yield (whole[box].double() - piece.memory.double()).abs().max().item(), piece.weight
