"""Precisions whose parts have formats of their own: planned, compared, and refused where no engine runs them."""

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from tests.conftest import Typed

ASKED = "--model tiny-llama --cluster local --ranks 2 --seq-len 64 --global-batch 16 --fix tp=1,dp=2,mbs=8"
BF16 = "bf16,gradients=bf16,moments=bf16"
UNRUN = "bf16,moments=fp16"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for name, precision in (("usual.json", "bf16"), ("small.json", BF16), ("unrun.json", UNRUN)):
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
    _, answer, _ = typed(f"plan {ASKED} --precision {UNRUN} --out again.json")
    words = " ".join(answer.split())
    assert "bf16 with fp32 masters and fp16 moments" in words
    assert f"precision={UNRUN}: is priced, and the torch engine does not run it yet" in words
    assert typed("explain unrun.json")[0] == typed("compare usual.json unrun.json")[0] == 0


@pytest.mark.slow
def test_a_run_goes_on_with_moments_in_another_format(typed: Typed) -> None:
    for name, steps in (("usual.json", 2), ("small.json", 4), ("usual.json", 5)):
        typed.answer(f"run {name} --steps {steps} --out run")
    losses = [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert typed("run usual.json --steps 5 --out straight")[0] == 0
    straight = [json.loads(line)["loss"] for line in Path("straight/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 5 and losses == pytest.approx(straight, rel=1e-3)


@pytest.mark.parametrize(
    "line", ["run unrun.json --steps 1", "verify unrun.json", "launch unrun.json --scheduler slurm"]
)
def test_what_no_engine_runs_is_refused_before_it_starts(line: str, typed: Typed) -> None:
    code, out, _ = typed(line)
    assert code == 1 and "the torch engine does not run it yet. Use --precision bf16" in " ".join(out.split())
    assert not [path for path in Path().iterdir() if path.is_dir()]
