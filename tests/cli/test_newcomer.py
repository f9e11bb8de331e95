"""Lines as people type them who know other programs: each works, or one line says what to type."""

from pathlib import Path

import pytest

from tests.conftest import Typed
from tests.slower import rest_is_slow

IN_AN_EMPTY_FOLDER = {
    "plan 70b": "Did you mean llama3.1-70b or llama3-70b or llama2-70b?",
    "plan Llama3-8B": "Did you mean llama3-8b?",
    "plan": "as in autoshard plan llama3-70b --nodes 16",
    "plan llama3-8b --gpus 64": "--gpus: unknown option. Type --nodes N, whole machines of --cluster",
    "plan llama3-8b -n 4": "-n: unknown option. Type --nodes.",
    "plan llama3-8b --spot": "Type --price, your dollars of a node hour.",
    "plan llama3-8b --yes": "Type --force.",
    "plan llama3-8b --tokens 15T --budget 2M": "$3,708,458 on 8 nodes, the cheapest number that was tried.",
    "run llama3-8b": "is a model, not a plan or a recipe. To plan it, type: autoshard plan llama3-8b. Or",
    "launch tiny-olmo2 --scheduler slurm": "To plan it, type: autoshard plan tiny-olmo2",
    "run tiny-text --epochs 3": "Type --steps N, which take N times --global-batch sequences.",
    "plan someone/Model-7B-v0.1": "Type: hf download someone/Model-7B-v0.1 config.json --local-dir Model-7B-v0.1",
    "plan --model-name llama3-8b": "--model-name: unknown option. Type --model.",
    "plan llama3-8b --zork": "--zork: unknown option. See autoshard plan --help",
    "plan llama3-8b --fix TP=8": "unknown key 'TP'. Did you mean tp?",
    "plan llama3-8b --out new/": "--out new: is a folder. Name a file in it",
    "plan llama3-8b --extend gone.py": "--extend gone.py: there is no such file",
    "--verbose plan llama3-8b": "--verbose: options follow a command. Type: autoshard plan MODEL --verbose",
    "train tiny-text": "train: not a command. Type: autoshard run",
    "show plan.json": "show: not a command. Type: autoshard explain",
    "run": "PLAN: missing. For example: autoshard run tiny-text",
    "compare": "B: missing. For example: autoshard compare plan.json edited.json",
    "calibrate rows.jsonl": "--out: missing. For example: autoshard calibrate rows.jsonl --cluster trn1",
    "explain llama3-70b": "llama3-70b: there is no such file. To make a plan file, type: autoshard plan llama3-70b",
    "verify tiny-text": "To make a plan file, type: autoshard plan tiny-text",
    "verify gone.json": "type: autoshard plan MODEL --nodes N --out gone.json",
    "verify notes.md": "notes.md: there is no such file. To make a plan file, type: autoshard plan MODEL --nodes N",
    "watch runs/first": "there is no such folder. To start a run, type: autoshard run tiny-text",
    "generate runs/first --prompt a": "no such file or folder. To start a run, type: autoshard run tiny-text",
    "convert runs/first/step-10 out": "no such file or folder. To start a run, type: autoshard run tiny-text",
    "sweep --list": "Type the name after the command; autoshard list shows the names.",
    "tokenize gone.txt --tokenizer bytes --out data": "gone.txt: there is no such file or folder",
    "convert meta-llama/Llama-3-8B out": "type: hf download meta-llama/Llama-3-8B --local-dir Llama-3-8B",
}  # fmt: skip
FOREIGN_ENTRIES = {
    "fix: {tp: 8, pp: 2}": "q.yaml: fix: expected a single value. Write tp=8,pp=2",
    "micro_batch_size: 8": "q.yaml: micro_batch_size: unknown key. Write fix: mbs=N",
    "tp: 8": "q.yaml: tp: unknown key. Write fix: tp=N",
    "gpus: 8": "q.yaml: gpus: unknown key. Write nodes: N, whole machines of cluster",
    "batch_size: 8": "q.yaml: batch_size: unknown key. Write global_batch.",
    "epochs: 3": "q.yaml: epochs: unknown key. Write steps: N",
    "model_name: tiny-llama": "q.yaml: model_name: unknown key. Write model.",
}
BESIDE_A_PLAN = {
    "explain plam.json": "plam.json: there is no such file. Did you mean plan.json?",
    "report --out report.pdf": "--out report.pdf: is drawn as HTML. Name a .html file: report.html",
    "watch --html run.png .": "--html run.png: is drawn as HTML. Name a .html file: run.html",
    "watch .": ".: holds a plan and no run. To run it, type: autoshard run plan.json",
    "generate plan.json --prompt a": "plan.json: is a file. Name the folder of a run",
}
TAKES_A_PLAN = ("explain {}", "verify {}", "run {}", "launch {} --scheduler slurm", "compare {} plan.json", "report {}",
                "export {} --to nxdt", "plan --like {} --nodes 1")  # fmt: skip


@pytest.mark.parametrize(
    "line", rest_is_slow(sorted(IN_AN_EMPTY_FOLDER, key=lambda line: "--budget" in line), len(IN_AN_EMPTY_FOLDER) - 1)
)
def test_a_line_that_cannot_work_says_what_to_type(line: str, typed: Typed) -> None:
    code, out, complaint = typed(line)
    assert code in (1, 2) and not out
    assert IN_AN_EMPTY_FOLDER[line] in complaint and len(complaint.splitlines()) <= 2
    assert not list(Path().iterdir())


def test_an_entry_of_a_file_that_cannot_work_says_what_to_write(typed: Typed) -> None:
    for entry, says in FOREIGN_ENTRIES.items():
        Path("q.yaml").write_text(f"model: tiny-llama\ncluster: local\n{entry}\n", encoding="utf-8")
        code, out, complaint = typed("plan --config q.yaml")
        assert code == 2 and not out and says in complaint, complaint
    assert [path.name for path in Path().iterdir()] == ["q.yaml"]


def test_a_line_beside_a_plan_says_what_to_type(typed: Typed) -> None:
    typed("plan tiny-llama --cluster local --fix tp=2")
    for line, says in BESIDE_A_PLAN.items():
        code, _, complaint = typed(line)
        assert code == 2 and says in complaint and len(complaint.splitlines()) == 1, line
    assert [path.name for path in Path().iterdir()] == ["plan.json"]


@pytest.mark.parametrize("line", TAKES_A_PLAN)
def test_a_folder_in_the_place_of_a_plan_is_told_from_one(line: str, typed: Typed) -> None:
    Path("runs").mkdir()
    says = "runs: is a folder. Name a plan file"
    for _ in range(2):
        code, _, complaint = typed(line.format("runs"))
        assert code == 2 and says in complaint and complaint.count(" runs: ") == 1
        Path("runs/plan.json").touch()
        says = "runs: is a folder. It holds the plan runs/plan.json: name that file"


@pytest.mark.slow
def test_the_exit_code_of_why_not_says_whether_a_plan_may_run(typed: Typed) -> None:
    typed("plan tiny-llama --cluster local --fix tp=2")
    assert typed("explain --why-not tp=2")[0] == 0
    code, out, _ = typed("explain --why-not tp=3")
    assert code == 1 and out.strip().startswith("refused")
    assert typed("explain --why-not tp=3 --json")[0] == 1


def test_a_tokenizer_that_is_not_there_is_said_to_be_missing(typed: Typed) -> None:
    Path("text.txt").write_text("hello", encoding="utf-8")
    code, _, complaint = typed("tokenize text.txt --tokenizer tokenizer.json --out data")
    assert code == 2 and "tokenizer.json: there is no such file. Write one with transformers" in complaint
