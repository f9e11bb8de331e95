"""The promises of tests/conftest.py: golden files are demanded, tests are alike wherever they are started, and end."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import OBEYED

ROOT = Path(__file__).parents[2]
# A test of what other tests see, and what their children inherit.
SEEN = """
import os, signal, subprocess, sys, time

def test_surroundings():
    code = "import signal; print([signal.getsignal(n) is signal.SIG_IGN for n in (1, 2, 3, 10, 12, 15)])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[False] * 6}\\n"
    assert not {"COLUMNS", "LC_ALL", "RANK", "SLURM_JOB_ID", "WANDB_MODE"} & set(os.environ)
    assert time.strftime("%H", time.localtime(0)) == "00" and os.umask(0o022) == 0o022
    assert [os.fstat(number).st_mode > 0 for number in range(3)]
"""


def test_tests_are_the_same_in_the_background_of_a_script_and_in_a_job(tmp_path: Path) -> None:
    (tmp_path / "test_seen.py").write_text(textwrap.dedent(SEEN), encoding="utf-8")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n", encoding="utf-8")
    more = {name: "4" for name in OBEYED if not name.startswith("PYTHON")}
    more |= {"LC_ALL": "C", "TZ": "Asia/Kathmandu", "SLURM_JOB_ID": "7", "WANDB_MODE": "online"}
    pytest = f"{sys.executable} -m pytest -q -p no:cacheprovider test_seen.py"
    ignored = f'umask 077; trap "" INT HUP TERM QUIT USR1 USR2; {pytest} <&- >said 2>&1'
    env = {**os.environ, **more, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", ignored], cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, (tmp_path / "said").read_text(encoding="utf-8")


@pytest.mark.parametrize(("minutes", "says"), [("0", "1 skipped"), ("5", "1 passed")])
def test_what_begins_too_late_is_skipped_and_counted(minutes: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "test_late.py").write_text("def test_late(): pass\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n", encoding="utf-8")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_late.py", "--minutes", minutes]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert says in done.stdout


@pytest.mark.parametrize("name", ["plan/schema-1.json", "plan/none.json"])
def test_golden_files_are_demanded(name: str, golden: Callable[[str, str], None], pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        pytest.skip("files are written now")
    with pytest.raises(AssertionError, match="--update-golden"):
        golden(name, "hello")
