"""The promises of tests/conftest.py, kept in a small project of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

COMPARES = "def test_text(golden):\n    golden('deep/text.txt', 'hello')\n"
COUNTS = """
from hypothesis import settings

def test_profile():
    assert (settings().max_examples, settings().derandomize, settings().deadline) == {!r}
"""


def pytest_in(folder: Path, *arguments: str, ci: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *arguments]
    env = os.environ | {"CI": ci}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    return tmp_path


def test_a_golden_file_is_demanded_written_on_request_and_then_compared(project: Path) -> None:
    (project / "test_it.py").write_text(COMPARES, encoding="utf-8")
    file = project / "golden" / "deep" / "text.txt"

    missing = pytest_in(project)
    assert missing.returncode == 1 and "--update-golden" in missing.stdout and not file.exists()

    assert pytest_in(project, "--update-golden").returncode == 0
    assert file.read_text(encoding="utf-8") == "hello"

    file.write_text("good bye", encoding="utf-8")
    assert pytest_in(project).returncode == 1
    assert file.read_text(encoding="utf-8") == "good bye"


def test_ci_repeats_its_examples_and_the_thorough_profile_tries_more(project: Path) -> None:
    (project / "test_it.py").write_text(COUNTS.format((200, True, None)), encoding="utf-8")
    done = pytest_in(project, "--hypothesis-profile", "thorough")
    assert done.returncode == 0, done.stdout
    (project / "test_it.py").write_text(COUNTS.format((25, True, None)), encoding="utf-8")
    done = pytest_in(project, ci="true")
    assert done.returncode == 0, done.stdout
