"""``autoshard run --dry-run``: ranks of a plan one after the other in this process, with shapes only."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autoshard.commands.output import print_json
from autoshard.errors import require

if TYPE_CHECKING:
    from autoshard.plan.plan import Plan


def dry(plan: "Plan", notes: Sequence[str], ranks: Sequence[int], *, json: bool) -> int:
    """Try ranks out, those that differ unless some were named, and put what they counted beside the prediction."""
    from autoshard.report.ran import dry_json, dry_notes, dry_report
    from autoshard.report.terminal import make_console
    from autoshard.runtime.dry import dry_rank, telling_ranks
    from autoshard.runtime.engines import counter

    last = plan.mesh.num_ranks - 1
    message = f"the plan has the ranks 0 to {last}"
    require(*((0 <= rank <= last, "--dry-ranks", f"{message}, not {rank}. Type 0,{last}") for rank in ranks))
    counts, chosen = counter(), tuple(dict.fromkeys(ranks)) or telling_ranks(plan)
    if not json:
        print(f"{plan.model.name}: {plan.candidate}, dry: {len(chosen)} of {last + 1} ranks, shapes without numbers")
    found = [dry_rank(plan, rank, counts) for rank in chosen]
    said = [*notes, *dry_notes(plan, found)]
    if json:
        print_json({"notes": said, **dry_json(plan, found)})
        return 0
    for note in said:
        print(f"note: {note}")
    make_console().print(dry_report(plan, found))
    return 0
