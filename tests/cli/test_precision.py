"""Precisions whose parts have formats of their own: planned, compared, and refused where no engine runs them."""

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from tests.conftest import Typed

ASKED = "--model tiny-llama --cluster local --ranks 2 --fix tp=1,dp=2,mbs=8"
BF16 = "bf16,gradients=bf16,moments=bf16"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name, precision in (("usual.json", "bf16"), ("small.json", BF16)):
        assert main([*f"plan {ASKED} --precision {precision} --out".split(), str(folder / name)]) == 0
    return folder


@pytest.fixture(autouse=True)
def plans(in_an_empty_folder: None, made: Path) -> None:
    for path in made.iterdir():
        Path(path.name).write_bytes(path.read_bytes())


def test_states_in_bf16_are_priced_and_said() -> None:
    usual, small = (json.loads(Path(name).read_text()) for name in ("usual.json", "small.json"))
    parts, fewer = (plan["prediction"]["stage_memory"][0]["parts"] for plan in (usual, small))
    for part in ("gradients", "optimizer"):
        assert fewer[part] == parts[part] / 2
    assert fewer["masters"] == parts["masters"]


@pytest.mark.slow
def test_a_plan_says_that_no_engine_runs_its_precision_and_other_commands_take_it(typed: Typed) -> None:
    _, answer, _ = typed(f"plan {ASKED} --precision {BF16} --out again.json")
    words = " ".join(answer.split())
    assert "bf16 with fp32 masters and bf16 gradients and bf16 moments" in words
    assert f"precision={BF16}: is priced, and the torch engine does not run it yet" in words
    assert typed("explain small.json")[0] == typed("compare usual.json small.json")[0] == 0


@pytest.mark.parametrize(
    "line", ["run small.json --steps 1", "verify small.json", "launch small.json --scheduler slurm"]
)
def test_what_no_engine_runs_is_refused_before_it_starts(line: str, typed: Typed) -> None:
    code, out, _ = typed(line)
    assert code == 1 and "the torch engine does not run it yet. Use --precision bf16" in " ".join(out.split())
    assert not [path for path in Path().iterdir() if path.is_dir()]
