"""The torch functions that a decoder's forward pass calls, part by part: before its layers, in each, behind them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.errors import require

BEFORE, AFTER = -1, -2  # the parts of a forward pass beside its layers, which are numbered
HIDDEN = "hidden"  # the tensor that goes from part to part


@dataclass(frozen=True, slots=True)
class Wire:
    """Where a tensor that a function reads comes from: a weight, the tokens, the hidden state, or an earlier call."""

    origin: str
    place: Any = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TorchCall:
    """A torch function, what it is called with (a ``Wire`` for each tensor), and what it returns."""

    function: str
    arguments: tuple[Any, Mapping[str, Any]]
    path: str  # of the submodule that calls it
    result: Any


@dataclass(eq=False, kw_only=True)
class CallTape:
    """The calls of one forward pass by part, and the hidden state that each part takes."""

    parts: dict[int, list[TorchCall]] = field(default_factory=lambda: {BEFORE: list[TorchCall]()})
    hidden_states: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    logits: Any = None


class _Recorder(TorchFunctionMode):
    """Writes each call of a torch function down while a module runs."""

    def __init__(self, tape: CallTape, origins: Mapping[int, Wire]) -> None:
        super().__init__()
        self.tape, self.part, self.paths = tape, BEFORE, [""]
        self.origins = dict(origins)  # by the identity of a tensor; tapes hold all tensors, so that none is reused
        self.held: list[torch.Tensor] = []
        self.handed_on: Any = None  # what the last layer has given

    def enter(self, part: int, hidden: torch.Tensor) -> None:
        """Begin a part that takes a hidden state."""
        self.part = part
        self.tape.parts[part] = []
        self.tape.hidden_states[part] = hidden

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = self._wired(tuple(args)), self._wired(dict(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = _called(func)
        if name.endswith(".__get__") and not isinstance(result, torch.Tensor):
            return result  # a shape, a format or a device, which shows where it is used
        calls = self.tape.parts[self.part]
        several = result if isinstance(result, tuple | list) else [result]
        for number, value in enumerate(several):
            if isinstance(value, torch.Tensor):
                self.held.append(value)
                # What gives a tensor back as it was, or changed in place, does not make it.
                self.origins.setdefault(id(value), Wire("call", (self.part, len(calls), number)))
        calls.append(TorchCall(function=name, arguments=arguments, path=self.paths[-1], result=result))
        return result

    def _wired(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._wire(value)
        if isinstance(value, tuple | list):
            return tuple(map(self._wired, value))
        if isinstance(value, dict):
            return {key: self._wired(entry) for key, entry in value.items()}
        if isinstance(value, slice):
            return "slice", self._wired(value.start), self._wired(value.stop), self._wired(value.step)
        return value

    def _wire(self, tensor: torch.Tensor) -> Wire:
        if tensor is self.tape.hidden_states.get(self.part):
            return Wire(HIDDEN)
        wire = self.origins.get(id(tensor), Wire("unknown"))
        if wire.origin == "call":
            part, *place = wire.place
            return Wire("call", ("here" if part == self.part else part, *place))
        if wire.origin == "weight" and wire.place[0] == self.part:
            return Wire("weight", ("here", wire.place[1]))
        return wire


def taped(
    module: torch.nn.Module, layers: str, tokens: torch.Tensor, show: Callable[[str], None] = lambda _: None
) -> CallTape:
    """Run a decoder's forward pass, and return the calls of torch functions; ``layers`` is the path of its layers.

    It runs as torch exports it: code is told that nothing may be asked of numbers. Tensors of the meta device do.
    """
    tape, owners = CallTape(), list(module.get_submodule(layers).children())
    recorder = _Recorder(tape, {**_weights(module, layers), id(tokens): Wire("tokens")})
    with ExitStack() as stack:
        for path, submodule in module.named_modules():
            stack.enter_context(_on_path(submodule, path, recorder))
        for number, layer in enumerate(owners):
            stack.enter_context(_as_part(layer, (number, len(owners)), recorder, show))
        stack.enter_context(_as_exported())
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        result = module(tokens)
    runs_all = {*tape.parts} == {BEFORE, AFTER, *range(len(owners))}
    require((runs_all, layers, "does not run its layers in order, each once"))
    tape.logits = getattr(result, "logits", result)
    return tape


def _called(function: Any) -> str:
    """Name a torch function, also one that reads an attribute."""
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", function))
    if name.endswith("__get__"):
        return f"{getattr(getattr(function, '__self__', None), '__name__', '')}.__get__"
    return name.rpartition(".")[2]


def _weights(module: torch.nn.Module, layers: str) -> Mapping[int, Wire]:
    """Return parameters and buffers by identity: which layer has them, and their paths in it."""
    wires: dict[int, Wire] = {}
    named = [*module.named_parameters(), *module.named_buffers()]
    for path, tensor in named:
        number, dot, rest = path.removeprefix(f"{layers}.").partition(".")
        is_inside = path.startswith(f"{layers}.") and bool(dot)
        wires[id(tensor)] = Wire("weight", (int(number), rest) if is_inside else (BEFORE, path))
    return wires


@contextmanager
def _hooked(module: torch.nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """Call functions before a module runs, with its arguments, and after it has run, with its result as well."""
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _on_path(submodule: torch.nn.Module, path: str, recorder: _Recorder) -> Iterator[None]:
    """Let a recorder know when the calls are those of a submodule."""

    def leave(*_: Any) -> None:
        recorder.paths.pop()

    with _hooked(submodule, lambda *_: recorder.paths.append(path), leave):
        yield


@contextmanager
def _as_part(
    layer: torch.nn.Module, place: tuple[int, int], recorder: _Recorder, show: Callable[[str], None]
) -> Iterator[None]:
    """Let the calls of a layer be a part; refuse a layer that does not take what the one before gives.

    ``place`` is the number of the layer, and how many there are.
    """
    number, count = place

    def begin(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        is_next = recorder.part == (number - 1 if number else BEFORE)
        require(
            (is_next, f"layer {number}", "does not run once, right behind the layer before"),
            (isinstance(hidden, torch.Tensor), f"layer {number}", "takes no tensor first"),
            (
                number == 0 or hidden is recorder.handed_on,
                f"layer {number}",
                "does not take what the one before gives",
            ),
        )
        assert isinstance(hidden, torch.Tensor), "it was just asked for"
        recorder.enter(number, hidden)
        show(f"reading layer {number + 1} of {count}")

    def end(_: Any, __: Any, result: Any) -> None:
        recorder.handed_on = result[0] if isinstance(result, tuple) else result
        if number == count - 1:
            recorder.enter(AFTER, recorder.handed_on)

    with _hooked(layer, begin, end):
        yield


@contextmanager
def _as_exported() -> Iterator[None]:
    """Tell code that it is traced, as torch.export does."""
    names = ("_is_compiling_flag", "_is_exporting_flag")
    flags = {name: getattr(torch.compiler, name) for name in names}
    try:
        for name in names:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, flag in flags.items():
            setattr(torch.compiler, name, flag)
