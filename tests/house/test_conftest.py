"""The promise of tests/conftest.py: a golden file that is missing or different is a failure."""

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("name", ["plan/schema-1.json", "plan/none.json"])
def test_golden_files_are_demanded(name: str, golden: Callable[[str, str], None], pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        pytest.skip("files are written now")
    with pytest.raises(AssertionError, match="--update-golden"):
        golden(name, "hello")
