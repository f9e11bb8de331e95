"""What every test may rely on: hypothesis profiles, golden files, and the same surroundings wherever it is started."""

import gc
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from autoshard.cli import main
from autoshard.spec import cluster_catalogue

GOLDEN = Path(__file__).parent / "golden"
SLOW_PAGES = (Path(__file__).parent / "guide" / "own_parts.md",)
LONG = {"jobs": 0, "guide": 1}  # the order of folders with tests of a minute: those of jobs wait most of it

# No deadlines: a test never judges time. `make test-all` and `make coverage` ask for the profile `more`.
settings.register_profile(
    "usual",
    max_examples=10,
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("more", parent=settings.get_profile("usual"), max_examples=25)
settings.register_profile("thorough", parent=settings.get_profile("usual"), max_examples=200, derandomize=True)
settings.load_profile("usual")


# What a terminal, a scheduler or a launcher leaves to its children, and a command of autoshard or Python obeys.
OBEYED = (
    "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TERM", "COLORTERM",
    "LANG", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "LC_NUMERIC", "LC_TIME", "LANGUAGE", "BROWSER",
    "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONHASHSEED", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
SCHEDULERS = ("SLURM_", "SBATCH_", "TORCHELASTIC_", "WANDB_")
# A shell lets what it puts into the background ignore the first, nohup the second; children inherit that.
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
UMASK = 0o022
BEGUN_S = pytest.StashKey[float]()  # of a clock


def pytest_configure(config: pytest.Config) -> None:
    """Let ``local`` be a machine of 16 GiB, whatever this one has: 4 GiB for each of its 4 ranks."""
    config.stash[BEGUN_S] = time.monotonic()
    cluster_catalogue.machine_memory_bytes = lambda: 16 * 2**30
    heed_signals()
    forget_surroundings()
    save_time()


def pytest_xdist_auto_num_workers() -> int:
    """Start two workers more than there are processors: tests of jobs wait for a minute, and others for processes."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable + 2


def heed_signals() -> None:
    """Undo that signals are ignored: tests send them to what they start."""
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            usual = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


def forget_surroundings() -> None:
    """Let tests see neither the terminal and the settings of who started them, nor a job in which they run."""
    for name in list(os.environ):
        if name in OBEYED or name.startswith(SCHEDULERS):
            del os.environ[name]
    os.environ["AUTOSHARD_CACHE"] = ""  # what runs teach is not kept, so that a plan does not depend on other tests
    os.environ["TZ"] = "UTC"
    time.tzset()
    os.umask(UMASK)
    for number in range(3):  # closed by who started them: the next file that is opened would be taken for it
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def save_time() -> None:
    """Compile each file once, not in every process; search for garbage seldom; and let torch use one thread.

    Tests fill the cores themselves; threads of torch wait for each other in a loop, and tensors are too small for them.
    """
    sys.dont_write_bytecode = False
    gc.set_threshold(20_000, 20, 20)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is thorough, and what is written where no mark can stand; let the longest tests be first.

    A worker begins with its first tests and gives away its last ones, so that no other waits for them at the end.
    """
    items.sort(key=lambda item: LONG.get(item.path.parent.name, len(LONG)))
    for item in items:
        if item.path in SLOW_PAGES or item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of every later search for garbage."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files of tests/golden")
    parser.addoption(
        "--minutes", type=float, default=math.inf, metavar="N", help="skip tests that would begin after N minutes"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that would begin too late: CI ends what takes longer, and then nothing is known of any test."""
    minutes: float = item.config.option.minutes
    if time.monotonic() - item.config.stash[BEGUN_S] > 60 * minutes:
        pytest.skip(f"--minutes {minutes:g}: they had passed before this test began")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a file: ``golden("plan/tiny.json", text)``; ``--update-golden`` writes the file."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"no tests/golden/{name}: run pytest with --update-golden, then read it"
        assert text == path.read_text(encoding="utf-8"), f"not tests/golden/{name}: see --update-golden"

    return compare


@pytest.fixture
def section_of_any_module(request: pytest.FixtureRequest) -> Callable[[str, Sequence[str]], None]:
    """Compare lines with a section of docs/developers/modules.md between two marks; ``--update-golden`` writes it."""
    page = Path(__file__).parents[1] / "docs" / "developers" / "modules.md"

    def compare(mark: str, lines: Sequence[str]) -> None:
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(f"<!-- {mark} -->")
        _, _, after = rest.partition(f"<!-- /{mark} -->")
        now = "\n".join([f"{before}<!-- {mark} -->", *lines, f"<!-- /{mark} -->{after}"])
        if request.config.getoption("--update-golden"):
            page.write_text(now, encoding="utf-8")
        assert page.read_text(encoding="utf-8") == now, "type pytest --update-golden tests/modules"

    return compare


class Typed:
    """Types lines after ``autoshard``."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, line: str) -> tuple[int, str, str]:
        """Return the exit code of a line, what it printed, and its complaints."""
        self.capsys.readouterr()
        code = main(shlex.split(line))
        printed = self.capsys.readouterr()
        return code, printed.out, printed.err

    def answer(self, line: str) -> str:
        """Return what a line printed that has nothing to complain of."""
        code, out, err = self(line)
        assert (code, err) == (0, ""), f"{line}: {out}{err}"
        return out

    def refusal(self, line: str) -> str:
        """Return the complaints about a line that is wrong input."""
        code, out, err = self(line)
        assert (code, out) == (2, ""), f"{line}: {out}{err}"
        return err


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(capsys)
