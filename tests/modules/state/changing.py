"""Modules that read something beside inputs and parameters, each with what changes it after the first trace."""

import copy
import enum
import functools
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

SCALE = 1.0
SCALES = [1.0, 2.0]
SETTINGS = {"scale": 1.0}
NAMESPACE = SimpleNamespace(scale=1.0)


class Mode(enum.Enum):
    PLAIN = 1
    TWICE = 2


@dataclass
class Inner:
    scale: float = 1.0
    parts: list[float] = field(default_factory=lambda: [1.0])


@dataclass
class Config:
    scale: float = 1.0
    inner: Inner = field(default_factory=Inner)
    unread: int = 0


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Fields(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class Mapped:
    """Finds names as the configs of Hugging Face do, which know some of them under others."""

    def __init__(self) -> None:
        self.own_scale = 1.0

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("own_scale" if name == "scale" else name)


CONFIG = Config()


class Scaling:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def by_default(x: torch.Tensor, scale: float = 1.0, parts: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
    return x * scale * parts[0]


def replaced_later(x: torch.Tensor) -> torch.Tensor:
    return x


def by_global(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


def closed(scale: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change(to: float) -> None:
        nonlocal scale
        scale = to

    return scaled, change


class Base(nn.Module):
    """Multiplies what a layer makes by something."""

    kind_scale: ClassVar[float] = 1.0
    kind_parts: ClassVar[list[float]] = [1.0]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.act: Any = nn.LeakyReLU(0.1)
        self.count, self.scale, self.name, self.none, self.pair = 3, 1.0, "tanh", None, (1.0, 2.0)
        self.zero, self.parts = 0.0, [1.0, 2.0]
        self.table: Any = {"a": {"scale": 1.0}}
        self.chosen = {1}
        self.queue = deque([1.0])
        self.cfg: Any = Config()
        self.slots, self.open, self.fields, self.mapped = (
            Slots(),
            SimpleNamespace(scale=1.0),
            Fields(scale=1.0),
            Mapped(),
        )
        self.ordered = OrderedDict(scale=1.0)
        self.mode, self.array = Mode.PLAIN, np.ones(2)
        self.plain, self.several = torch.ones(8, dtype=torch.float64), [torch.ones(8, dtype=torch.float64)]
        self.scaling, self.function = Scaling(), functools.partial(torch.mul, other=1.0)
        self.summed = functools.partial(lambda x, parts: x * sum(parts), parts=[1.0])
        self.closed, self.reclose = closed(1.0)
        self.register_buffer("buffer", torch.ones(8, dtype=torch.float64))
        self.factor: Callable[[Any], Any] = lambda one: 1.0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.middle(self.act(self.first(x)))


@dataclass(frozen=True)
class Case:
    """How the numbers go on, and how that changes."""

    middle: Callable[[Any, torch.Tensor], torch.Tensor]
    change: Callable[[Any], object]
    undo: Callable[[], object] = lambda: None


def some_layers(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers[: m.count]:
        x = layer(x)
    return x


def all_layers(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = layer(x)
    return x


def to(path: str, value: Any) -> Callable[[Any], None]:
    """Change an attribute."""

    def change(m: Any) -> None:
        *way, name = path.split(".")
        for one in way:
            m = getattr(m, one)
        setattr(m, name, copy.deepcopy(value) if isinstance(value, nn.Module) else value)  # a module each

    return change


def globally(name: str, value: Any) -> Callable[..., None]:
    return lambda *_: globals().__setitem__(name, value)


def times_scale(_: Any, __: Any, made: Any) -> Any:
    return made * SCALE


def hooked(m: Any) -> None:
    m.act.register_forward_hook(lambda _, __, made: made * 3)


def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def class_forward(m: Any) -> None:
    Half.forward = lambda _, x: x / 3  # pyright: ignore


def class_forward_back() -> None:
    Half.forward = lambda _, x: x / 2  # pyright: ignore


CASES: dict[str, Case] = {
    "int": Case(some_layers, to("count", 1)),
    "float": Case(lambda m, x: x * m.scale, to("scale", 0.5)),
    "negative zero": Case(lambda m, x: x * math.copysign(1, m.zero), to("zero", -0.0)),
    "text": Case(lambda m, x: getattr(torch, m.name)(x), to("name", "sigmoid")),
    "none": Case(lambda m, x: x if m.none is None else x * m.none, to("none", 2.0)),
    "tuple": Case(lambda m, x: x * m.pair[1], to("pair", (1.0, 3.0))),
    "list": Case(lambda m, x: x * m.parts[1], lambda m: m.parts.__setitem__(1, 5.0)),
    "longer list": Case(lambda m, x: x * sum(m.parts), lambda m: m.parts.append(5.0)),
    "nested dict": Case(lambda m, x: x * m.table["a"]["scale"], lambda m: m.table["a"].update(scale=4.0)),
    "new key": Case(lambda m, x: x * m.table.get("b", 1.0), lambda m: m.table.update(b=4.0)),
    "set": Case(lambda m, x: x * (2 if 7 in m.chosen else 1), lambda m: m.chosen.add(7)),
    "deque": Case(lambda m, x: x * m.queue[0], lambda m: m.queue.appendleft(3.0)),
    "dataclass": Case(lambda m, x: x * m.cfg.scale, to("cfg.scale", 2.0)),
    "nested dataclass": Case(lambda m, x: x * m.cfg.inner.scale, to("cfg.inner.scale", 2.0)),
    "list in dataclass": Case(lambda m, x: x * m.cfg.inner.parts[0], lambda m: m.cfg.inner.parts.insert(0, 3.0)),
    "replaced dataclass": Case(lambda m, x: x * m.cfg.scale, to("cfg", Config(scale=7.0))),
    "slots": Case(lambda m, x: x * m.slots.scale, to("slots.scale", 2.0)),
    "namespace": Case(lambda m, x: x * m.open.scale, to("open.scale", 2.0)),
    "dict with attributes": Case(lambda m, x: x * m.fields.scale, lambda m: m.fields.update(scale=2.0)),
    "ordered dict": Case(lambda m, x: x * m.ordered["scale"], lambda m: m.ordered.update(scale=2.0)),
    "mapped name": Case(lambda m, x: x * m.mapped.scale, to("mapped.own_scale", 2.0)),
    "all attributes": Case(lambda m, x: x * vars(m.cfg)["scale"], to("cfg.scale", 2.0)),
    "enum": Case(lambda m, x: x * m.mode.value, to("mode", Mode.TWICE)),
    "array": Case(lambda m, x: x * float(m.array[1]), lambda m: m.array.__setitem__(1, 3.0)),
    "tensor": Case(lambda m, x: x * m.plain, to("plain", torch.full((8,), 3.0, dtype=torch.float64))),
    "tensor in place": Case(lambda m, x: x * m.plain, lambda m: m.plain.mul_(3)),
    "data of tensor": Case(lambda m, x: x * m.plain, lambda m: setattr(m.plain, "data", m.plain * 3)),
    "tensor in list": Case(lambda m, x: x * m.several[0], lambda m: m.several[0].add_(3)),
    "buffer": Case(lambda m, x: x * m.buffer, lambda m: m.buffer.mul_(3)),
    "replaced buffer": Case(lambda m, x: x * m.buffer.sum(), to("buffer", torch.full((3,), 3.0, dtype=torch.float64))),
    "no buffer": Case(lambda m, x: x if m.buffer is None else x * 3, to("buffer", None)),
    "submodule": Case(lambda m, x: x, to("act", nn.Tanh())),
    "submodule of the same class": Case(lambda m, x: x, to("act", nn.LeakyReLU(0.7))),
    "shorter list of modules": Case(all_layers, lambda m: m.layers.__delitem__(2)),
    "forward of a submodule": Case(lambda m, x: x, to("act.forward", half)),
    "forward of a class": Case(lambda m, x: m.halved(x), class_forward, class_forward_back),
    "method of an object": Case(lambda m, x: m.middle_of(x), to("middle_of", lambda x: x * 3)),
    "hook": Case(lambda m, x: x, hooked),
    "hook of a module's function": Case(lambda m, x: m.halved(x), globally("SCALE", 4.0), globally("SCALE", 1.0)),
    "global": Case(lambda m, x: by_global(x), globally("SCALE", 3.0), globally("SCALE", 1.0)),
    "global list": Case(lambda m, x: x * SCALES[1], lambda _: SCALES.__setitem__(1, 6.0)),
    "global dict": Case(lambda m, x: x * SETTINGS["scale"], lambda _: SETTINGS.update(scale=6.0)),
    "global namespace": Case(lambda m, x: x * NAMESPACE.scale, lambda _: to("scale", 6.0)(NAMESPACE)),
    "global config": Case(lambda m, x: x * CONFIG.inner.scale, lambda _: to("inner.scale", 6.0)(CONFIG)),
    "global function": Case(lambda m, x: replaced_later(x), globally("replaced_later", half)),
    "closure": Case(lambda m, x: m.closed(x), lambda m: m.reclose(4.0)),
    "class attribute": Case(lambda m, x: x * m.kind_scale, lambda m: setattr(Base, "kind_scale", 5.0),
                            lambda: setattr(Base, "kind_scale", 1.0)),
    "class list": Case(lambda m, x: x * m.kind_parts[0], lambda m: m.kind_parts.__setitem__(0, 5.0)),
    "class attribute hidden": Case(lambda m, x: x * m.kind_scale, to("kind_scale", 5.0)),
    "defaults": Case(lambda m, x: by_default(x), lambda _: setattr(by_default, "__defaults__", (2.0, [1.0])),
                     lambda: setattr(by_default, "__defaults__", (1.0, [1.0]))),
    "list in defaults": Case(lambda m, x: by_default(x), lambda _: by_default.__defaults__[1].__setitem__(0, 9.0)),  # type: ignore
    "new attribute": Case(lambda m, x: x * getattr(m, "later", 1.0), to("later", 2.0)),
    "callable object": Case(lambda m, x: m.scaling(x), to("scaling.scale", 2.0)),
    "partial": Case(lambda m, x: m.function(x), to("function", functools.partial(torch.mul, other=2.0))),
    "list in partial": Case(lambda m, x: m.summed(x), lambda m: m.summed.keywords["parts"].append(5.0)),
    "lambda": Case(lambda m, x: x * m.factor(m), to("factor", lambda one: 2.0)),
    "mode": Case(lambda m, x: x * (1 if m.act.training else 2), lambda m: m.act.eval()),
    "read in a loop": Case(lambda m, x: x * [getattr(m, name) for name in ("count", "scale")][1], to("scale", 2.0)),
}  # fmt: skip


class Changing(Base):
    """One of the cases."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.case, self.halved = CASES[name], Half()
        self.middle_of = lambda x: x
        if "hook of" in name:
            self.halved.register_forward_hook(times_scale)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.case.middle(self, x)
