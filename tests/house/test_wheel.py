"""A wheel is complete: installed somewhere else, it does without the checkout what the README shows."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.house.test_readme import README, shell_blocks
from tests.house.test_without_torch import ABSENT

ROOT = Path(__file__).parents[2]
LONG = ("sweep", "run", "generate")  # commands of the README that take more than two seconds, or need those


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run a command without the checkout on its path; its words are the message when it fails."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, and nothing else, in a folder of its own; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(*pip, "--target", folder, wheel, cwd=folder)
    return folder


def test_the_wheel_holds_the_package_and_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    data = {
        f"autoshard/_data/{folder}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder in ("models", "recipes")
        for file in (ROOT / folder).rglob("*")
        if file.is_file()
    }
    assert data and data <= names
    assert {name.partition("/")[0] for name in names} == {"autoshard", "autoshard-0.1.0.dist-info"}
    assert {"autoshard-0.1.0.dist-info/licenses/LICENSE", "autoshard/py.typed"} <= names


@pytest.mark.slow
def test_the_archive_of_the_source_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(tmp_path, filter="data")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=tmp_path / archive.name[:-7])
    (again,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


@pytest.mark.slow
def test_the_installed_wheel_is_imported_and_plans_by_card_name_outside_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    code = "import autoshard; print(autoshard.__file__)"
    imported = run(sys.executable, "-P", "-c", code, cwd=tmp_path, path=installed)
    assert Path(imported.strip()).is_relative_to(installed)
    program = (sys.executable, "-P", installed / "bin" / "autoshard")
    assert "llama3-70b" in run(*program, "list", "models", cwd=tmp_path, path=installed)
    run(*program, "plan", "--model", "llama3-8b", "--fix", "tp=8,pp=4,mbs=1", cwd=tmp_path, path=installed)
    assert "llama3-8b" in (tmp_path / "plan.json").read_text(encoding="utf-8")


def commands_of_the_readme() -> list[tuple[str, str]]:
    """The commands of autoshard in the shell blocks of the README, in order, each with the comment beside it."""
    lines = (line for block in shell_blocks(README) for line in block.splitlines())
    return [(command.strip(), about) for command, _, about in (line.partition("#") for line in lines)
            if command.startswith("autoshard ")]  # fmt: skip


def environments(installed: Path, folder: Path) -> Mapping[bool, dict[str, str]]:
    """Environments in which the wheel is installed: with torch and other extras, and without them."""
    absent = folder / "absent"
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(ABSENT, encoding="utf-8")
    # a browser that shows nothing; ranks are started here
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTHON"))}
    usual |= {"PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}", "BROWSER": "true"}
    paths = {True: [installed], False: [absent, installed]}
    return {torch: usual | {"PYTHONPATH": os.pathsep.join(map(str, path))} for torch, path in paths.items()}


def type_in(folder: Path, commands: Sequence[tuple[str, str]], env: Mapping[bool, dict[str, str]]) -> None:
    """Type commands in a folder, those without a mark where no extra is installed; each has to end well."""
    for command, about in commands:
        words = ["bash", "-c", command]
        surroundings = env["(torch)" in about or "(wandb)" in about]
        done = subprocess.run(words, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=300,
                              check=False)  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_install_lines_of_the_readme_name_this_clone_and_extras_that_exist() -> None:
    text = "\n".join(shell_blocks(README))
    installs = re.findall(r"^pip install (.*?)\s*(?:#.*)?$", text, flags=re.MULTILINE)
    assert installs == ["'.[torch,wandb]'"], "until there is a release, an index has nothing to install"
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = \[", extras, flags=re.MULTILINE) for extra in ("torch", "wandb"))


@pytest.mark.slow
def test_the_readme_shows_commands_in_an_order_that_works_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    short = [(command, about) for command, about in commands_of_the_readme() if command.split()[1] not in LONG]
    assert len(short) >= 7
    folder = tmp_path / "empty"
    folder.mkdir()
    type_in(folder, short, environments(installed, tmp_path))
    assert {"plan.json", "report.html", "job"} <= {path.name for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.ranks
def test_the_longer_commands_of_the_readme_work_in_an_empty_folder_too(installed: Path, tmp_path: Path) -> None:
    longer = [(command, about) for command, about in commands_of_the_readme() if command.split()[1] in LONG]
    assert [command.split()[1] for command, _ in longer] == list(LONG)
    folder = tmp_path / "empty"
    folder.mkdir()
    type_in(folder, longer, environments(installed, tmp_path))
    assert (folder / "runs" / "tiny-text").is_dir() and (folder / "sweeps" / "llama3-70b-scaling-trn1").is_dir()
