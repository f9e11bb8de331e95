"""Running a plan for Trainium: refused in words without NxD, and what its ranks need."""

import pytest

from autoshard.errors import InputError
from autoshard.runtime import neuron
from autoshard.runtime.launch import GivenRank
from tests.plan.nxd.test_match import planned

GIVEN = GivenRank(by="torchrun", rank=0, num_ranks=512, meeting="env://")


def test_without_nxd_the_message_says_what_to_install_and_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("llama3-70b", "trn1.32xlarge", "tp=32,pp=8,dp=2")
    monkeypatch.setattr(neuron, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install .*autoshard\[neuron\].*type --rehearse 8"):
        neuron.refuse_without_neuron(plan, GIVEN, "plan.json")
    monkeypatch.setattr(neuron, "find_spec", lambda _: object())
    started = "torchrun --nnodes 16 --nproc-per-node 32 -m autoshard.cli run plan.json"
    with pytest.raises(InputError, match=started):
        neuron.refuse_without_neuron(plan, None, "plan.json")
    neuron.refuse_without_neuron(plan, GIVEN, "plan.json")
