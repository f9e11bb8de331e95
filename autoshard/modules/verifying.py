"""The proof of a saved plan of a module: its lines, executed on virtual ranks, against torch's own numbers in FP64."""

import copy

import torch
from torch.utils._pytree import tree_map_only  # as torch.export lays arguments out

from autoshard.errors import require
from autoshard.extensions import user_function
from autoshard.modules.proof import ComparedTensor
from autoshard.modules.shard import sharding_of
from autoshard.plan.module_plan import ModulePlan

BAR = 1e-5  # modules round to FP32 inside, here and there


def proven_plan(plan: ModulePlan, where: str) -> tuple[ComparedTensor, ...]:
    """Trace a module that ``FILE.py:FUNCTION`` makes, and compare what its plan computes with what it computes."""
    made = user_function(where, "--module")()
    fits = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)
    require((fits, "--module", f"{where} must return a module and its example inputs"))
    module, inputs = made
    formats = {one.dtype for one in module.parameters() if one.is_floating_point()}
    short = any(one.itemsize < 4 for one in formats)
    require(
        (not short, "--module", f"computes in {', '.join(map(str, formats))}, which FP64 does not repeat; verify FP32")
    )
    found = sharding_of(plan, module, inputs)
    exact = tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, inputs)
    return found.prove(copy.deepcopy(module).double(), exact)
