"""Which operations a platform runs as one kernel, what each keeps for backward, and what it recomputes.

The tables are data (``kernel_tables/*.json``), each entry with its source. An operation that no entry names
is a kernel of its own and keeps just what its gradient reads.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from autoshard.errors import InputError, nearest, require
from autoshard.spec import record

_SAVES = re.compile(r"(copy:)?(in\*|in\d+|out\d+)(@(bf16|fp16|fp32))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A run of forward operations executed as one, named by patterns such as ``*_norm``.

    ``saves`` replaces what the gradients would keep: ``in0`` (an input of the run, in order), ``in*`` (all of
    them), ``out0`` (an output of its last operation), each with ``@dtype`` if it is kept in another format,
    which costs memory of its own if it differs from the tensor's. ``copy:in0`` is memory of its own in any
    case.
    """

    ops: tuple[str, ...]
    saves: tuple[str, ...] | None = None
    skips_masked: bool = False
    expands_keys: bool = False  # attention that copies keys and values for every query head before it starts
    backward_flops_ratio: float = 1.0
    source: str

    def __post_init__(self) -> None:
        """Refuse a kernel without operations or source, and entries of ``saves`` that cannot be read."""
        unread = [text for text in self.saves or () if not _SAVES.fullmatch(text)]
        require(
            (
                not unread,
                "saves",
                f"cannot read {', '.join(unread)}; write in0, in*, out0, copy:in0 or in0@fp32",
            ),
            (len(self.ops) > 0, "ops", "a kernel needs at least one operation"),
            (
                self.backward_flops_ratio >= 1,
                "backward_flops_ratio",
                "a kernel cannot do less than its gradient",
            ),
            (bool(self.source), "source", "say where this is known from"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One platform's kernels; the first that names an operation decides.

    ``selective`` gives the framework's own names for sets of operations that it can recompute; ``clones_end``
    says whether a run of recomputed operations stops at the last tensor that backward needs or at the run's
    output; ``keeps_gathered`` whether a gathered input is kept as gathered (no second gather in backward);
    ``hides_sends`` in which pipeline schedules a rank computes while it sends: in the others it does nothing else;
    ``receives_apart`` whether it receives at another time than it sends to the same neighbour, so that both hold it.
    """

    name: str
    kernels: tuple[Kernel, ...]
    selective: Mapping[str, tuple[str, ...]]
    clones_end: Literal["last_saved", "output"]
    keeps_gathered: bool
    hides_sends: tuple[str, ...]
    receives_apart: bool
    runtime_bytes: int  # a rank's memory that the platform's runtime keeps for itself
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        """Refuse negative memory, and a table that does not say where its settings come from."""
        sourced = ("selective", "clones_end", "keeps_gathered", "hides_sends", "receives_apart", "runtime_bytes")
        unsourced = [name for name in sourced if not self.sources.get(name)]
        require(
            (not unsourced, "sources", f"no source for {', '.join(unsourced)}"),
            (self.runtime_bytes >= 0, "runtime_bytes", "must not be negative"),
        )

    def resolve(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Replace framework names by the operations they stand for; other names are operations already."""
        return tuple(dict.fromkeys(op for name in names for op in self.selective.get(name, (name,))))


def kernels_names() -> tuple[str, ...]:
    """Return the names of the tables that come with autoshard."""
    folder = resources.files("autoshard.spec") / "kernel_tables"
    return tuple(sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json")))


@cache
def load_kernels(name: str) -> Kernels:
    """Return a table by name."""
    if name not in kernels_names():
        raise InputError.of("kernels", f"there is no table {name!r}. {nearest(name, kernels_names())}")
    text = (resources.files("autoshard.spec") / "kernel_tables" / f"{name}.json").read_text("utf-8")
    return record.decode(Kernels, json.loads(text), where=f"kernels {name}")
