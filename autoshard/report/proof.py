"""The numeric proof of a plan, for a terminal."""

from collections.abc import Mapping

from rich.console import Group
from rich.text import Text

from autoshard.plan.proof import BlockProof, Proof


def proof_report(proof: Proof) -> Group:
    """Say per block what was executed and how far it is from the unsharded program."""
    head = Text(f"proof on virtual ranks, shrunk to {proof.candidate}:")
    lost = [Text(f"  not kept: {feature}", style="yellow") for feature in proof.lost]
    return Group(head, *(_line(block) for block in proof.blocks), *lost)


def _line(block: BlockProof) -> Text:
    verdict = ("  equal  ", "green") if block.holds else ("  DIFFERS", "bold red")
    return Text.assemble(
        verdict,
        f" {block.name}: {block.num_results} results within {block.error:.0e}; {_counted(block.collectives)}",
    )


def _counted(collectives: Mapping[str, int]) -> str:
    """Write counts as people say them.

    >>> _counted({"all_gather": 4, "all_reduce": 1}), _counted({})
    ('4 all_gather, 1 all_reduce', 'no collectives')
    """
    return ", ".join(f"{count} {kind}" for kind, count in collectives.items()) or "no collectives"
