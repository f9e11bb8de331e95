"""Ranks that were tried out without the others, beside what was predicted of them."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group

from autoshard.engine.ran import DryRank
from autoshard.plan.plan import Plan
from autoshard.report.ran import bytes_table, memory_beside, plain, ranks_text, sent_beside

_OWN = "torch_engine"  # the table of what the torch engine keeps, which is what a dry run counts


def dry_report(plan: Plan, ranks: Sequence[DryRank]) -> Group:
    """Return the same tables of bytes as a run's."""
    memory = [(str(one.rank), memory_beside(plan, one.rank, one.measured)) for one in ranks]
    sent = [(str(one.rank), sent_beside(plan, one.measured)) for one in ranks]
    tables = (
        bytes_table("Memory of a rank", memory, "counted"),
        bytes_table("Sent by a rank in a step", sent, "counted"),
    )
    return Group(*(part for table in tables for part in ("", table)))


def dry_notes(plan: Plan, ranks: Sequence[DryRank]) -> list[str]:
    """Say for whom ranks stand, how much of the step was run, and of whom a prediction is."""
    notes = [f"rank {one.rank} stands for {len(one.alike)} ranks: {ranks_text(one.alike)}" for one in ranks]
    known = {rank for one in ranks for rank in one.alike}
    if missing := [rank for rank in range(plan.mesh.num_ranks) if rank not in known]:
        notes.append(f"not tried: ranks {ranks_text(missing)}. Leave --dry-ranks out for one of every kind")
    whole = plan.schedule.num_micro_batches
    if fewest := sorted({one.num_run for one in ranks if one.num_run < whole}):
        run = " or ".join(map(str, fewest))
        notes.append(
            f"run: {run} of {whole} micro-batches, which keep as much for backward as all do. "
            "What the others send was added: as much as each of these"
        )
    if plan.mesh.size("pp") > 1:
        notes.append(
            "sent: the prediction is of whoever sends most: over pp a stage between two others, "
            "over tp and dp mostly one with the embedding or the head"
        )
    if plan.kernels != _OWN:
        notes.append(
            f"saved: the prediction is of the kernels {plan.kernels}, which keep what they need for backward; "
            "counted is what the torch engine's own keep"
        )
    return notes


def dry_json(plan: Plan, ranks: Sequence[DryRank]) -> dict[str, Any]:
    """Return the same as JSON."""
    return {
        "candidate": str(plan.candidate),
        "ranks": [
            {
                "rank": one.rank,
                "stands_for": list(one.alike),
                "micro_batches_run": one.num_run,
                "memory_bytes": plain(memory_beside(plan, one.rank, one.measured)),
                "sent_bytes": plain(sent_beside(plan, one.measured)),
            }
            for one in ranks
        ],
    }
