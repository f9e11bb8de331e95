"""Optimizers of torch on the parts of parameters that a rank holds, without what DTensor costs for each operation."""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.errors import require

# They treat every number by itself: a part is updated as the whole would be. Others (Adafactor, LBFGS, Muon) do not.
_BY_NUMBER = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


def sharded_optimizer(
    kind: type[torch.optim.Optimizer], parameters: Iterable[torch.Tensor] | Iterable[Mapping[str, Any]], **options: Any
) -> torch.optim.Optimizer:
    """Return an optimizer of torch that updates this rank's parts of the parameters of a sharded module.

    It is used, saved and loaded as ``kind(parameters, **options)``, and gives the same numbers: its groups have the
    parameters, and its state has DTensors. A step takes what it takes on plain tensors.
    """
    by_number = ", ".join(optimizer.__name__ for optimizer in _BY_NUMBER)
    need = f"is {kind.__name__}, which may need whole parameters; these do not: {by_number}"
    require((kind in _BY_NUMBER, "kind", need))
    sharded: Any = type(f"Sharded{kind.__name__}", (_OnParts, kind), {"__module__": __name__, "kind": kind})
    return sharded(parameters, **options)


class _OnParts(torch.optim.Optimizer):
    """Steps on parts of DTensors: they stand in the groups and in the state while the optimizer of torch runs."""

    kind: type[torch.optim.Optimizer]
    parts: "_Parts | None" = None  # of the step before; torch neither saves nor copies them

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step."""
        loss = None
        if closure is not None:  # which computes gradients of the parameters, not of parts
            with torch.enable_grad():
                loss = closure()
        wholes, state = [group["params"] for group in self.param_groups], self.state
        parts, self.parts = self.parts, None
        if parts is None or not _are_same(_objects(wholes, state), parts.objects):
            parts = _Parts(wholes, state)
        try:
            parts.take_gradients()
            self.state = parts.state
            for group, group_parts in zip(self.param_groups, parts.groups, strict=True):
                group["params"] = group_parts
            update: Any = self.kind.step
            # Torch calls the hooks of a step around this class's own step already.
            (update.__wrapped__ if getattr(update, "hooked", False) else update)(self)
        finally:
            self.state = state
            for group, whole in zip(self.param_groups, wholes, strict=True):
                group["params"] = whole
            parts.drop_gradients()
        if _are_same(_values(parts.groups, parts.state), parts.values):
            self.parts = parts
        else:
            for whole, part in parts.pairs:
                if part in parts.state:
                    _take_over(state[whole], parts.state[part], whole)
        return loss


class _Parts:
    """This rank's parts of parameters and of their state, kept from step to step while these are the same objects."""

    def __init__(
        self, wholes: Sequence[Sequence[torch.Tensor]], state: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> None:
        self.objects = _objects(wholes, state)
        self.groups = [[_part_of(whole) for whole in group] for group in wholes]
        self.pairs = [pair for group in zip(wholes, self.groups, strict=True) for pair in zip(*group, strict=True)]
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for whole, part in self.pairs:
            if whole in state:
                self.state[part] = {name: _local(value) for name, value in state[whole].items()}
        self.values = _values(self.groups, self.state)

    def take_gradients(self) -> None:
        """Let each part have its part of the gradient."""
        for whole, part in self.pairs:
            gradient = whole.grad
            if gradient is not None and isinstance(whole, DTensor):
                assert isinstance(gradient, DTensor), "gradients of a sharded module are DTensors"
                if gradient.placements != whole.placements:
                    gradient = gradient.redistribute(placements=whole.placements)
                part.grad = _local(gradient)

    def drop_gradients(self) -> None:
        """Leave gradients to the parameters: loops free them there."""
        for whole, part in self.pairs:
            if part is not whole:
                part.grad = None


def _objects(wholes: Sequence[Sequence[torch.Tensor]], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[Any]:
    """Return the objects from which parts are made; a user may replace any of them between two steps."""
    return [value for group in wholes for value in (*group, *map(_local, group), None)] + _values(wholes, state)


def _values(groups: Iterable[Iterable[torch.Tensor]], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> list[Any]:
    return [value for group in groups for tensor in group for value in state.get(tensor, {}).values()]


def _are_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _part_of(whole: torch.Tensor) -> torch.Tensor:
    return _local(whole).detach() if isinstance(whole, DTensor) else whole


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value  # pyright: ignore[reportPrivateUsage]


def _take_over(state: dict[str, Any], updated: Mapping[str, Any], whole: torch.Tensor) -> None:
    """Note the state that a step has added or replaced; what has the shape of the parameter's part is a part, too."""
    for name, value in updated.items():
        if _local(state.get(name)) is not value:
            state[name] = _like(value, whole) if isinstance(whole, DTensor) else value


def _like(value: Any, whole: DTensor) -> Any:
    part: torch.Tensor = _local(whole)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != part.shape:
        return value
    return DTensor.from_local(
        value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
