"""Steps of a plan whose samples are no tokens, on one rank of several, and the same steps of the plain module."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from autoshard.engine.torch.formats import Formats
from autoshard.modules.decoder.reading import read_decoder
from autoshard.modules.training.reading import traced_code
from autoshard.plan.code import data_key
from autoshard.plan.plan import Plan
from autoshard.runtime.data.batches import StepShape, batches
from autoshard.runtime.data.functions import DrawnData
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision
from tests.kit import local_plan
from tests.modules.training.code_cases import CLIP, RATE, Compared, adamw, engine_of, hold, weight_errors
from tests.modules.training.own_samples import Made
from tests.ranks.spawn import on_ranks


def plan_of_samples(make: Callable[[], Made], text: str) -> Plan:
    """The plan of exactly this candidate for a stack, which is read off its code once for all ranks and layouts."""
    model = _model_of(make)
    return local_plan(
        text, model, precision=Precision.named("fp32"), seq_len=model.max_positions, global_batch=8, clip_norm=CLIP
    )


def compared_samples(make: Callable[[], Made], plan: Plan) -> Compared:
    """Train a module on drawn samples by a plan on this rank, and the plain module beside it, in FP64."""
    torch.manual_seed(1)
    (module, inputs), formats = make(), Formats(exact=True)
    code = traced_code(module.double(), plan, formats, inputs)
    engine, optimizer = engine_of(plan, code, formats, "literal"), adamw(module)
    source = DrawnData(arguments=code.data, seq_len=plan.workload.seq_len, seed=0)
    steps = list[tuple[float, float, float, float]]()
    for number in range(3):
        parts = batches(source, 8 * number, StepShape.of(plan))
        report = engine.step(parts, RATE)
        steps.append((report.loss, *_plain_step(module, optimizer, parts, report.norm)))
    error, weight = max(weight_errors(engine, code))
    return Compared(steps=tuple(steps), error=error, weight=weight)


def hold_samples(make: Callable[[], Made], text: str, num_ranks: int) -> None:
    """Let ranks train on drawn samples: they take the steps of the plain module."""
    hold(on_ranks(num_ranks, compared_samples, make, plan_of_samples(make, text), timeout_s=300.0))


@cache
def _model_of(make: Callable[[], Made]) -> ModelSpec:
    module, inputs = make()
    return read_decoder(module, None, inputs)


def _plain_step(module: nn.Module, optimizer: Any, parts: Any, norm: float) -> tuple[float, float, float]:
    """Take a step of the plain module on the whole batch at once."""
    names = [key.removeprefix("data.") for key in parts[0] if key.startswith("data.")]
    wholes = {name: torch.from_numpy(np.concatenate([part[data_key(name)] for part in parts])) for name in names}
    wholes = {name: whole.double() if whole.is_floating_point() else whole for name, whole in wholes.items()}
    result: Any = module(**wholes)
    loss = result if isinstance(result, torch.Tensor) else result.loss
    optimizer.zero_grad()
    loss.backward()
    plain_norm = nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    optimizer.step()
    return loss.item(), norm, plain_norm.item()
