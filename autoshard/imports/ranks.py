"""How many ranks a file states: by a number, by the sizes of its mesh, by its batches, or in its name."""

import math
import re

from autoshard.imports.imported import ImportedRun
from autoshard.imports.table import Facts
from autoshard.units import counted

AXES = ("tp", "pp", "cp")
_GPUS = re.compile(r"(?<![0-9])(\d{1,6})[ _]?(?:[a-z]{1,2}\d{3} )?gpus?(?![a-z])", re.IGNORECASE)


def degrees_of(facts: Facts) -> int | None:
    """Return the data-parallel size of a mesh that is stated whole: its shards times its replicas.

    >>> degrees_of({"layout.shards": 4, "layout.replicas": 2}), degrees_of({"layout.replicas": 2})
    (8, None)
    """
    shards = facts.get("layout.shards")
    return None if shards is None else int(shards) * int(facts.get("layout.replicas", 1))


def stated_ranks(run: ImportedRun, facts: Facts, per_node: int) -> tuple[int | None, str]:
    """Return how many ranks a file states, and where if that is not a key; ``facts`` has what was typed as well."""
    said = run.facts
    if ranks := said.get("cluster.ranks"):
        return int(ranks), ""
    if (nodes := said.get("cluster.nodes")) is not None:
        return int(nodes) * int(said.get("cluster.per_node", per_node)), ""
    inner = math.prod(int(facts.get(f"layout.{axis}", 1)) for axis in AXES)
    if degrees := degrees_of(said):
        return degrees * inner, f"the degrees of the file make {counted(degrees * inner, 'rank')}"
    stated = [int(said.get(key) or 0) for key in ("work.global_batch", "layout.mbs", "work.accumulation")]
    if min(stated) > 0 and stated[0] % (stated[1] * stated[2]) == 0:
        replicas = stated[0] // (stated[1] * stated[2])
        return replicas * inner, f"the batches of the file make {counted(replicas, 'replica')}"
    match = _GPUS.search(run.hints)
    return (int(match[1]), f"the file's name or first comment says {match[0]}") if match else (None, "")
