"""Records the calls of torch that kernels make, as operations on named tensors that have shapes and no numbers.

Values that depend on no batch and no weight (positions, the angles of rotary embeddings) are computed at once, and are
constants of the recording.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.run.protocol import HOST

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """One call of torch; each tensor among its arguments was recorded, or is a constant."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    found: tuple[Any, ...]  # all that it returns
    results: tuple[torch.Tensor, ...]  # of it new tensors; what is changed in place is none

    @property
    def reads(self) -> Iterator[torch.Tensor]:
        """Return its tensors."""
        return tensors_in((*self.args, *self.kwargs.values()))

    @property
    def is_view(self) -> bool:
        """Whether the result is a view of a tensor or of its parts, without any computation."""
        returns = self.func._schema.returns
        return len(returns) == 1 and bool(returns[0].alias_info) and not self.changes

    @property
    def is_list(self) -> bool:
        """Whether it returns a list, even of one tensor."""
        return any(isinstance(one.type, torch.ListType) for one in self.func._schema.returns)

    @property
    def is_same(self) -> bool:
        """Whether its result is its argument, without autograd."""
        return self.func in _SAME

    @property
    def changes(self) -> bool:
        """Whether it changes a tensor in place."""
        return bool(self.func._schema.is_mutable)


@dataclass(slots=True, eq=False)
class Recording(TorchDispatchMode):
    """While it is entered, operations that touch ``known`` tensors are recorded; all others are computed.

    Tensors are told apart by identity, and kept, so that no later tensor gets the identity of an earlier one.
    """

    known: dict[int, torch.Tensor] = field(default_factory=dict)
    constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # with their numbers
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin as torch's modes do."""
        TorchDispatchMode.__init__(self)

    def name(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a tensor be known."""
        self.known[id(tensor)] = tensor
        return tensor

    def number(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a constant; a tensor of the host is one itself."""
        return self.constants[id(tensor)][1] if tensor.is_meta else tensor

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record or compute an operation."""
        given = {**kwargs} if kwargs else {}
        taken = list(tensors_in((*args, *given.values())))
        found = func(*args, **given)
        made = [one for one in tensors_in([found]) if all(one is not other for other in taken)]
        on_device = any(one.is_meta for one in (*taken, *made))
        if not on_device:
            return found  # of the host's own
        if taken and not any(id(one) in self.known for one in taken):
            there = func(*_with(args, self.number), **_with_values(given, self.number))
            for one, number in zip(tensors_in([found]), tensors_in([there]), strict=True):
                self.constants[id(one)] = one, number
            return found
        every = tuple(found) if isinstance(found, list | tuple) else (found,)
        made = tuple(map(self.name, made))
        for one in made if any(map(is_uneven, taken)) else ():  # element by element
            torch._dynamo.mark_dynamic(one, 1)
        self.operations.append(Operation(func=func, args=args, kwargs=given, found=every, results=made))
        return found


def is_uneven(example: torch.Tensor) -> bool:
    """Whether the number of rows of a tensor, [1, rows, ...], depends on the batch: torch calls such a dim dynamic."""
    return hasattr(example, "_dynamo_dynamic_indices")


def tensors_in(given: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors among arguments, in order."""
    for one in given:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from tensors_in(one)


def _with(given: Sequence[Any], number: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Return arguments for the host: each tensor replaced by its numbers, and each device by the host."""
    return [_changed(one, number) for one in given]


def _with_values(given: Mapping[str, Any], number: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    return {name: _changed(one, number) for name, one in given.items()}


def _changed(one: Any, number: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(one, torch.Tensor):
        return number(one)
    if isinstance(one, list | tuple):
        return _with(one, number)
    return torch.device(HOST) if isinstance(one, torch.device) else one


def live_operations(operations: Sequence[Operation], alive: set[int]) -> list[Operation]:
    """Return the operations that change a tensor, or make one that is read later.

    ``alive`` holds the ids of the tensors that are read later; those that the returned operations read are added.
    """
    found: list[Operation] = []
    for one in reversed(operations):
        if one.changes or any(id(result) in alive for result in one.results):
            alive.update(map(id, one.reads))
            found.append(one)
    return found[::-1]
