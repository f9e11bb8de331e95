"""Checkpoints of a model that was read off its code, as the state dict of the module that the code makes."""

from collections.abc import Mapping
from pathlib import Path

import torch

from autoshard.errors import inside, require
from autoshard.modules.training.planning import made_code
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.plan.verify import unrun_code
from autoshard.run.folder import PLAN
from autoshard.runtime.checkpoint.files import CheckpointIndex
from autoshard.runtime.convert.ours import stored_source


def plan_of_code(source: Path) -> Plan | None:
    """Return the plan of the run whose checkpoint lies there, if its model was read off its code."""
    folders = (source, *[*source.resolve().parents][:2])
    plans = (load(folder / PLAN) for folder in folders if (folder / PLAN).is_file())
    return next((plan for plan in plans if plan.model.traced is not None), None)


def module_state(
    plan: Plan, folder: Path, index: CheckpointIndex, dtype: torch.dtype | None
) -> Mapping[str, torch.Tensor]:
    """Return the state dict of a plan's module with the weights of a checkpoint, in a format if one is named.

    What no run trains, buffers among it, has the numbers that the code gives it.
    """
    with inside(folder):
        why = unrun_code(plan)
        require((not why, PLAN, why))
        code = made_code(plan, index.state.seed)
    source = stored_source(folder, index)
    weights = {f"{block}.{name}": path for block, paths in code.graph.paths.items() for name, path in paths.items()}
    for name, path in weights.items():
        if name in source.shapes:  # the head's is that of the embedding where both share one
            parameter = code.module.get_parameter(path)
            memory = torch.empty(source.shapes[name], dtype=parameter.dtype)
            source.fill(memory, name, [0] * memory.dim())
            parameter.data.copy_(memory.reshape(parameter.shape))
    state = code.module.state_dict()
    return {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for name, tensor in state.items()
    }
