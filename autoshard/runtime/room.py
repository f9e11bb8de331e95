"""Whether this machine should hold all the ranks of a plan."""

import os
from pathlib import Path

from autoshard.errors import require
from autoshard.plan.plan import Plan
from autoshard.units import format_bytes

MOST_RANKS = 64  # more processes than this are no use on one machine, as spec/clusters/local.json says
_SELF = ("runtime",)  # what a platform keeps for itself; here, pages that forks of one process share


def refuse_too_large(plan: Plan, available_bytes: int) -> None:
    """Refuse a plan that is not meant for one machine, or would make this one swap; the prediction says how much."""
    assert plan.prediction, "a plan is predicted before it runs"
    num_ranks, stages = plan.mesh.num_ranks, plan.prediction.stage_memory
    need_bytes = sum(memory.without(_SELF) for memory in stages) * num_ranks // max(1, len(stages))
    need, have = format_bytes(need_bytes), format_bytes(available_bytes)
    small = "To try a small plan of the same shape, type --rehearse 8"
    require(
        (
            num_ranks <= MOST_RANKS,
            "mesh",
            f"{num_ranks} ranks; one machine runs at most {MOST_RANKS}. Start them with torchrun or srun. {small}",
        ),
        (
            num_ranks > MOST_RANKS or need_bytes <= available_bytes,
            "prediction.stage_memory",
            f"the {num_ranks} ranks are predicted to hold {need}, and this machine has {have} left. {small}",
        ),
    )


def available_bytes() -> int:
    """Return the memory that new processes can have without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
