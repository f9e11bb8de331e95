"""What forward writes: refused by name where the next call would differ; otherwise written again, or left alone."""

import copy
import importlib
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from autoshard.errors import InputError
from autoshard.modules.export import ExportedModule
from autoshard.modules.sharded import shard
from tests.ranks.spawn import each_rank

STEPS, SEEN = 0, dict[int, int]()


def count_globally() -> None: ...


exec("def count_globally():\n    global STEPS\n    STEPS += 1")  # which a rule forbids here


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


torch.fx.wrap("doubled")  # torch calls it through another function as long as it traces


def counter() -> Callable[[], int]:
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return steps

    return count


class Config:
    def __init__(self) -> None:
        self.steps = 0


class Writing(nn.Module):
    """Writes something in its forward pass."""

    steps_of_class: ClassVar[int] = 0
    all_seen: ClassVar[list[int]] = []

    def __init__(self, write: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.a, self.write, self.scale = nn.Linear(4, 4), write, 1.0
        self.steps, self.losses, self.table, self.by_key = 0, list[Any](), dict[str, Any](), defaultdict[str, int](int)
        self.cfg, self.aux, self.count, self.found = Config(), None, counter(), None
        self.batch = self.rows = 0
        self.register_buffer("mask", torch.ones(4))
        self.weights, self.kept, self.aside = list[Any](), torch.ones(4, requires_grad=True), [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        made = self.write(self, y)
        return y + made if isinstance(made, torch.Tensor) else y


def add_to(path: str, name: str) -> Callable[[Any, Any], None]:
    def write(m: Any, _: Any) -> None:
        owner = getattr(m, path) if path else m
        setattr(owner, name, getattr(owner, name) + 1)

    return write


def leave(m: Any, y: torch.Tensor) -> None:
    m.aux_loss = y.pow(2).mean()


def to_class(*_: Any) -> None:
    Writing.steps_of_class += 1


def key_of_all(*_: Any) -> None:
    SEEN[len(SEEN)] = 1


def hold(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y @ m.weights[0]


_REFUSED = {
    "changes steps from 0 to 1": add_to("", "steps"),
    "changes cfg.steps from 0 to 1": add_to("cfg", "steps"),
    "changes Writing.steps_of_class from 0 to 1": to_class,
    "changes the globals of tests.modules.state.test_refused_state['STEPS'] from 0 to 1": lambda *_: count_globally(),
    "changes steps of tests.modules.state.test_refused_state.counter.<locals>.count from 0 to 1": (
        lambda m, _: m.count()
    ),
    "changes SEEN from [] to [0, 1]": key_of_all,
    "changes by_key from [] to ['a', 1]": lambda m, _: add_to_key(m),
    "changes losses from [] to [1]": lambda m, _: m.losses.append(1),
    "changes Writing.all_seen from [] to [1]": lambda m, _: m.all_seen.append(1),
    "leaves a tensor in losses": lambda m, y: m.losses.append(y.mean()),
    "leaves a tensor in table": lambda m, y: m.table.update(loss=y.mean()),
    "leaves a tensor in cfg.loss": lambda m, y: setattr(m.cfg, "loss", y.mean()),
    "forward leaves a tensor in aux_loss; return it as a result instead": leave,
    "leaves a tensor in aux;": lambda m, y: setattr(m, "aux", y),
    "leaves a tensor in mask_2": lambda m, y: m.register_buffer("mask_2", y),
    "leaves a tensor in found": lambda m, y: setattr(m, "found", {"y": [y]}),
    "weights[0] holds a tensor with a gradient that is no parameter there": hold,
    "kept holds a tensor with a gradient": lambda m, y: y * m.kept,
    "aside[0].weight holds a tensor with a gradient": lambda m, y: m.aside[0](y),
}  # fmt: skip


def add_to_key(m: Any) -> None:
    m.by_key["a"] += 1


def state_of(m: Any) -> dict[str, Any]:
    own = {**vars(m), **{f"cfg.{name}": one for name, one in vars(m.cfg).items()}}
    return {name: list(one) if isinstance(one, list | dict) else one for name, one in own.items()}


@pytest.mark.parametrize("message", _REFUSED)
def test_what_the_next_call_would_do_again_is_refused_by_name_and_put_back(message: str):
    module = Writing(_REFUSED[message])
    module.weights.append(module.a.weight)
    before, lists = state_of(module), (module.losses, module.table)
    with pytest.raises(InputError) as caught:
        ExportedModule.of(module, [torch.ones(2, 4)])
    assert message in str(caught.value)
    assert state_of(module) == before and (module.losses, module.table) == lists
    assert (STEPS, SEEN, Writing.steps_of_class, Writing.all_seen) == (0, {}, 0, [])
    assert module.count() == 1 and "mask_2" not in dict(module.named_buffers())
    assert type(module).__getattribute__ is object.__getattribute__


def test_the_line_that_leaves_a_tensor_is_named():
    class Leaves(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.aux = input.sum()
            return super().forward(input)

    with pytest.raises(InputError, match=r"test_refused_state.py\", line \d+, in forward: forward leaves"):
        ExportedModule.of(Leaves(4, 4), [torch.ones(2, 4)])


def test_a_module_with_a_forward_of_its_own_is_refused():
    module = nn.Linear(4, 4)
    module.forward = lambda input: input * 2
    with pytest.raises(InputError, match="has a forward of its own that hides that of its class"):
        shard(module, [torch.ones(2, 4)], "data=2")


class Applied(nn.Linear):
    """Calls a function of another package."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(4, 4)
        self.function = function

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.function(super().forward(input))


def test_functions_that_torch_replaces_while_it_traces_are_no_change():
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return doubled(super().forward(input))

    exported = ExportedModule.of(Doubled(4, 4), [torch.ones(2, 4)])
    assert not exported.own_gradients and doubled.__name__ == "doubled"


def test_a_library_without_modules_may_set_itself_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = "class Registry: ...\nregistry = Registry()\ndef doubled(x):\n    registry.calls = {}\n    return 2 * x\n"
    modules: list[nn.Module] = []
    for folder, name in (("site-packages", "installed"), ("source", "edited")):
        path = tmp_path / folder / f"{name}_operations.py"
        path.parent.mkdir()
        path.write_text(code)
        monkeypatch.syspath_prepend(str(path.parent))
        double = importlib.import_module(path.stem).doubled
        modules.append(Applied(double))
    assert ExportedModule.of(modules[0], [torch.ones(2, 4)])
    with pytest.raises(InputError, match=r"forward changes registry\.calls"):
        ExportedModule.of(modules[1], [torch.ones(2, 4)])


class Warming(nn.Linear):
    scale = 1.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


@pytest.mark.slow
@each_rank(2, replaced=[("autoshard.modules.sharded", "_MANY", 3)])
def test_what_changes_in_every_step_is_named():
    module: Any = shard(Warming(4, 4), [torch.ones(2, 4)], "data=2")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(5):
            module.scale = step / 10
            module(torch.ones(2, 4))
    (message,) = (str(one.message) for one in told if "kinds of calls" in str(one.message))
    assert message.endswith("; scale changes: give it as an input")


class Noting(nn.Module):
    """Writes numbers for others, finds some once, and has attributes that forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.kind, self.unread, self.cfg, self.losses = nn.Linear(4, 4), None, 0, Config(), list[Any]()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "found"
        self.rows = len(x)
        self.cells, self.shape = self.rows * 2, [*x.shape]
        return self.a(self.rnn(x[:, None])[0][:, 0]) * (2 if self.kind == "found" else 3)


@each_rank(2)
def test_what_forward_notes_is_written_at_every_call_and_nothing_is_traced_without_need():
    module: Any = shard(Noting(), [torch.ones(2, 4)], "data=2")
    assert (module.kind, module.rows, len(module.autoshard.runners)) == ("found", 2, 1)
    for rows, programs in ((2, 1), (6, 2), (2, 2)):
        module.unread += 1
        module.cfg.steps += 1
        module.losses.append(module(torch.ones(rows, 4)).sum().item())
        assert (module.kind, module.rows, module.cells, module.shape) == ("found", rows, 2 * rows, [rows, 4])
        assert len(module.autoshard.runners) == programs
    other = copy.deepcopy(module)
    other(torch.ones(2, 4))
    assert len(other.autoshard.runners) == 2
    other.kind = "other"
    ratio = other(torch.ones(2, 4)).mean() / module(torch.ones(2, 4)).mean()
    assert (len(other.autoshard.runners), round(float(ratio), 5)) == (3, 1.5)
