"""``autoshard run``: what a user types, what comes back, and what lies in the folder of the run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.errors import InputError
from autoshard.plan.codec import dump, load
from autoshard.runtime.machine import available_bytes, refuse_too_large
from tests.runtime.cases import environment, tiny_plan, write_tiny

PLAN = ("plan", "--model", "tiny-llama", "--cluster", "local", "--ranks", "2", "--seq-len", "16", "--global-batch", "4",
        "--fix", "mbs=2")  # fmt: skip


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> list[str]:
    """What a command that must not run says, line by line; nothing may lie where the run would have."""
    capsys.readouterr()
    assert main(["run", *words]) == code
    assert not Path("runs").exists()
    said = capsys.readouterr()
    return [line.removeprefix("autoshard: ") for line in (said.err or said.out).splitlines()]


@pytest.mark.ranks
@pytest.mark.slow
def test_the_first_run_measures_this_machine_and_the_next_one_knows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    assert main([*PLAN]) == 0
    capsys.readouterr()
    for number, out in enumerate(("first", "second")):
        assert main(["run", "plan.json", "--steps", "4", "--out", out]) == 0
        said = capsys.readouterr()
        assert ("measuring this machine, once" in said.err) == (number == 0)
        assert f"calibrated on {number + 2} rows of local" in said.err and "prediction: " in said.out
        planned, ran = load(Path("plan.json")), load(Path(out) / "plan.json")
        assert planned.candidate == ran.candidate and planned.strategies == ran.strategies
        assert ran.provenance["calibration"].startswith("this machine (")
    assert len((tmp_path / "cache" / "local.jsonl").read_text("utf-8").splitlines()) == 3
    assert main([*PLAN, "--calibration", str(tmp_path / "cache" / "local.json"), "--force"]) == 0
    of_user = load(Path("plan.json")).provenance["calibration"]
    assert main(["run", "plan.json", "--steps", "4", "--out", "third"]) == 0
    assert load(Path("third") / "plan.json").provenance["calibration"] == of_user, "constants of users stay"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_step_without_an_answer_says_so_and_lines_to_type_are_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    answered = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "yes"}]
    lines = [json.dumps({"messages": talk}) for talk in (*([answered[:1]] * 60), answered)]
    Path("chat.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["tokenize", "chat.jsonl", "--chat", "--tokenizer", "bytes", "--out", "sft"]) == 0
    assert main(["64" if word == "16" else word for word in PLAN]) == 0
    run = ["run", "plan.json", "--steps", "3", "--data.set", "sft=1", "--data.loss-on", "answers", "--out", "a b/c"]
    assert main(run) == 0
    said = capsys.readouterr().out
    assert "counts no token: none of its samples has an answer, so it has no loss" in said
    steps = [json.loads(line) for line in Path("a b/c/metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [step["loss"] for step in steps]
    assert None in losses and 0 not in losses and not any("nonfinite" in step for step in steps)
    assert f"step {losses.index(None) + 1}/3   no loss   norm" in said
    assert (
        "next: autoshard generate 'a b/c' --prompt" in said
        and "autoshard report 'a b/c/plan.json' --run 'a b/c'" in said
    )


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_that_cannot_save_names_no_checkpoint_and_no_command_that_needs_one() -> None:
    assert main([*PLAN]) == 0
    line = f"ulimit -f 400; {sys.executable} -m autoshard.cli run plan.json --steps 2 --out full"  # KiB of a file
    done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    said = "the state at the end is not saved, so that the same command begins anew: "
    assert said in done.stderr and "File too large" in done.stderr
    assert "\nwrote full: plan.json, metrics.jsonl, measured.jsonl, report.json\nnext: autoshard report " in done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_plan_then_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN]) == 0
    capsys.readouterr()
    assert main(["run", "plan.json", "--steps", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("tiny-llama on 2 ranks of this machine: tp=")
    *lines, ending = [line for line in said if "loss " in line]
    assert [line[:8] for line in lines] == [f"step {n}/4" for n in (1, 2, 3, 4)]
    first, last = (line.split("loss ")[1].split()[0] for line in (lines[0], lines[-1]))
    assert ending.startswith(f"loss {first} -> {last} in 4 steps: 256 tokens in ")
    assert any(line.startswith("Predicted and measured") for line in said)
    assert said[-1] == "next: autoshard report runs/plan/plan.json --run runs/plan --open"
    folder = Path("runs/plan")
    assert (folder / "plan.json").read_bytes() == Path("plan.json").read_bytes()
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4] and all(step["time_s"] > 0 for step in steps)
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    for path in (folder / "measured.jsonl", folder, folder.parent):
        assert main(["validate", str(path)]) == 0
    assert main(["run", "plan.json", "--steps", "4", "--resume", "never"]) == 2
    errors = capsys.readouterr().err
    assert errors.endswith("runs/plan: already holds files, which a run never overwrites. Type --out runs/plan-2\n")
    assert main(["run", "plan.json", "--steps", "4"]) == 0
    assert "nothing left to do: all 4 steps are done. For more, type --steps 8" in capsys.readouterr().out
    assert main(["run", "plan.json", "--steps", "2"]) == 0
    assert "all 2 steps are done, and 4 were before. For more, type --steps 8" in capsys.readouterr().out
    assert main(["run", "plan.json", "--steps", "5", "--learning-rate", "1e-3"]) == 0
    out = capsys.readouterr().out
    assert "note: changed since the last start: learning_rate was 0.0003, now 0.001" in out
    assert "note: continues after step 4" in out and "step 5/5" in out


@pytest.mark.ranks
def test_an_edited_plan_is_predicted_again_and_the_answer_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path, "tp=1,pp=1,dp=1")
    plan = load(path)
    longer = replace(plan, workload=replace(plan.workload, seq_len=8), model=replace(plan.model, ffn=256))
    path.write_text(dump(longer), encoding="utf-8")
    Path("empty").mkdir()
    assert main(["run", "tiny.json", "--steps", "2", "--out", "empty", "--seed", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    edited, card, saved = said["notes"]
    assert edited == "prediction: the plan was edited after it was made, so it was predicted again here"
    assert card.startswith(
        "model: the run uses tiny-llama as the plan has it, which differs from the card: ffn 256, on the card 384."
    )
    assert said["folder"] == "empty" and saved.startswith("saved step 2") and len(said["steps"]) == 2
    assert said["step_time_s"]["low"] <= said["step_time_s"]["predicted"] <= said["step_time_s"]["high"]
    assert said["ranks"][0]["ranks"] == [0]
    assert said["step_time_s"]["measured"] == json.loads(Path("empty/measured.jsonl").read_text())["step_time_s"]
    kept, before = load(tmp_path / "empty" / "plan.json").prediction, plan.prediction
    assert kept and before and kept.step_time_s < before.step_time_s


@pytest.mark.slow
@pytest.mark.ranks
def test_a_plan_for_512_ranks_is_rehearsed_on_8(capsys: pytest.CaptureFixture[str]) -> None:
    layout = "tp=8,pp=8,dp=8,recompute=full*2/full:9*3/full:8/selective[LlamaMLP,LlamaRMSNorm]/full:5"
    assert main(["plan", "--model", "llama3-70b", "--nodes", "16", "--at", layout]) == 0
    capsys.readouterr()
    said = refused(capsys, "plan.json")
    assert said[0].startswith("engine: nxd runs on Trainium through neuronx-distributed, which is not installed here.")
    assert "autoshard[neuron]" in said[0] and said[0].endswith("type --rehearse 8")
    with pytest.raises(InputError, match=r"512 ranks; one machine runs at most 64.*type --rehearse 8"):
        refuse_too_large(load(Path("plan.json")), 10**15)
    said = refused(capsys, "plan.json", "--rehearse", "1")
    assert said == ["--rehearse: a plan with tp=8 needs at least 2 ranks, not 1. Type --rehearse 2"]
    assert main(["run", "plan.json", "--rehearse", "8", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "llama3-70b (shrunk) on 8 ranks of this machine: tp=2,pp=2,dp=2" in out
    assert "note: not kept: 3 of 5 kinds of recompute: there are only 2 stages" in out
    assert "note: engine: nxd needs Neuron devices, so here the torch engine executes the plan's table" in out
    assert "note: prediction: its seconds are about trn1.32xlarge (shrunk), not about this machine" in out
    assert load(Path("runs/plan/plan.json")).mesh.num_ranks == 8
    assert main(["validate", "runs/plan/measured.jsonl"]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tiny.json", "--resume", "-4"), "--resume: steps count from 0, so there is no -4"),
        ((), "PLAN: missing"),
        (("none.json",), "none.json: there is no such file"),
        (("tiny.json", "--steps", "0"), "--steps: must be at least 1, not 0"),
        (("tiny.json", "--learning-rate", "fast"), "--learning-rate: expected a number like 0.001, 1e-3"),
        (("tiny.json", "--rehearse", "0"), "--rehearse: must be at least 1, not 0"),
        (
            ("tiny.json", "--step", "3"),
            "--step: unknown option. Did you mean --steps? See autoshard",
        ),
        (("tiny.json", "--out", "tiny.json"), "--out tiny.json: is a file. Name a folder"),
        (("future.json",), "future.json: schema: "),
        (("cut.json",), "cut.json: is not JSON: "),
    ],
)
def test_what_cannot_be_meant_is_refused(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_tiny(tmp_path).read_text()
    Path("future.json").write_text(text.replace('"schema": 6', '"schema": 99'), encoding="utf-8")
    Path("cut.json").write_text(text[:500], encoding="utf-8")
    (said,) = refused(capsys, *words)
    assert said.startswith(says)


def test_a_plan_that_may_not_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_tiny(tmp_path)
    plan = load(path)
    path.write_text(dump(replace(plan, stages=plan.stages * 2)), encoding="utf-8")
    assert any("stages" in line for line in refused(capsys, "tiny.json", code=1))
    assert main(["run", "tiny.json", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rejections"]


def test_more_than_this_machine_holds_is_refused() -> None:
    plan = tiny_plan("tp=1,pp=1,dp=2")
    refuse_too_large(plan, available_bytes())
    said = r"the 2 ranks are predicted to hold .* MiB, and this machine has 1.00 KiB left"
    with pytest.raises(InputError, match=said):
        refuse_too_large(plan, 1024)


def test_the_help_does_not_wait_for_torch_and_without_it_one_message_says_what_to_type(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    code = (
        "import sys; from autoshard.cli import main; main(['run', '--help']); assert 'torch' not in sys.modules\n"
        "sys.modules['torch'] = None; sys.exit(main(['run', 'tiny.json']))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--rehearse N" in done.stdout
    (said,) = done.stderr.splitlines()
    assert said.startswith("autoshard: torch: is not installed") and "pip install 'autoshard[torch]'" in said
    assert not (tmp_path / "runs").exists()
