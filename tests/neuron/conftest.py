"""Tests with the real NxD: skipped where it cannot be imported, with the reason."""

import importlib
import warnings

import pytest

from tests.neuron import standins


@pytest.fixture(scope="session")
def nxd() -> None:
    """NxD, imported before ranks are forked, because that takes seconds."""
    missing = standins.absent()
    if missing:
        pytest.skip(missing)
    standins.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("autoshard.engine.nxd.engine", "neuronx_distributed.trainer", "neuronx_distributed.pipeline"):
            importlib.import_module(name)
