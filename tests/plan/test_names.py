"""Names that only a catalogue can judge: Kernels of an engine, and sets of operations that hold any."""

import pytest

from autoshard.plan.recompute import parse_stages
from autoshard.plan.rules.columns import effective_names, kernels_fault, recompute_fault
from autoshard.spec.kernels import kernels_names, load_kernels

NXD = {"nxd", "nxd_core"}


@pytest.mark.parametrize("name", kernels_names())
def test_a_table_belongs_to_the_engine_whose_kernels_it_describes(name: str):
    assert (kernels_fault(name, "nxd") == "") == (name in NXD)
    assert (kernels_fault(name, "torch") == "") == (name not in NXD)


def test_an_engine_is_offered_the_tables_that_it_runs():
    assert kernels_fault("te", "nxd").endswith("Use nxd, nxd_core")
    offered = kernels_fault("nxd_core", "torch").partition("Use ")[2].split(", ")
    assert set(offered) == set(kernels_names()) - NXD


@pytest.mark.parametrize("name", kernels_names())
def test_only_sets_that_hold_operations_have_an_effect(name: str):
    table = load_kernels(name)
    assert all(table.resolve((one,)) for one in effective_names(name))
    idle = set(table.selective) - set(effective_names(name))
    assert idle == ({"CoreAttention"} if name == "nxd" else set())


@pytest.mark.parametrize(
    ("kernels", "text", "says"),
    [
        ("nxd", "selective[CoreAttention]", ""),  # as AWS's recipes say, although flash attention has no such module
        ("nxd", "selective[CoreAttention,LlamaMLP]", ""),
        ("nxd_core", "selective[CoreAttention]", ""),
        ("nxd", "selective[CoreAttentoin]", "CoreAttentoin is not known to nxd. Did you mean CoreAttention"),
        ("te", "full/selective[core_attn]", ""),
    ],
)
def test_a_frameworks_own_names_are_right_even_where_they_compute_nothing_again(kernels: str, text: str, says: str):
    found = recompute_fault(parse_stages(text), kernels)
    assert found.startswith(says) if says else found == ""
