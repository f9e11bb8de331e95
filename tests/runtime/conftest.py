"""What tests of runs share."""

import pytest

from tests.runtime.training_cases import plan_of, trained


@pytest.fixture(scope="session")
def curve(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of an undisturbed run of 12 steps on two ranks."""
    return trained(plan_of("tp=1,pp=1,dp=2"), tmp_path_factory.mktemp("undisturbed"), 12, to="none").curve
