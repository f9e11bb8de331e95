"""What every test may rely on: hypothesis profiles and golden files."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from autoshard.spec import cluster_catalogue

GOLDEN = Path(__file__).parent / "golden"

# No deadlines: a test never judges time. `make thorough` asks for the profile `thorough`.
settings.register_profile(
    "usual",
    max_examples=25,
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", parent=settings.get_profile("usual"), max_examples=200, derandomize=True)
settings.load_profile("usual")


def pytest_configure() -> None:
    """Let ``local`` be a machine of 16 GiB, whatever this one has: 4 GiB for each of its 4 ranks."""
    cluster_catalogue.machine_memory_bytes = lambda: 16 * 2**30


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files of tests/golden")


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
    """Compare lines with a section of docs/any-module.md between two marks; ``--update-golden`` writes the section."""
    page = Path(__file__).parents[1] / "docs" / "any-module.md"

    def compare(mark: str, lines: Sequence[str]) -> None:
        text = page.read_text(encoding="utf-8")
        before, _, rest = text.partition(f"<!-- {mark} -->")
        _, _, after = rest.partition(f"<!-- /{mark} -->")
        now = "\n".join([f"{before}<!-- {mark} -->", *lines, f"<!-- /{mark} -->{after}"])
        if request.config.getoption("--update-golden"):
            page.write_text(now, encoding="utf-8")
        assert page.read_text(encoding="utf-8") == now, "type pytest --update-golden tests/trace"

    return compare
