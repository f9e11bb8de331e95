"""Whole tensors of a state that is cut, and parts of whole ones: files that know no mesh, as a Trainer writes them."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

from autoshard.errors import InputError

_REMEDY = "use autoshard.sharded_trainer(Trainer), or give state_dict=whole, of get_model_state_dict on all ranks"
_BEFORE = "makes other parameters than the sharded module has; call it before autoshard.shard"
_REFUSED = {
    "push_to_hub": f"would write the parts of one rank; {_REMEDY}, and upload the folder",
    **dict.fromkeys(("resize_token_embeddings", "add_adapter", "load_adapter"), _BEFORE),
}


def part_like(parameter: Any, whole: Any) -> Any:
    """Return this rank's part of a whole tensor that is a parameter, or has the shape of one; else what was given."""
    is_whole = isinstance(whole, torch.Tensor) and not isinstance(whole, DTensor)
    if not (is_whole and isinstance(parameter, DTensor) and whole.shape == parameter.shape and not whole.is_meta):
        return whole
    mesh = parameter.device_mesh
    copies = [Replicate() for _ in parameter.placements]
    equal = DTensor.from_local(whole.detach().to(parameter.device), mesh, copies, run_check=False)
    return equal.redistribute(placements=parameter.placements)


def whole_state(state: Any, *, keeps: bool) -> Any:
    """Return a state whose tensors are whole, on hosts; every rank calls it, and only those that keep it have them."""
    wholes: dict[int, torch.Tensor] = {}  # tied weights stay one

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if id(value) not in wholes:
            gathered: torch.Tensor = value.full_tensor().detach()
            wholes[id(value)] = gathered.cpu() if keeps else gathered.new_empty(0)
        return wholes[id(value)]

    return tree_map(whole, state)


def save_whole(
    model: Any, save_directory: Any, *args: Any, state_dict: Mapping[str, Any] | None = None, **kw: Any
) -> None:
    """Save a model of transformers whose state is given; a rank alone has parts of it."""
    if state_dict is None:
        raise InputError.of("save_pretrained", f"would write the parts of one rank; {_REMEDY}")
    above: Any = super(type(model), model)
    above.save_pretrained(save_directory, *args, state_dict=state_dict, **kw)


def methods_for_parts(kind: type[Any]) -> Mapping[str, Any]:
    """Return what replaces the methods of transformers that need whole weights, as far as a class has them."""

    def refusing(name: str, why: str) -> Any:
        def refuse(*_: Any, **__: Any) -> None:
            raise InputError.of(name, why)

        return refuse

    methods = {name: refusing(name, why) for name, why in _REFUSED.items()}
    return {name: method for name, method in {"save_pretrained": save_whole, **methods}.items() if hasattr(kind, name)}


def sharded_trainer(kind: type[Any]) -> type[Any]:
    """Return a Trainer of transformers whose checkpoints are those of one process, for sharded modules.

    It is used as ``kind`` is. The first rank writes weights and the optimizer's state whole, so that training resumes
    on any mesh, and ``from_pretrained`` reads them. All ranks have to save together.
    """
    return type(f"Sharded{kind.__name__}", (_WholeCheckpoints, kind), {"__module__": __name__})


class _WholeCheckpoints:
    """What a Trainer does differently where parameters are parts."""

    args: Any
    model: Any
    optimizer: Any

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        state = self.model.state_dict() if state_dict is None else state_dict
        above: Any = super()
        above._save(output_dir, whole_state(state, keeps=self.args.should_save))

    def _save_optimizer_and_scheduler(self, output_dir: Any) -> None:
        optimizer, state = self.optimizer, whole_state(self.optimizer.state_dict(), keeps=self.args.should_save)
        above: Any = super()
        self.optimizer = SimpleNamespace(state_dict=lambda: state)
        try:
            above._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        plain: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        hook = plain.register_load_state_dict_pre_hook(with_parts)
        above: Any = super()
        try:
            above._load_optimizer_and_scheduler(checkpoint)
        finally:
            hook.remove()


def with_parts(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer whose whole tensors are cut as its parameters are."""
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    parameters = {
        number: parameter
        for group, numbered in groups
        for parameter, number in zip(group["params"], numbered["params"], strict=True)
    }
    parts = {
        number: {name: part_like(parameters[number], value) for name, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": parts}
