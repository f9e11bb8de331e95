"""What a module's forward pass reads and writes beside its inputs, seen while it is traced."""

import dis
import sys
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import InputError
from autoshard.modules.state.functions import MISSING, functions_in, methods_of
from autoshard.modules.state.spaces import StatePlace, Visitor, contents, is_simple, own_names
from autoshard.modules.state.watching import Fields, WatchedState, hooks_of, modules_of

_IMMUTABLE, _HEAP_TYPE = 1 << 8, 1 << 9  # flags of classes: those of Python itself, those that have attributes
_TORCH = f"{torch.__path__[0]}"
_REGISTERED = ("_parameters", "_buffers", "_modules")
Names = dict[str, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """What the forward pass has left in a place, and whether it had read what lay there."""

    place: str
    old: Any
    new: Any
    is_read: bool = True
    owner: Any = None
    name: str = ""

    @property
    def is_lazy(self) -> bool:
        """Whether an attribute that was None has got a plain value, as a cache does."""
        return self.old is None and _is_plain(self.new)

    @property
    def is_noted(self) -> bool:
        """Whether numbers of a module are written for others, which the forward pass itself does not read."""
        parts = [*self.new, *self.new.values()] if isinstance(self.new, dict) else self.new  # pyright: ignore
        is_plain = _is_plain(self.new) or (type(self.new) in (list, dict) and all(map(_is_plain, parts)))  # pyright: ignore
        return isinstance(self.owner, torch.nn.Module) and not self.is_read and is_plain

    @property
    def is_installed(self) -> bool:
        """Whether transformers notes that it has hooked its layers, for hidden states or scores that were asked for."""
        return self.name == "_output_capturing_hooks_installed" and self.new is True

    @property
    def is_computed(self) -> bool:
        """Whether a hook of torch's has computed a weight, as weight_norm does before each call."""
        hooks = [*self.owner._forward_pre_hooks.values()] if isinstance(self.owner, torch.nn.Module) else []
        named = [hook for hook in hooks if getattr(hook, "name", None) == self.name]
        return not self.is_read and any(type(hook).__module__.startswith("torch.nn.utils.") for hook in named)

    def is_of_library(self, packages: Collection[str]) -> bool:
        """Say whether an object of an installed package has changed that has no module among those of ``packages``.

        Such packages set themselves up when they are first called: einx notes which frameworks there are.
        """
        package = _package(type(self.owner))
        file = getattr(sys.modules.get(package), "__file__", None) or ""
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
        return is_installed and package not in packages and not _has_tensor(self.new)

    def __str__(self) -> str:
        if _has_tensor(self.new):
            return f"{self._line()}forward leaves a tensor in {self.place}; return it as a result instead"
        what = f"from {self.old!r:.60} to {self.new!r:.60}; only the first call would do that"
        return f"{self._line()}forward changes {self.place} {what}: return it as a result instead, or change it outside"

    def _line(self) -> str:
        """Return the line that writes an attribute."""
        for method in methods_of(type(self.owner)).values() if self.name else ():
            for function in functions_in(method):
                line = _written(function.__code__, self.name)
                if line:
                    return f'File "{function.__code__.co_filename}", line {line}, in {function.__name__}: '
        return ""


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _written(code: types.CodeType, name: str) -> int | None:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.opname == "STORE_ATTR" and instruction.argval == name:
            return int(line)
    return None


def _is_plain(value: Any) -> bool:
    return is_simple(value) or (isinstance(value, tuple) and all(map(_is_plain, value)))  # pyright: ignore


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat):
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else ()  # pyright: ignore
    return any(map(_has_tensor, parts))  # pyright: ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Everything that a forward pass may change, as it was."""

    modules: Mapping[str, torch.nn.Module]
    objects: Sequence[tuple[str, Any, dict[str, Any]]]  # objects, with copies of their attributes
    registered: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]
    spaces: Sequence[StatePlace]

    @classmethod
    def of(cls, modules: Mapping[str, torch.nn.Module], visitor: Visitor) -> "Before":
        """Copy the contents of all places that a visitor has reached."""
        spaces = [*visitor.places()]
        paths = {id(module): f"{path}." if path else "" for path, module in modules.items()}
        labels = paths | {id(space.owner): space.label for space in spaces if space.kind == "fields"}
        return cls(
            modules=modules,
            objects=[
                (labels[id(owner)], owner, {**vars(owner)}) for owner in visitor.open if hasattr(owner, "__dict__")
            ],
            registered=[
                (paths[id(module)], vars(module)[name], {**vars(module)[name]})
                for module in modules.values()
                for name in _REGISTERED
            ],
            spaces=[space for space in spaces if space.kind not in ("function", "array") and not _is_own(space)],
        )

    def changes(self, reads: Mapping[int, Names]) -> Iterator[StateChange]:
        """Yield every change since the copy was made."""
        for label, owner, old in self.objects:
            new = vars(owner)
            for name in own_names(owner, {**old, **new}):
                pair = old.get(name, MISSING), new.get(name, MISSING)
                if not _is_same(*pair):
                    is_read = name in reads.get(id(owner), {name: None})
                    yield StateChange(
                        place=label + name, old=pair[0], new=pair[1], is_read=is_read, owner=owner, name=name
                    )
        for label, space, old in self.registered:
            for name in (name for name in {**old, **space} if (name in old) != (name in space)):
                yield StateChange(place=label + name, old=old.get(name, MISSING), new=space.get(name, MISSING))
        for space in self.spaces:
            new = contents(space.kind, space.owner, space.names)
            if len(new) != len(space.values) or not all(map(_is_same, space.values, new)):
                yield _changed(space, new)

    def undo(self) -> None:
        """Write the copied contents back."""
        for _, owner, old in self.objects:
            _refill(owner, old)
        for _, space, old in self.registered:
            for name in [name for name in space if name not in old]:
                del space[name]
            space.update({name: value for name, value in old.items() if name not in space})
        for space in self.spaces:
            new = contents(space.kind, space.owner, space.names)
            if len(new) != len(space.values) or any(a is not b for a, b in zip(space.values, new, strict=True)):
                _put_back(space)


def _is_own(space: StatePlace) -> bool:
    return space.kind == "fields" and hasattr(space.owner, "__dict__")


def _changed(space: StatePlace, new: tuple[Any, ...]) -> StateChange:
    label = space.label.rstrip(".")
    if space.names and len(new) == len(space.names):
        at = next(number for number, value in enumerate(new) if not _is_same(space.values[number], value))
        return StateChange(place=space.named(space.names[at]), old=space.values[at], new=new[at])
    return StateChange(place=label, old=list(space.values), new=list(new))


def _is_same(old: Any, new: Any) -> bool:
    return old is new or _stands_in(old, new) or (type(old) is type(new) and _is_plain(new) and bool(old == new))


def _stands_in(old: Any, new: Any) -> bool:
    """Say whether torch calls a function through another while it traces, as those that ``torch.fx.wrap`` names."""
    return (
        isinstance(new, types.FunctionType)
        and getattr(new, "__wrapped__", None) is old
        and new.__code__.co_filename.startswith(_TORCH)
    )


def _refill(owner: Any, values: Mapping[str, Any]) -> None:
    """Let an object have these attributes again."""
    attributes = vars(owner)
    for name in own_names(owner, [name for name in attributes if name not in values]):
        del attributes[name]
    attributes.update({name: values[name] for name in own_names(owner, values)})


def _put_back(space: StatePlace) -> None:
    """Write the old contents of a place back."""
    owner: Any = space.owner
    match space.kind:
        case "dict" if not space.names:
            half = len(space.values) // 2
            dict.clear(owner)
            dict.update(owner, zip(space.values[:half], space.values[half:], strict=True))
        case "dict":
            owner.update(
                {name: value for name, value in zip(space.names, space.values, strict=True) if value is not MISSING}
            )
        case "items" | "set":
            owner.clear()
            (owner.extend if space.kind == "items" else owner.update)(space.values)
        case "cell":
            owner.cell_contents = space.values[0]
        case "class" | "fields":  # those in slots
            write: Any = type.__setattr__ if space.kind == "class" else object.__setattr__
            for name, value in zip(space.names, space.values, strict=True):
                if space.kind == "fields" or owner.__dict__.get(name, value) is not value:
                    write(owner, name, value)
        case _:
            pass


@dataclass(slots=True, kw_only=True)
class ForwardRecord:
    """The names that a forward pass reads and writes, by the id of the object that has them."""

    module: torch.nn.Module
    before: Before
    reads: dict[int, Names]
    written: dict[int, Names]
    is_active: bool = False
    asks_gradients: bool = False  # whether gradients are on
    changes: list[StateChange] = field(default_factory=list)
    after: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    visitor: Visitor

    def begin(self, *_: Any) -> None:
        """Note that forward begins."""
        self.is_active = True

    def end(self, *_: Any) -> None:
        """Refuse what forward has changed, and put it back."""
        self.is_active = False
        packages = {_package(type(module)) for module in self.before.modules.values()}
        changes = [change for change in self.before.changes(self.reads) if not change.is_of_library(packages)]
        for change in changes:
            if not (change.is_lazy or change.is_noted or change.is_computed or change.is_installed):
                self.before.undo()
                raise InputError.of("module", str(change))
        self.changes += changes
        self.after = [(module, {**vars(module)}) for module in self.before.modules.values()]
        olds = {(id(change.owner), change.name): change.old for change in changes if change.is_computed}
        for module, values in self.after:
            values.update({name: olds[id(module), name] for name in values if (id(module), name) in olds})

    def put_back(self) -> None:
        """Restore attributes to their state after forward, or before it if forward failed; torch copies lists."""
        self.is_active = False
        if not self.after:
            self.before.undo()
        for owner, attributes in self.after:
            _refill(owner, attributes)

    def watched(self) -> WatchedState:
        """Return what was read, with what lies there now."""
        modules = self.before.modules
        visitor = Visitor(self.reads, [*modules.values()])
        self.reads[id(self.module)]["forward"] = None
        fields: list[Fields] = []
        for path, module in modules.items():
            names = [*self.reads[id(module)]]
            visitor.module(path, module, names)
            for number, hook in enumerate(hooks_of(module) if path else ()):
                visitor.value(hook, f"hook {number} of {path}")
            fields.append(Fields.of(path, module, names))
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            visitor.add(getattr(torch.nn.modules.module, name), "dict", name)
        for label, tensor in visitor.tensors:
            if tensor.requires_grad:
                message = f"{label} holds a tensor with a gradient that is no parameter there; make it a parameter"
                raise InputError.of("module", f"{message} or a submodule of the module, or an input")
        paths = {id(module): path for path, module in modules.items()}
        noted = [change for change in self.changes if change.is_noted and id(change.owner) in paths]
        notes = [(paths[id(change.owner)], change.name, change.new) for change in noted]
        return WatchedState.of(fields, [*visitor.places()], visitor.tensors, notes)


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[ForwardRecord]:
    """Record what the forward pass of a module reads and writes, by hooks of the module and of its classes."""
    modules: dict[str, torch.nn.Module] = dict(modules_of(module))
    visitor = Visitor(None, [*modules.values()])
    for path, submodule in modules.items():
        visitor.module(path, submodule, [*vars(submodule), *methods_of(type(submodule))])
        for hook in hooks_of(submodule):
            visitor.value(hook, f"a hook of {path}")
    reads: dict[int, Names] = {id(owner): {} for owner in visitor.open if _is_patchable(type(owner))}
    record = ForwardRecord(
        module=module, before=Before.of(modules, visitor), reads=reads, written={key: {} for key in reads},
        visitor=visitor,
    )  # fmt: skip
    handles = [module.register_forward_pre_hook(record.begin), module.register_forward_hook(record.end)]
    kinds = {type(owner): None for owner in visitor.open if _is_patchable(type(owner))}
    of_torch: Any = torch
    ask: Any = torch.is_grad_enabled

    def asked() -> bool:
        is_torch = sys._getframe(1).f_code.co_filename.startswith(_TORCH)  # pyright: ignore[reportPrivateUsage]
        record.asks_gradients |= record.is_active and not is_torch
        return bool(ask())

    recorders = {kind: _recorders(kind, record) for kind in kinds}
    originals = {
        kind: {name: kind.__dict__[name] for name in methods if name in kind.__dict__}
        for kind, methods in recorders.items()
    }
    try:
        of_torch.is_grad_enabled = asked
        for kind, methods in recorders.items():
            for name, method in methods.items():
                type.__setattr__(kind, name, method)
        yield record
    finally:
        of_torch.is_grad_enabled = ask
        for kind, methods in recorders.items():
            for name in methods:
                if name in originals[kind]:
                    type.__setattr__(kind, name, originals[kind][name])
                else:
                    type.__delattr__(kind, name)
        for handle in handles:
            handle.remove()
        record.put_back()


def _is_patchable(kind: Any) -> bool:
    return bool(kind.__flags__ & _HEAP_TYPE) and not kind.__flags__ & _IMMUTABLE


def _recorders(kind: Any, record: ForwardRecord) -> dict[str, Any]:
    """Return how attributes of a class are read and written so that it is recorded."""
    read, write, reads, written = kind.__getattribute__, kind.__setattr__, record.reads, record.written

    def getattribute(self: Any, name: str) -> Any:
        if record.is_active and id(self) in reads and name not in written[id(self)]:
            is_torch = name == "__dict__" and sys._getframe(1).f_code.co_filename.startswith(_TORCH)  # pyright: ignore
            if not is_torch:
                reads[id(self)][name] = None
        return read(self, name)

    def setattribute(self: Any, name: str, value: Any) -> None:
        if record.is_active and id(self) in reads and name not in reads[id(self)]:
            written[id(self)][name] = None
        write(self, name, value)

    return {"__getattribute__": getattribute, "__setattr__": setattribute}
