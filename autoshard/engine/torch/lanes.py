"""Ways between two ranks on which messages arrive in order: device libraries know no tags, and wait for the receiver.

With one way only, two ranks that hand each other something at once would wait forever, and what one takes later would
arrive first. So what goes forward and back, to higher ranks and to lower ones, has ways of its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import product

import torch
import torch.distributed as dist

from autoshard.engine.base import HOST
from autoshard.engine.torch.formats import NOWHERE
from autoshard.errors import InputError
from autoshard.schedule.schedule import Schedule

Lane = tuple[bool, bool]  # back or forward, to a higher rank or a lower one
Lanes = Mapping[Lane, dist.ProcessGroup]


def message_tag(number: int, *, back: bool) -> int:
    """Number a message."""
    return 2 * number + back


def goes_back(tag: int) -> bool:
    """Say whether a message goes back.

    >>> goes_back(message_tag(3, back=True)), goes_back(message_tag(3, back=False))
    (True, False)
    """
    return tag % 2 == 1


def lane_backend(device: torch.device) -> str | None:
    """Return what messages between devices go through; None where the receiver picks them by their tags."""
    return None if device.type in (HOST, NOWHERE.type) else dist.get_default_backend_for_device(device)


def lanes_of(pipelines: Iterable[tuple[int, ...]], backend: str | None) -> Lanes:
    """Make the ways between the ranks of this process' pipeline; every rank calls this with all pipelines."""
    found: dict[Lane, dist.ProcessGroup] = {}
    for ranks, back, up in product(pipelines, (False, True), (False, True)) if backend else ():
        group: object = dist.new_group(sorted(ranks), backend=backend) if len(ranks) > 1 else None
        if isinstance(group, dist.ProcessGroup) and dist.get_rank() in ranks:
            found[back, up] = group
    return found


def refuse_crossing(schedule: Schedule) -> None:
    """Refuse an order in which a rank takes messages of a lane otherwise than they were sent."""
    sent: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    taken: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    for actions in schedule.action_lists():
        for action in actions:
            if action.kind == "W":  # which hands on nothing and takes nothing
                continue
            back = action.kind != "F"
            before, after = (action.stage + 1, action.stage - 1) if back else (action.stage - 1, action.stage + 1)
            for messages, start, stop in ((taken, before, action.stage), (sent, action.stage, after)):
                if 0 <= start < schedule.num_stages and 0 <= stop < schedule.num_stages:
                    ends = schedule.place_of(start)[0], schedule.place_of(stop)[0]
                    messages[*ends, back].append((stop, action.micro_batch))
    for (one, other, back), order in sent.items():
        if one != other and order != taken[one, other, back]:
            message = f"pipeline rank {other} takes what rank {one} sends in another order, which devices cannot"
            raise InputError.of("schedule", f"{message}. Order the actions of both alike")
