"""State that changes after a module was traced: the sharded module then gives what the plain one does."""

import copy
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from autoshard.errors import InputError
from autoshard.modules.export import ExportedModule
from autoshard.modules.sharded import shard
from autoshard.modules.state import columns, recording, spaces, watching
from autoshard.modules.state.tree import ModuleTree, tree_of
from tests.modules.state.changing import CASES, Changing
from tests.ranks.spawn import each_rank, on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def difference(plain: Any, module: Any) -> float:
    """Return the largest difference of results and gradients."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)
    results = [one(x) for one in (plain, module)]
    for one in (plain, module):
        one.zero_grad()
    for one in results:
        one.sum().backward()
    gradients = [0.0]
    for one, own in zip(plain.parameters(), module.parameters(), strict=True):
        whole = None if own.grad is None else own.grad.full_tensor()
        assert one.grad is not None or whole is None or not whole.any(), "a gradient that the plain module has not"
        if one.grad is not None:
            gradients.append(float((one.grad - (0.0 if whole is None else whole)).abs().max()))
    return max(float((results[0] - results[1]).abs().max()), *gradients)


def changed(names: list[str]) -> dict[str, Any]:
    """Return how far each module is from the plain one, how far it goes, and how often it was traced."""
    found: dict[str, Any] = {}
    for name in names:
        torch.manual_seed(0)
        module: Any
        plain, module = Changing(name).double(), Changing(name).double()
        module.load_state_dict(plain.state_dict())
        x = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)
        try:
            module = shard(module, [x], "data=2")
            before, first = difference(plain, module), plain(x)
            for one in (plain, module):
                CASES[name].change(one)
            moves = float((plain(x) - first).abs().max()) if plain(x).shape == first.shape else 1.0
            after = difference(plain, module), difference(plain, module)
            found[name] = before, *after, moves, len(module.autoshard.runners)
        except InputError as error:
            found[name] = str(error)
        finally:
            CASES[name].undo()
    return found


_GROUPS = [[*CASES][start::8] for start in range(8)]


@pytest.mark.parametrize("group", rest_is_slow(range(8), 0, 1))
def test_what_forward_reads_may_change(group: int):
    for found in on_ranks(2, changed, _GROUPS[group]):
        wrong = {
            name: one for name, one in found.items()
            if isinstance(one, str) or max(one[:3]) > 1e-12 or one[3] < 1e-3 or one[4] > 2
        }  # fmt: skip
        assert not wrong


def difference_of(name: str, *, is_copied: bool = False) -> str | None:
    """Return what is seen of a case on one process, in which nothing is sharded."""
    module = Changing(name).double()
    try:
        state = ExportedModule.of(module, [torch.ones(4, 8, dtype=torch.float64)]).state
        trees: WeakKeyDictionary[torch.nn.Module, ModuleTree] = WeakKeyDictionary()
        for _ in range(2):  # the second time by the quick test
            assert state.difference(tree_of(module, trees)) is None
        assert not is_copied or state.difference(ModuleTree.of(copy.deepcopy(module))) is None
        CASES[name].change(module)
        return state.difference(tree_of(module, trees))
    finally:
        CASES[name].undo()


NOT_COPIED = ("array", "tensor", "tensor in place", "data of tensor", "tensor in list")
BY_OTHERS = ("buffer", "mode")  # an input of the program, and a part of the call


@pytest.mark.parametrize("name", CASES)
def test_a_change_has_a_place_and_a_copy_has_none(name: str):
    assert (difference_of(name, is_copied=name not in NOT_COPIED) is None) == (name in BY_OTHERS)


def nothing(_: object) -> tuple[columns.Reads, list[Any]]:
    return tuple, []


LEFT_OUT: dict[str, tuple[Any, str, Any]] = {
    "hook": (watching, "hooks_of", lambda _: []),
    "replaced buffer": (watching, "_buffers", lambda _: []),
    "tensor in place": (watching, "_look", lambda _: 0),
    "data of tensor": (watching, "_look", lambda one: one._version),
    "global": (watching.WatchedState, "_unlike", lambda _: ()),
    "int": (watching.WatchedState, "_moved", lambda *_: None),
    "closure": (spaces.Visitor, "function", lambda *_: None),
    "class attribute": (spaces.Visitor, "of_class", lambda *_: None),
    "dataclass": (spaces.Visitor, "_fields", lambda *_: None),
    "list": (spaces.Visitor, "_parts", lambda *_: None),
    "defaults": (columns, "COLUMNS", {**columns.COLUMNS, "function": (lambda one: one.kind == "function", nothing)}),
    "new attribute": (recording, "_recorders", lambda *_: {}),
    "nested dataclass": (spaces, "is_own", lambda _: False),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_guard_that_is_left_out_lets_a_change_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(*LEFT_OUT[name])
    assert difference_of(name) is None


class Asking(torch.nn.Linear):
    """Computes something else where nothing will go back."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (2 if torch.is_grad_enabled() else 3)


@pytest.mark.parametrize(("kind", "programs"), [(Asking, 2), (torch.nn.Linear, 1)])
@each_rank(2)
def test_a_module_that_asks_whether_gradients_are_on_is_traced_for_both(kind: type[torch.nn.Linear], programs: int):
    plain, x = kind(8, 8).double(), torch.ones(4, 8, dtype=torch.float64)
    module: Any = shard(copy.deepcopy(plain), [x], "data=2")
    with torch.no_grad():
        assert max(float((plain(x) - module(x)).abs().max()) for _ in range(2)) < 1e-12
    assert float((plain(x) - module(x)).abs().max()) < 1e-12
    assert len(module.autoshard.runners) == programs, "only what asks is traced again"
