"""Rows of experts that drop nothing, on a rank: their counts, and collectives that send no other rows.

torch sends parts of unequal size only when the host knows their sizes. So the host reads how many rows go where, once
for a block and micro-batch, and for that waits for the device.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from autoshard.engine.routing import Exchange, Numbers, Routing, row_order
from autoshard.engine.torch.kernels import Kernel
from autoshard.engine.torch.kernels.indexing import is_chosen
from autoshard.engine.torch.world import RankGroup, World
from autoshard.layout.program import Communicate
from autoshard.run.protocol import HOST


def counting(routing: Routing) -> Kernel:
    """Return a function from the choices of a rank's tokens to how many rows each expert gets of them.

    Where no row is moved, it returns where the rows of each expert end.
    """
    experts = routing.place.sizes["experts"]
    if routing.exchanges:
        return lambda chosen: (is_chosen(chosen, experts).sum(0),)
    return lambda chosen: (is_chosen(chosen, experts).sum(0).cumsum(0).to(torch.int32),)


def sharing_counts(world: World, routing: Routing) -> Kernel:
    """Return a function from a rank's counts to those of all cells, and the ends of experts' rows in products."""
    group, experts = world.group(routing.counted), routing.place.sizes["experts"]
    sent = math.prod(routing.place.shape(routing.chosen.layout))

    def run(counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        counts_of_ranks = (group.all_gather(counts) if group else counts).view(-1, experts)
        table = routing.table(_numbers(counts_of_ranks, sent), group.ranks if group else [world.rank])
        ends = [np.cumsum(routing.of_each(table, layout), dtype=np.int32) for layout in routing.by_expert]
        return torch.from_numpy(table), *(torch.from_numpy(column).to(counts.device) for column in ends)

    return run


def _numbers(counts: torch.Tensor, num_rows: int) -> Numbers:
    """Read counts; where tensors have no numbers, all experts have equally many rows."""
    if not counts.is_meta:
        return counts.to(HOST).numpy()
    share, more = divmod(num_rows, counts.shape[1])
    return np.broadcast_to(share + (np.arange(counts.shape[1]) < more), tuple(counts.shape))


def exchange(world: World, routing: Routing, change: Communicate) -> Kernel:
    """Return a function that executes a collective which moves rows; its second argument is the counts."""
    group = world.group(change.collective.atoms)
    assert group, f"{change.entry}: {change.collective} is between no two ranks"
    alone = change.collective.kind == "slice"
    plan = routing.exchange(change, [world.rank] if alone else group.torch_order)
    return _Exchanging(plan, None if alone else group)


class _Exchanging:
    """Sends rows to the members of a group, or to itself where there is none, and puts together what arrives."""

    def __init__(self, plan: Exchange, group: RankGroup | None) -> None:
        """Take the cells that a rank sends and receives, and the order in which received parts lie side by side."""
        self.plan, self.group = plan, group
        self.sent, self.received = np.concatenate(plan.sent), np.concatenate(plan.received)

    def __call__(self, block: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor]:
        """Exchange rows: both the argument and the result are [1, rows, ...]."""
        plan, number, width = self.plan, counts.numpy().reshape(-1), block.shape[2]
        assert block.shape[1] == number[plan.before].sum(), "rows are as many as were counted"
        rows = _ordered(block[0], number, plan.before, self.sent)
        sent, received = ([int(number[cells].sum()) for cells in cells_of] for cells_of in (plan.sent, plan.received))
        whole = all(columns == (0, width) for columns in plan.sent_ranges)
        pieces = () if whole else zip(rows.split(sent), plan.sent_ranges, strict=True)
        parts = [part[:, low:high].reshape(-1) for part, (low, high) in pieces]
        flat = rows.reshape(-1) if whole else torch.cat(parts)
        if self.group:
            flat = self.group.all_to_all(flat, *(
                [count * (high - low) for count, (low, high) in zip(rows_of, ranges, strict=True)]
                for rows_of, ranges in ((received, plan.received_ranges), (sent, plan.sent_ranges))
            ))  # fmt: skip
        return (self._joined(flat, received, number).unsqueeze(0),)

    def _joined(self, flat: torch.Tensor, received: Sequence[int], number: Numbers) -> torch.Tensor:
        plan = self.plan
        widths = [high - low for low, high in plan.received_ranges]
        if plan.joined == "rows":
            return _ordered(flat.view(-1, widths[0]), number, self.received, plan.after)
        sizes = [count * width for count, width in zip(received, widths, strict=True)]
        parts = [part.view(-1, width) for part, width in zip(flat.split(sizes), widths, strict=True)]
        if plan.joined == "sum":
            return torch.stack(parts).sum(0)
        lows = [low for low, _ in plan.received_ranges]
        return torch.cat([parts[member] for member in np.argsort(lows)], 1)


def _ordered(rows: torch.Tensor, number: Numbers, lying: Numbers, cells: Numbers) -> torch.Tensor:
    """Bring rows from the order in which cells lie to that of ``cells``, which may name a cell several times."""
    moves = row_order(number, lying, cells)
    if moves is None:
        return rows
    distance, sizes = (torch.from_numpy(column).to(rows.device) for column in moves)
    count = int(moves[1].sum())
    return rows[torch.repeat_interleave(distance, sizes, output_size=count) + torch.arange(count, device=rows.device)]
