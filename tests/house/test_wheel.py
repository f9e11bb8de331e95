"""A wheel is complete: installed somewhere else, it plans by card name without the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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


def test_the_installed_wheel_is_imported_and_plans_by_card_name_outside_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    code = "import autoshard; print(autoshard.__file__)"
    found = run(sys.executable, "-P", "-c", code, cwd=tmp_path, path=installed)
    assert Path(found.strip()).is_relative_to(installed)
    program = (sys.executable, "-P", installed / "bin" / "autoshard")
    assert "llama3-70b" in run(*program, "list", "models", cwd=tmp_path, path=installed)
    run(*program, "plan", "--model", "llama3-8b", "--fix", "tp=8,pp=4,mbs=1", cwd=tmp_path, path=installed)
    assert "llama3-8b" in (tmp_path / "plan.json").read_text(encoding="utf-8")
