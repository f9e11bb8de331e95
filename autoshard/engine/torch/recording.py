"""Records the calls of torch that prepared steps make, as operations on tensors that have shapes and no numbers.

Values that depend on no batch and no weight (positions, the angles of rotary embeddings) are computed at once, and are
constants of the recording.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.run.protocol import HOST

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """A call of torch; each tensor among its arguments was recorded, or is a constant."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    returned: tuple[Any, ...]
    results: tuple[torch.Tensor, ...]  # the new tensors among what it returned: what it changes in place is not new

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
        return any(isinstance(value.type, torch.ListType) for value in self.func._schema.returns)

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
    """While it is entered, operations that read ``variables`` are recorded; operations on the host are computed.

    Tensors go by their identities. The recording holds all of them, so that no later tensor gets the identity of an
    earlier one.
    """

    variables: dict[int, torch.Tensor] = field(default_factory=dict)  # what depends on a batch or a weight
    constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # with their numbers
    operations: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin as torch's modes do."""
        TorchDispatchMode.__init__(self)

    def name(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a tensor depends on a batch or a weight; return it."""
        self.variables[id(tensor)] = tensor
        return tensor

    def number(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a constant; a tensor of the host is one itself."""
        return tensor if has_numbers(tensor) else self.constants[id(tensor)][1]

    def _on_host(self, argument: Any) -> Any:
        """Return an argument for the host: the numbers of a tensor, and the host for a device."""
        if isinstance(argument, torch.Tensor):
            return self.number(argument)
        return torch.device(HOST) if isinstance(argument, torch.device) else argument

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record or compute an operation."""
        options = {**kwargs} if kwargs else {}
        operands = list(tensors_in((*args, *options.values())))
        returned = func(*args, **options)
        results = [tensor for tensor in tensors_in([returned]) if all(tensor is not operand for operand in operands)]
        if all(map(has_numbers, (*operands, *results))):
            return returned  # the host computes it in a step, too
        if operands and not any(id(operand) in self.variables for operand in operands):
            numbers = func(*changed(args, self._on_host), **changed_options(options, self._on_host))
            for tensor, number in zip(tensors_in([returned]), tensors_in([numbers]), strict=True):
                self.constants[id(tensor)] = tensor, number
            return returned
        for tensor in results:
            self.name(tensor)
            if any(map(is_uneven, operands)):  # element by element
                torch._dynamo.mark_dynamic(tensor, 1)
        values = tuple(returned) if isinstance(returned, list | tuple) else (returned,)
        self.operations.append(Operation(func=func, args=args, kwargs=options, returned=values, results=tuple(results)))
        return returned


def is_uneven(example: torch.Tensor) -> bool:
    """Whether the number of rows of a tensor, [1, rows, ...], depends on the batch: torch calls such a dim dynamic."""
    return hasattr(example, "_dynamo_dynamic_indices")


def tensors_in(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors among arguments, in order."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from tensors_in(argument)


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def changed(arguments: Sequence[Any], change: Callable[[Any], Any]) -> list[Any]:
    """Change each argument, also in lists; torch's own tree_map leaves cycles behind, which hold tensors for long."""
    return [
        changed(argument, change) if isinstance(argument, list | tuple) else change(argument) for argument in arguments
    ]


def changed_options(options: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Change each argument that goes by its name."""
    return dict(zip(options, changed([*options.values()], change), strict=True))


def with_stand_ins(operation: Operation, stand_ins: Mapping[int, torch.Tensor]) -> Operation:
    """Return an operation that reads other tensors, those that stand in for tensors by their ids."""

    def change(argument: Any) -> Any:
        return stand_ins.get(id(argument), argument)

    return replace(operation, args=changed(operation.args, change), kwargs=changed_options(operation.kwargs, change))


def live_operations(operations: Sequence[Operation], alive: set[int]) -> list[Operation]:
    """Return the operations that change a tensor, or make a tensor that is read later.

    ``alive`` holds the ids of the tensors that are read later; those that the returned operations read are added.
    """
    live: list[Operation] = []
    for operation in reversed(operations):
        if operation.changes or any(id(result) in alive for result in operation.results):
            alive.update(map(id, operation.reads))
            live.append(operation)
    return live[::-1]
