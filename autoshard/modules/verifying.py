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


def prove_module_plan(plan: ModulePlan, where: str) -> tuple[ComparedTensor, ...]:
    """Run a plan of a module on virtual ranks in FP64, and compare each of its tensors with that of the plain module.

    ``where`` is ``FILE.py:FUNCTION``: the user's function returns the module and its example inputs.
    """
    example = user_function(where, "--module")()
    fits = isinstance(example, tuple) and len(example) == 2 and isinstance(example[0], torch.nn.Module)
    require((fits, "--module", f"{where} must return a module and its example inputs"))
    module, inputs = example
    formats = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    short = any(dtype.itemsize < 4 for dtype in formats)
    require(
        (not short, "--module", f"computes in {', '.join(map(str, formats))}, which FP64 does not repeat; verify FP32")
    )
    sharding = sharding_of(plan, module, inputs)
    exact = tree_map_only(torch.Tensor, lambda value: value.double() if value.is_floating_point() else value, inputs)
    return sharding.prove(copy.deepcopy(module).double(), exact)
