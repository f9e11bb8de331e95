from rich.console import Console

from autoshard.plan.proof import BlockProof, Proof
from autoshard.report.proof import proof_report


def printed(proof):
    console = Console(width=120, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(proof_report(proof))
    return capture.get()


def test_a_proof_names_what_was_executed_and_what_was_left_out():
    good = BlockProof(name="layer", error=2e-16, num_results=11, collectives={"all_gather": 4})
    text = printed(Proof(candidate="tp=2,pp=1,dp=2", lost=("ep=8: no room",), blocks=(good,)))
    assert "tp=2,pp=1,dp=2" in text and "equal" in text and "4 all_gather" in text and "not kept: ep=8" in text


def test_a_difference_is_loud():
    bad = BlockProof(name="head", error=0.5, num_results=4, collectives={})
    proof = Proof(candidate="tp=2,pp=1,dp=1", lost=(), blocks=(bad,))
    assert not proof.holds and "DIFFERS" in printed(proof) and "no collectives" in printed(proof)
