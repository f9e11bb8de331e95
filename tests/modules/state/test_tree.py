"""The tree of a module is remembered for as long as it is the same; what is read at once differs where it changes."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from autoshard.modules.state.columns import columns_of
from autoshard.modules.state.spaces import Kind, StatePlace, contents
from autoshard.modules.state.tree import ModuleTree, tree_of


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.tied = self.first


def freeze(module: Pair) -> None:
    module.first.weight.requires_grad_(False)


def replace_child(module: Pair) -> None:
    module.second[0] = nn.Linear(2, 2)


def turn(module: Pair) -> None:
    children = module._modules
    children["first"] = children.pop("first")


def add_parameter(module: Pair) -> None:
    module.second.register_parameter("scale", nn.Parameter(torch.ones(1)))


def replace_parameter(module: Pair) -> None:
    module.first.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "stays"),
    [(freeze, True), (replace_parameter, True), (replace_child, False), (turn, False), (add_parameter, False)],
)
def test_a_tree_is_remembered_until_its_modules_change(change: Callable[[Pair], None], stays: bool):
    module, trees = Pair(), WeakKeyDictionary[nn.Module, ModuleTree]()
    before = tree_of(module, trees)
    assert tree_of(module, trees) is before
    change(module)
    after = tree_of(module, trees)
    assert (after is before) == stays
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert after.trained() == {path for path, parameter in parameters.items() if parameter.requires_grad}
    module.second.eval()
    assert Counter(after.modes()) == Counter(submodule.training for submodule in module.modules())


def test_a_tree_does_not_hold_its_module():
    gc.freeze()  # what other tests left would be searched for seconds
    module, trees = Pair(), WeakKeyDictionary[nn.Module, ModuleTree]()
    tree_of(module, trees)
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None and not trees


class Base:
    scale, shift = 1, 2


class Derived(Base):
    shift = 3


def closure() -> Callable[[], object]:
    inside: object = 1.5

    def read(x: int = 1, *, y: int = 2) -> object:
        return inside, x, y

    return read


def place(kind: Kind, owner: object, *names: str) -> StatePlace:
    return StatePlace(owner=owner, kind=kind, label="", names=names, values=contents(kind, owner, names))


def test_what_is_read_at_once_is_another_once_any_of_it_changes(monkeypatch: pytest.MonkeyPatch):
    read, space, plain = closure(), {"size": 1000}, SimpleNamespace(rate=object())
    assert read.__closure__
    (cell,) = read.__closure__
    places = [
        place("dict", space, "size", "absent"), place("fields", plain, "rate"),
        place("class", Derived, "scale", "none"), place("function", read), place("cell", cell, ""),
    ]  # fmt: skip
    columns = {column.places[0].kind: column for column in columns_of(places)}
    assert len(columns) == len(places)
    changes: dict[str, list[tuple[object, str, object]]] = {
        "fields": [(plain, "rate", object())],
        "class": [(Derived, "scale", 1.0), (Base, "scale", 5), (Base, "none", 1)],
        "function": [(read, "__defaults__", (1.0,)), (read, "__kwdefaults__", {"y": 2})],
        "cell": [(cell, "cell_contents", 2.5)],
    }  # fmt: skip
    for kind, of_kind in changes.items():
        for owner, name, value in of_kind:
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, value, raising=False)
                assert [one for one, column in columns.items() if not column.is_same()] == [kind], name
            assert columns[kind].is_same()
    for name in ("size", "absent"):
        with monkeypatch.context() as patch:
            patch.setitem(space, name, 1001)
            assert [one for one, column in columns.items() if not column.is_same()] == ["dict"]
