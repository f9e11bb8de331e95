"""Which operations a platform runs as one kernel, what each keeps for backward, and what it recomputes.

The tables are data (``kernel_tables/*.json``), each entry with its source. An operation that no entry names
is a kernel of its own and keeps just what its gradient reads.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal

from autoshard.errors import InputError, in_range, nearest, require
from autoshard.spec import record

_SAVES = re.compile(r"((copy:|over:)?(in\*|in\d+|out\d+)(@(bf16|fp16|fp32))?)|scores(@(fp8|fp32))?")
_FOLDER = Path(__file__).parent / "kernel_tables"
_HIDDEN = ("tp", "dp", "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class BothWays:
    """A count for the forward and one for the backward run of a kernel, and for what waits for pass W, if stated."""

    forward: int
    backward: int
    weights: int | None = None

    def __post_init__(self) -> None:
        require(*in_range(self, "forward", "backward", "weights"))


ONCE, NEVER = BothWays(forward=1, backward=1), BothWays(forward=0, backward=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A run of forward operations executed as one, named by patterns such as ``*_norm``.

    Of operations that are ``apart`` each is a kernel by itself. What the graph has as one operation may be several
    kernels one after the other: ``launches`` counts them (one for pass W, unless it says how many),
    ``traffic_ratio`` says how often more they move what a single kernel would, and ``score_bytes`` what attention moves
    of every (query, key) pair of a head, beside what it keeps of them (0 for fused attention, which writes no scores).

    ``saves`` replaces what the gradients would keep: ``in0`` (an input of the run, in order), ``in*`` (all of
    them), ``out0`` (an output of its last operation), ``scores`` (one number for each pair), each with ``@dtype`` if
    it is kept in another format, which costs memory of its own if it differs from the tensor's. ``copy:in0`` is
    memory of its own in any case; ``over:in0`` overwrites the input, and backward hands it on as the input's gradient.
    """

    ops: tuple[str, ...]
    apart: bool = False
    saves: tuple[str, ...] | None = None
    skips_masked: bool = False
    mask_tile: int = 1  # positions that are skipped together or not at all
    expands_keys: bool = False  # attention that copies keys and values for every query head before it starts
    backward_flops_ratio: float = 1.0
    launches: BothWays = ONCE
    score_bytes: BothWays = NEVER
    traffic_ratio: float = 1.0
    source: str

    def __post_init__(self) -> None:
        unread = [text for text in self.saves or () if not _SAVES.fullmatch(text)]
        forms = "in0, in*, out0, scores, copy:in0, over:in0 or in0@fp32"
        require(
            (not unread, "saves", f"cannot read {', '.join(unread)}; write {forms}"),
            (len(self.ops) > 0, "ops", "a kernel needs at least one operation"),
            *in_range(self, "backward_flops_ratio", "mask_tile", "traffic_ratio", low=1),
            (bool(self.source), "source", "say where this is known from"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One platform's kernels; the first that names an operation decides.

    ``selective`` gives the framework's own names for sets of operations that it can recompute; ``clones_end``
    says whether a run of recomputed operations stops at the last tensor that backward needs or at the run's
    output; ``keeps_gathered`` whether a gathered input is kept as gathered (no second gather in backward);
    ``waits_for_sends`` names the pipeline schedules (``*``: all) in which a rank that sends does nothing else: in all
    others, your own among them, it computes meanwhile; ``receives_apart`` whether it receives at another time than it
    sends to the same neighbour, so that both hold it.

    ``placeholders`` lists the products that add their weight gradients to the sums themselves, those together whose
    weights are one tensor; of each such tensor's shape, a buffer in the weights' format stays for the whole run.
    ``copies_buckets`` says whether data parallelism sends from buffers of its own; ``keeps_outputs`` whether a stage
    keeps what it handed on until the backward of that micro-batch; ``uncounted`` which parts of memory the peak that
    the framework reports leaves out; ``seconds_per_graph`` what a compiler takes for each distinct graph, 0 where
    nothing is compiled ahead.

    ``settles_experts`` says whether the gradient of what experts read is summed over the ranks that share an expert as
    soon as it is there: that of the slots; or, where no token is dropped, that of the tokens.

    ``eager`` says whether a host starts every kernel, or a compiled graph runs as a whole; ``host_computes`` whether
    that host is the device, so that it starts nothing while it computes; ``pads_experts`` whether every expert that
    drops nothing has a slot for every token, rather than for those alone that chose it; ``hides`` which share of some
    traffic may go on behind compute: of tp behind the kernels of the same pass, of dp (ZeRO 0 and 1) behind the
    passes of a micro-batch, of unit (ZeRO-3) behind those of a step.
    """

    name: str
    kernels: tuple[Kernel, ...]
    selective: Mapping[str, tuple[str, ...]]
    clones_end: Literal["last_saved", "output"]
    keeps_gathered: bool
    waits_for_sends: tuple[str, ...]
    receives_apart: bool
    runtime_bytes: int  # a rank's memory that the platform's runtime keeps for itself
    eager: bool
    sources: Mapping[str, str]
    placeholders: tuple[tuple[str, ...], ...] = ()
    workspace_bytes: int = 0  # that matrix products may use
    copies_buckets: bool = False
    keeps_outputs: bool = False
    uncounted: tuple[str, ...] = ()
    seconds_per_graph: float = 0.0
    hides: Mapping[str, float] = field(default_factory=dict[str, float])
    host_computes: bool = False
    pads_experts: bool = False
    settles_experts: bool = False

    def __post_init__(self) -> None:
        settings = [each for each in fields(self) if each.name not in ("name", "kernels", "sources")]
        required = [each.name for each in settings if each.default is MISSING is each.default_factory]
        stated = [each.name for each in settings if each.name not in required and getattr(self, each.name)]
        unsourced = [name for name in (*required, *stated) if not self.sources.get(name)]
        require(
            (not unsourced, "sources", f"no source for {', '.join(unsourced)}"),
            *in_range(self, "runtime_bytes", "workspace_bytes", "seconds_per_graph"),
            *((name in _HIDDEN, "hides", f"{name!r} is not one of {', '.join(_HIDDEN)}") for name in self.hides),
            *((0 <= share <= 1, f"hides.{axis}", "must lie in [0, 1]") for axis, share in self.hides.items()),
        )

    def hides_sends(self, schedule: str) -> bool:
        """Return whether ranks compute while they send in a pipeline schedule."""
        return not any(fnmatchcase(schedule, pattern) for pattern in self.waits_for_sends)

    def resolve(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Replace framework names by the operations they stand for; other names are operations already."""
        return tuple(dict.fromkeys(op for name in names for op in self.selective.get(name, (name,))))


@cache
def kernels_names() -> tuple[str, ...]:
    """Return the names of the tables that come with autoshard."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@cache
def load_kernels(name: str) -> Kernels:
    """Return a table by name.

    >>> load_kernels("mcore").hides["dp"], load_kernels("te").hides.get("dp")
    (1.0, None)
    """
    if name not in kernels_names():
        raise InputError.of("kernels", f"there is no table {name!r}. {nearest(name, kernels_names())}")
    return record.decode(Kernels, _read(name), where=f"kernels {name}")


def _read(name: str) -> Mapping[str, Any]:
    """Read a table; one that is ``like`` another states what differs, and its kernels come before the other's."""
    own = json.loads((_FOLDER / f"{name}.json").read_text("utf-8"))
    if "like" not in own:
        return own
    base = _read(own.pop("like"))
    kernels = [*own.get("kernels", ()), *base["kernels"]]
    return {**base, **own, "kernels": kernels, "sources": {**base["sources"], **own.get("sources", {})}}
