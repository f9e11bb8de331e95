"""The plan of a module as a file: it comes back as it was, runs, can be edited, and belongs to one program only."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.modules.shard import shard_module, sharding_of
from autoshard.modules.sharded import shard
from autoshard.plan.codec import load
from autoshard.plan.module_plan import is_module_plan, load_module_plan
from autoshard.spec.cluster_catalogue import load_cluster
from tests.ranks.spawn import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SOURCE = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def make(width=32):
    torch.manual_seed(0)
    return Mlp(width), [torch.randn(4, 6, 16, requires_grad=True)]

def other():
    return make(64)

def nothing():
    return 3
"""


def made(name: str = "make") -> tuple[nn.Module, list[torch.Tensor]]:
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    return space[name]()


def doubled() -> tuple[nn.Module, list[torch.Tensor]]:
    module, (x,) = made()
    return module.double(), [x.detach().double().requires_grad_()]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    module, inputs = made()
    pins = {"up.weight": "[up/tp, _]", "down.weight": "[_, up/tp]"}
    found = shard_module(
        module, inputs, load_cluster("local", ranks=4), "dp=2,tp=2", batch="dp", precision="fp32", pins=pins
    )
    found.save(tmp_path / "module.json")
    (tmp_path / "model.py").write_text(SOURCE)
    return tmp_path / "module.json"


def test_a_saved_plan_comes_back_and_gives_the_same_program(saved: Path):
    plan, text = load_module_plan(saved), saved.read_text()
    assert is_module_plan(saved) and plan.parameters["up.weight"] == "[up/tp, down]"
    plan.save(saved)
    assert saved.read_text() == text
    module, inputs = made()
    again = sharding_of(plan, module, inputs)
    assert again.plan() == plan
    assert (
        max(one.error for one in again.prove(module.double(), [inputs[0].detach().double().requires_grad_()])) < 1e-12
    )


def test_an_edited_line_is_executed_or_refused_with_the_right_one(saved: Path):
    module, inputs = made()
    plan = load_module_plan(saved)
    name = next(name for name, line in plan.strategies if "| F all_reduce /tp" in line)
    line = plan.table[name]
    wrong = replace(plan, strategies=tuple({**plan.table, name: re.sub(r" \| F all_reduce /tp", "", line)}.items()))
    with pytest.raises(InputError, match=re.escape(name)):
        sharding_of(wrong, module, inputs)
    dim = line.partition(",")[2].split(",")[0].strip()
    longer = line.replace("F all_reduce /tp", f"F reduce_scatter {dim}/tp, all_gather {dim}/tp")
    edited = sharding_of(replace(plan, strategies=tuple({**plan.table, name: longer}.items())), module, inputs)
    kinds = [change.collective.kind for change in edited.program.collectives() if change.entry == name]
    assert kinds[:2] == ["reduce_scatter", "all_gather"]
    assert max(one.error for one in edited.prove(*doubled())) < 1e-12
    missing = tuple((key, one) for key, one in plan.strategies if key != "up")
    with pytest.raises(InputError, match="up"):
        sharding_of(replace(plan, strategies=missing), module, inputs)


def trained(path: Path, options: dict[str, Any]) -> list[float]:
    module, inputs = made()
    model = shard(module, inputs, "dp=2,tp=2", plan=path, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(3):
        loss = sum(one.pow(2).sum() for one in [model(*inputs).full_tensor()])
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_saved_plan_runs_on_ranks_with_a_batch_that_is_cut(saved: Path):
    module, inputs = made()
    optimizer, wanted = torch.optim.AdamW(module.parameters(), lr=1e-2), list[float]()
    for _ in range(3):
        loss = module(*inputs).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    for found in on_ranks(4, trained, saved, {}):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"fingerprint": "0"}, "that of another program"),
        ({"schema": 1}, "is 1; this autoshard reads 2"),
        ({"schema": 1, "bound_s": 0.1}, "is 1; this autoshard reads 2"),
        ({"x": 1}, "x"),
    ],
)
def test_a_plan_of_something_else_is_refused(saved: Path, change: dict[str, Any], says: str):
    saved.write_text(json.dumps(json.loads(saved.read_text()) | change))
    module, inputs = made()
    with pytest.raises(InputError, match=says):
        sharding_of(load_module_plan(saved), module, inputs)


def test_a_plan_of_a_module_is_no_plan_of_a_model(saved: Path):
    with pytest.raises(InputError, match="is that of a module's plan"):
        load(saved)


def test_the_commands_explain_and_verify_it(saved: Path, capsys: pytest.CaptureFixture[str]):
    file = saved.parent / "model.py"
    assert main(["explain", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "Mlp on dp=2,tp=2 of local" in shown and re.search(r"^up\.weight +\[up/tp, down\]", shown, re.MULTILINE)
    assert main(["verify", str(saved), "--module", f"{file}:make"]) == 0
    assert "equal those of the module" in capsys.readouterr().out
    for name, says in {
        "other": "another program",
        "nothing": "must return a module",
        "gone": "no function gone",
    }.items():
        assert main(["verify", str(saved), "--module", f"{file}:{name}"]) == 2
        assert says in capsys.readouterr().err
    file.write_text("import torch\n1 / 0\n")
    assert main(["verify", str(saved), "--module", f"{file}:make"]) == 2
    assert "line 2: ZeroDivisionError" in capsys.readouterr().err
    page = saved.parent / "page.html"
    assert main(["report", str(saved), "--out", str(page)]) == 0
    text = page.read_text()
    assert "all_reduce /tp" in text and "[up/tp, down]" in text and 'data-path="time_s"' in text
    assert main(["report", str(saved), str(saved)]) == 2
    assert main(["verify", str(saved)]) == 2
    assert "--module: is missing" in capsys.readouterr().err
