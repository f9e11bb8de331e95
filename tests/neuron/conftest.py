"""Tests with the real NxD: skipped where it cannot be imported, with the reason."""

import pytest

from tests.neuron import standins
from tests.neuron.nxd_ranks import import_nxd


@pytest.fixture(scope="session")
def nxd() -> None:
    """NxD, which tests import as its ranks do."""
    missing = standins.absent()
    if missing:
        pytest.skip(missing)
    import_nxd()
