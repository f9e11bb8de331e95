"""Optimizers of torch on the parts of parameters that a rank holds, without what DTensor costs for each operation."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take a step."""
        loss = None
        if closure is not None:  # which computes gradients of the parameters, not of parts
            with torch.enable_grad():
                loss = closure()
        wholes, state = [group["params"] for group in self.param_groups], self.state
        parts = [[_part_of(whole) for whole in group] for group in wholes]
        pairs = [pair for group in zip(wholes, parts, strict=True) for pair in zip(*group, strict=True)]
        try:
            self.state = defaultdict(dict, {part: _parts_in(state[whole]) for whole, part in pairs if whole in state})
            for group, group_parts in zip(self.param_groups, parts, strict=True):
                group["params"] = group_parts
            update: Any = self.kind.step
            # Torch calls the hooks of a step around this class's own step already.
            (update.__wrapped__ if getattr(update, "hooked", False) else update)(self)
        finally:
            updated, self.state = self.state, state
            for group, whole in zip(self.param_groups, wholes, strict=True):
                group["params"] = whole
        for whole, part in pairs:
            if part in updated:
                _take_over(state[whole], updated[part], whole)
        return loss


def _part_of(whole: torch.Tensor) -> torch.Tensor:
    """Return the part of a parameter that this rank holds, with its gradient."""
    if not isinstance(whole, DTensor):
        return whole
    part, gradient = whole._local_tensor.detach(), whole.grad  # pyright: ignore[reportPrivateUsage]
    if gradient is not None:
        assert isinstance(gradient, DTensor), "gradients of a sharded module are DTensors"
        if gradient.placements != whole.placements:
            gradient = gradient.redistribute(placements=whole.placements)
        part.grad = gradient._local_tensor  # pyright: ignore[reportPrivateUsage]
    return part


def _parts_in(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value._local_tensor if isinstance(value, DTensor) else value  # pyright: ignore[reportPrivateUsage]
        for name, value in state.items()
    }


def _take_over(state: dict[str, Any], updated: Mapping[str, Any], whole: torch.Tensor) -> None:
    """Note the state that a step has added or replaced; what has the shape of the parameter's part is a part, too."""
    for name, value in updated.items():
        before = state.get(name)
        if (before._local_tensor if isinstance(before, DTensor) else before) is not value:  # pyright: ignore[reportPrivateUsage]
            state[name] = _like(value, whole) if isinstance(whole, DTensor) else value


def _like(value: Any, whole: DTensor) -> Any:
    part: torch.Tensor = whole._local_tensor  # pyright: ignore[reportPrivateUsage]
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != part.shape:
        return value
    return DTensor.from_local(
        value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
