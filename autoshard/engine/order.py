"""In which order a sequence is cut over cp: as it is, or so that every rank gets an early and a late part."""

import numpy as np

from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan


def sequence_order(plan: Plan) -> Array:
    """Return the positions of a sequence in the order in which blocks of it lie on the ranks."""
    count, parts = plan.workload.seq_len, 2 * plan.mesh.size("cp")
    if plan.cp_order == "contiguous" or parts == 2:
        return np.arange(count)
    require((count % parts == 0, "cp_order", f"zigzag cuts a sequence into {parts} parts, and {count} does not divide"))
    return zigzag(count, parts // 2)


def zigzag(count: int, num_ranks: int) -> Array:
    """Give every rank one part of the first half and the one that mirrors it of the second.

    >>> zigzag(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    parts = np.arange(count).reshape(2 * num_ranks, -1)
    return np.concatenate([part for rank in range(num_ranks) for part in (parts[rank], parts[-1 - rank])])
