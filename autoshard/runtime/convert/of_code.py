"""Checkpoints of a model that was read off its code, to and from the state dict of the module that the code makes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from autoshard.engine.patches import whole
from autoshard.errors import InputError, inside, require
from autoshard.modules.training.planning import made_code
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.plan.verify import unrun_code
from autoshard.run.folder import PLAN
from autoshard.runtime.checkpoint.files import CheckpointIndex
from autoshard.runtime.convert.ours import stored_source
from autoshard.runtime.convert.stored import Stored, WeightSource, read_state, read_tensors, shape_faults
from autoshard.units import counted

SAFETENSORS = ".safetensors"
_MOST_SAID = 3  # names, and faults


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


def write_state(state: Mapping[str, torch.Tensor], file: Path, form: str) -> None:
    """Write a state dict in the form of a name's end; safetensors hold a tensor once, whatever its names."""
    if form != SAFETENSORS:
        torch.save(state, file)
        return
    first = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed([*state.items()])}
    save_file({name: state[name].clone() for name in state if name in first.values()}, file, {"format": "pt"})


def code_source(plan: Plan, file: Path) -> WeightSource:
    """Open a state dict of a plan's module as the weights of its blocks, or say in what it is that of another."""
    why = unrun_code(plan)
    require((not why, PLAN, why))
    code = made_code(plan, None)
    tensors = read_tensors(file, "Write it again") if file.suffix == SAFETENSORS else read_state(file)
    names = _names_in(tensors, code.module)
    tied = code.graph.graph.tied
    weights = {
        f"{block}.{name}": path
        for block, paths in code.graph.paths.items()
        for name, path in paths.items()
        if f"{block.partition('.')[0]}.{name}" not in tied
    }
    due = {names[path]: tuple(code.module.get_parameter(path).shape) for path in weights.values()}
    lacking, strange = [name for name in due if name not in tensors], [name for name in tensors if name not in names]
    message = f"is not the state of {plan.model.name}: it lacks {_few(lacking)}, and has {_few(strange)} beside it"
    require((not lacking and not strange, str(file), message))
    if faults := [*shape_faults({name: tensors[name] for name in due}, due, (), str(file))][:_MOST_SAID]:
        raise InputError(faults)
    shapes = {weight: code.graph.shape_of(weight) for weight in weights}
    stored = (_laid(tensors[names[path]], weight, shapes[weight]) for weight, path in weights.items())
    return WeightSource(stored, shapes, str(file))


def _few(names: Sequence[str]) -> str:
    more = f" and {counted(len(names) - _MOST_SAID, 'tensor')} more" if len(names) > _MOST_SAID else ""
    return f"{', '.join(names[:_MOST_SAID])}{more}" if names else "no tensor"


def _names_in(tensors: Mapping[str, Stored], module: torch.nn.Module) -> Mapping[str, str]:
    """Return under which name a file has each tensor of a module's state: of tensors with several names, one may do."""
    aliases: dict[int, list[str]] = defaultdict(list)
    for name, tensor in module.state_dict(keep_vars=True).items():
        aliases[id(tensor)].append(name)
    stored = ((same, next((name for name in same if name in tensors), same[0])) for same in aliases.values())
    return {name: first for same, first in stored for name in same}


def _laid(stored: Stored, ours: str, shape: tuple[int, ...]) -> Stored:
    """Return a tensor of a module as the weight of a block, along the dims that this has."""
    read = partial(_reshaped, stored, shape)
    return replace(stored, shape=shape, read=read, patches=(whole(ours, [0] * len(shape), shape),))


def _reshaped(stored: Stored, shape: tuple[int, ...]) -> torch.Tensor:
    return stored.read().reshape(shape)
