"""The promises of tests/conftest.py, kept in a small project of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import pytest
from hypothesis import settings

@pytest.mark.parametrize("name", ["new", "other"])
def test_text(name, golden):
    golden(f"deep/{name}.txt", "hello")

def test_profile(pytestconfig):
    count = 200 if pytestconfig.getoption("--hypothesis-profile") == "thorough" else 25
    assert (settings().max_examples, settings().derandomize, settings().deadline) == (count, True, None)
"""


def test_golden_files_are_demanded_and_written_on_request_and_profiles_have_their_examples(tmp_path: Path) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    new, other = (tmp_path / "golden" / "deep" / f"{name}.txt" for name in ("new", "other"))
    other.parent.mkdir(parents=True)
    other.write_text("good bye", encoding="utf-8")

    def pytest_in(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=os.environ | {"CI": "true"}, capture_output=True, text=True)

    done = pytest_in()
    assert done.returncode == 1 and "2 failed, 1 passed" in done.stdout and "--update-golden" in done.stdout
    assert not new.exists() and other.read_text(encoding="utf-8") == "good bye"
    done = pytest_in("--update-golden", "--hypothesis-profile", "thorough")
    assert done.returncode == 0, done.stdout
    assert new.read_text(encoding="utf-8") == other.read_text(encoding="utf-8") == "hello"
