"""Where nothing can be written, a command says so before its work, and leaves nothing behind."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.commands.writing.places import folder_checks, place_checks

ROWS = Path(__file__).parents[2] / "benchmarks" / "data" / "trainium.jsonl"
NOWHERE = Path("/proc/self")  # a folder where nobody makes a file, whoever he is
OPEN_FILE = NOWHERE / "comm"  # which may be written, but not replaced
PLAN = "plan --model tiny-llama --cluster local --fix tp=2,mbs=8"

# The command without its place, the option that names it, and where its work begins.
OF_FILES = {
    "plan": (f"{PLAN} --out {{}}", "--out", "commands.plan.searched"),
    "plan --pareto": (f"{PLAN} --pareto --out {{}}", "--out", "commands.plan.frontier"),
    "explain": ("explain plan.json --trace {}", "--trace", "commands.explain.load"),
    "report": ("report plan.json --out {}", "--out", "commands.report.load"),
    "calibrate": (f"calibrate {ROWS} --cluster trn1 --out {{}}", "--out", "commands.calibrate.samples_in"),
    "watch": ("watch . --once --html {}", "--html", "commands.watch.read_run"),
    "import": ("import recipe.yaml --out {}", "--out", "commands.interchange.import_.imported_run"),
}
OF_FOLDERS = {
    "advise": (f"advise {ROWS} --model llama3-8b --out {{}}", "--out", "commands.advise.timed_rows"),
    "tokenize": ("tokenize text.txt --tokenizer bytes --out {}", "--out", "commands.tokenize.local_source"),
    "sweep": ("sweep tiny --out {}", "--out", "commands.sweep.work_through"),
    "sweep --scheduler": ("sweep lnc-trn2 --scheduler slurm --out {}", "--out", "commands.sweep.array_script"),
    "convert": ("convert text.txt {}", "TARGET", "runtime.convert.converting.convert"),
    "launch": ("launch tiny-text --scheduler slurm --out {}", "--out", "commands.launch.plan_of"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("plan.json", "text.txt", "recipe.yaml"):
        Path(name).write_text("a file\n", encoding="utf-8")
    Path("folder").mkdir()
    return tmp_path


def refused(typed: str, work: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Type a command that must not begin its work, and return its only line."""
    before = sorted(map(str, Path().rglob("*")))
    monkeypatch.setattr(f"autoshard.{work}", lambda *_, **__: pytest.fail("the work has begun"))
    assert main(typed.split()) == 2
    assert sorted(map(str, Path().rglob("*"))) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("folder", "is a folder. Name a file in it"),
        ("-", "is no name here. To print the file in the place of the answer, type /dev/stdout"),
        ("missing/x", "there is no folder missing. Make it first"),
        ("text.txt/x", "there is no folder text.txt. Make it first"),
        pytest.param(f"{NOWHERE}/x", "cannot be written: ", marks=pytest.mark.skipif(not NOWHERE.is_dir(), reason="")),
        pytest.param(
            f"{OPEN_FILE}", "cannot be written: ", marks=pytest.mark.skipif(not OPEN_FILE.exists(), reason="")
        ),
    ],
)
@pytest.mark.parametrize("name", OF_FILES)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    name: str, place: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, option, work = OF_FILES[name]
    line = refused(typed.format(place), work, monkeypatch, capsys)
    assert line.startswith(f"autoshard: {option} {place}: {says}")


KEEPING = {
    **{name: OF_FILES[name] for name in ("explain", "report", "calibrate", "watch")},
    "contribute": ("contribute . --out {}", "--out", "commands.contribute.contribution"),
    "plan --open": (f"{PLAN} --open --out {{}}", "the page of --open", "commands.plan.searched"),
}


@pytest.mark.parametrize("name", KEEPING)
def test_a_file_that_holds_something_else_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows were lost to `calibrate rows.jsonl --out rows.jsonl`, and pages of others to `report --out index.html`."""
    typed, option, work = KEEPING[name]
    Path("rows.html").write_text("measured by me", encoding="utf-8")
    line = refused(typed.format("rows.json" if "open" in name else "rows.html"), work, monkeypatch, capsys)
    assert line == f"autoshard: {option} rows.html: holds something else, and is kept. Name another file"
    assert Path("rows.html").read_text(encoding="utf-8") == "measured by me"


def test_a_file_of_the_same_kind_and_an_empty_one_are_replaced() -> None:
    assert main([*PLAN.split(), "--out", "p.json"]) == 0
    Path("empty.json").touch()
    for line in ("explain p.json --trace t.json", "explain p.json --trace empty.json", "report p.json --out p.html"):
        assert main(line.split()) == main(line.split()) == 0
    assert main(["calibrate", str(ROWS), "--cluster", "trn1", "--out", "fit.json"]) == 0
    assert main(["calibrate", str(ROWS), "--cluster", "trn1", "--out", "fit.json"]) == 0


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("text.txt/x/y", "text.txt is a file. Name another folder"),
        ("-", "is no name here. Name a folder"),
        pytest.param(f"{NOWHERE}/x", "cannot be written: ", marks=pytest.mark.skipif(not NOWHERE.is_dir(), reason="")),
    ],
)
@pytest.mark.parametrize("name", OF_FOLDERS)
def test_a_folder_that_cannot_be_made_is_refused_at_once(
    name: str, place: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, option, work = OF_FOLDERS[name]
    line = refused(typed.format(place), work, monkeypatch, capsys)
    assert line.startswith(f"autoshard: {option} {place}: {says}")


def test_a_page_that_a_sweep_cannot_replace_is_found_before_the_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder", "report.html").mkdir()
    Path("folder", ".lock").touch()
    line = refused("sweep tiny --out folder", "commands.sweep.work_through", monkeypatch, capsys)
    assert line == "autoshard: --out folder/report.html: is a folder. Name a file in it"


def test_the_page_of_open_has_a_place_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.html").mkdir()
    line = refused(f"{PLAN} --open --out p.json", "commands.plan.searched", monkeypatch, capsys)
    assert line == "autoshard: the page of --open p.html: is a folder. Name a file in it"


def test_what_writes_nothing_needs_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny-llama", "--cluster", "local", "--at", "tp=2,dp=2", "--out", "p.json"]) == 0
    Path("report.html").mkdir()
    assert main(["report", "p.json", "--json"]) == 0


@pytest.mark.parametrize(
    ("checks", "refusals"),
    [
        (lambda: place_checks(Path(os.devnull)), 0),
        (lambda: place_checks(Path("text.txt")), 0),
        (lambda: place_checks(Path("new.json")), 0),
        (lambda: place_checks(Path("a" * 300)), 1),
        (lambda: folder_checks(Path("folder")), 0),
        (lambda: folder_checks(Path("a/b/c")), 0),
        (lambda: folder_checks(Path("text.txt")), 1),
    ],
)
def test_a_place_is_tried_without_a_trace(checks: Callable[[], list[tuple[bool, str, str]]], refusals: int) -> None:
    before = sorted(Path().iterdir()), Path("text.txt").read_bytes(), Path("text.txt").stat().st_mtime_ns
    assert sum(not fine for fine, _, _ in checks()) == refusals
    assert before == (sorted(Path().iterdir()), Path("text.txt").read_bytes(), Path("text.txt").stat().st_mtime_ns)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_are_obeyed() -> None:
    Path("folder").chmod(0o555)
    Path("text.txt").chmod(0o444)
    for checks in (place_checks(Path("folder/x")), place_checks(Path("text.txt")), folder_checks(Path("folder/x"))):
        assert next(words for fine, _, words in checks if not fine).startswith("cannot be written: Permission denied")
