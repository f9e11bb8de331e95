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

from autoshard.errors import in_range, nearest, require
from autoshard.spec import record

_SAVES = re.compile(
    r"(copy:|over:)?(in\*|in\d+|out\d+)(@(bf16|fp16|fp32))?|copy:(in\*|in\d+|out\d+)@fp8|scores(@(fp8|fp32))?"
)
_FOLDER = Path(__file__).parent / "kernel_tables"
_TOKEN_LINKS = {"node", "cluster"}
_HIDDEN = ("tp", "dp", "sums", "unit")
_LIBRARIES = _FOLDER / "libraries"  # that a program may use in place of its own kernels
_WITH = "+"  # between the name of a table and those of libraries
_NAMES = ("name", "program", "engine", "kernels", "sources")  # fields that need no source beside them


@dataclass(frozen=True, slots=True, kw_only=True)
class BothWays:
    """Counts for the forward and the backward run of a kernel, and for its share of pass W where that is stated."""

    forward: int
    backward: int
    weights: int | None = None

    def __post_init__(self) -> None:
        require(*in_range(self, "forward", "backward", "weights"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What a caching allocator holds beside what it has handed out, as a share of that: an estimate, its interval."""

    share: float
    low: float
    high: float

    def __post_init__(self) -> None:
        ordered = self.low <= self.share <= self.high
        require(*in_range(self, "share", "high"), (ordered, "share", "must lie between low and high"))


_TRAITS = ("drops", "biased", "unfused", "capped")  # of operations, for which kernels of their own may stand
ONCE, NEVER = BothWays(forward=1, backward=1), BothWays(forward=0, backward=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A run of forward operations executed as one, named by patterns such as ``*_norm``.

    If ``apart``, each of the operations is a kernel by itself. One operation of the graph may be several kernels:
    ``launches`` counts them (one for pass W, unless stated), ``traffic_ratio`` is their memory traffic relative to
    that of a single kernel, and ``score_bytes`` is the traffic of attention for each (query, key) pair of a head,
    without what it saves of them (0 for fused attention, which writes no scores).

    ``saves`` replaces what the gradients would keep: ``in0`` (an input of the run, in order), ``in*`` (all of them),
    ``out0`` (an output of its last operation), ``scores`` (one number for each pair). With ``@dtype`` it is saved in
    that format, and needs memory of its own if the tensor has another. ``copy:in0`` always needs memory of its own.
    ``over:in0`` overwrites the input; backward passes it on as the gradient of the input.
    ``scratch`` names in the same way what the backward of the kernel allocates beside what it reads and writes.
    An entry that ``drops`` is that of operations that drop numbers at random, and of no others; so is one that is
    ``biased`` that of attention that adds numbers to its scores, one that is ``unfused`` that of two products, and one
    that is ``capped`` that of scores that a tanh squeezes.
    """

    ops: tuple[str, ...]
    drops: bool = False
    biased: bool = False
    unfused: bool = False
    capped: bool = False
    apart: bool = False
    saves: tuple[str, ...] | None = None
    scratch: tuple[str, ...] = ()
    skips_masked: bool = False
    mask_tile: int = 1  # positions that are skipped together or not at all
    expands_keys: bool = False  # attention that copies keys and values for every query head before it starts
    backward_flops_ratio: float = 1.0
    launches: BothWays = ONCE
    chunk: int | None = None  # tokens: launches are for each so many of a sequence
    score_bytes: BothWays = NEVER
    traffic_ratio: float = 1.0
    source: str

    def __post_init__(self) -> None:
        unread = [text for text in (*(self.saves or ()), *self.scratch) if not _SAVES.fullmatch(text)]
        forms = "in0, in*, out0, scores, copy:in0, over:in0 or in0@fp32"
        require(
            (not unread, "saves", f"cannot read {', '.join(unread)}; write {forms}"),
            (len(self.ops) > 0, "ops", "a kernel needs at least one operation"),
            *in_range(self, "backward_flops_ratio", "mask_tile", "traffic_ratio", "chunk", low=1),
            (bool(self.source), "source", "say where this is known from"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One platform's kernels, and how its framework runs a step; the first kernel that names an operation applies.

    ``program`` says in words what the seconds of a plan with these kernels are about, ``engine`` which of autoshard's
    engines that is, if any. ``unmeasured``: no fit knows rows of it on such a device; the counts are derived.

    Recompute: ``selective`` maps the framework's names to sets of operations that it can recompute. Sets of ``stated``
    it recomputes too, where a candidate names them or their operations; no search tries them. ``clones_end`` says where
    a run of recomputed operations ends: at the last tensor that backward needs, or at the output of the run.
    ``offloads`` lists with which of these a search also tries to keep the rest in host memory; empty where the program
    cannot do that.
    ``keeps_gathered``: a gathered input is kept gathered, so that backward does not gather it again.

    Pipelines: ``waits_for_sends`` names the schedules (``*``: all) in which a rank waits while it sends; in all
    others, those of users included, it computes meanwhile. ``receives_apart``: a rank does not receive from a
    neighbour while it sends to it, so that it spends the time of both. ``parts_sends``: of a hidden state that all
    ranks of tp hold whole, each sends its part, and the next stage gathers it over tp. ``keeps_outputs``: a stage keeps
    what it sent until the backward of that micro-batch.

    Memory: ``placeholders`` lists the products whose kernels add their weight gradients to the sums themselves;
    products that share a weight tensor form one entry. For each shape of these tensors, one buffer in the format of
    the weights stays allocated. ``copies_buckets``: data parallelism sends from buffers of its own.
    ``copies_weights``: it has buffers as large as a rank's weights, for all gradients or for all weights that are
    gathered. ``queued_starts``: so many kernels the host starts ahead of the device, and what is scattered over tp is
    not free before the device has sent it; ``queued_over_nodes``: so many where tp leaves the node. ``uncounted``
    names the parts of memory that are not in the peak which the framework reports.

    Experts: ``settles_experts``: the gradient of the experts' inputs is summed over the ranks that share an expert as
    soon as it is computed, in slots, or in tokens where none is dropped. ``pads_experts``: an expert that drops no
    token has a slot for every token, not only for those routed to it. ``sends_tokens``: a token goes once to each node
    that has experts of its choice, and inside once to each rank, and what they give back is added up on the way; else
    each of its rows goes alone. ``token_links`` is which share of the links inside a node and between nodes these sends
    reach, on machines where their kernels were measured.

    Time: ``eager``: a host starts every kernel (else a compiled graph runs as a whole). ``host_computes``: this host
    is also the device, so it starts no kernel while it computes. ``seconds_per_graph`` is the time to compile one
    distinct graph ahead of the run. ``hides`` is the share of some traffic that can overlap with compute: of tp with
    the kernels of the same pass, of dp (ZeRO 0 and 1) with the passes of a micro-batch, of unit (ZeRO-3) with the
    passes of a step. ``sums_whole``: ZeRO-1 sums whole gradients on every rank, after the last backward, where nothing
    hides it. ``adds_gradients``: what several readers of a tensor send back is added by a kernel of its own,
    but for products, which add to it. ``adds_weights``: so they do to sums of weights' gradients. ``cast_bytes``: the
    bytes that are moved for each number of a factor of a product in FP8; 0 where the rows of a program count them.
    ``fp8_experts``: the names of chips whose products of experts' rows are in FP8 with all others, but not those of the
    gradients of experts' weights. If none are named, both are, on every chip.

    ZeRO-3: ``keeps_units``: in a pipeline the weights of a stage are gathered once a step, and whole gradients are
    summed until the last micro-batch. Recompute: ``remakes_inputs``: an output that is recomputed is not kept for the
    backward of other operations either.
    """

    name: str
    program: str
    kernels: tuple[Kernel, ...]
    selective: Mapping[str, tuple[str, ...]]
    clones_end: Literal["last_saved", "output"]
    keeps_gathered: bool
    waits_for_sends: tuple[str, ...]
    receives_apart: bool
    runtime_bytes: int  # memory of a rank that the platform's runtime uses itself
    eager: bool
    sources: Mapping[str, str]
    engine: Literal["torch", "nxd"] | None = None
    placeholders: tuple[tuple[str, ...], ...] = ()
    workspace_bytes: int = 0  # for matrix products
    reserved: Reserved | None = None  # by a caching allocator, beside what is in use
    copies_buckets: bool = False
    copies_weights: bool = False
    sums_whole: bool = False
    queued_starts: int = 0
    queued_over_nodes: int = 0
    parts_sends: bool = False
    keeps_outputs: bool = False
    uncounted: tuple[str, ...] = ()
    seconds_per_graph: float = 0.0
    hides: Mapping[str, float] = field(default_factory=dict[str, float])
    host_computes: bool = False
    adds_gradients: bool = False
    adds_weights: bool = False
    cast_bytes: int = 0
    fp8_experts: tuple[str, ...] = ()
    unmeasured: bool = False
    pads_experts: bool = False
    settles_experts: bool = False
    sends_tokens: bool = False
    token_links: Mapping[str, float] = field(default_factory=dict[str, float])
    keeps_units: bool = False
    remakes_inputs: bool = False
    stated: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    offloads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settings = [setting for setting in fields(self) if setting.name not in _NAMES]
        required = [setting.name for setting in settings if setting.default is MISSING is setting.default_factory]
        stated = [setting.name for setting in settings if setting.name not in required and getattr(self, setting.name)]
        both = f"with sends_tokens, and only then, state {' and '.join(sorted(_TOKEN_LINKS))}"
        unsourced = [name for name in (*required, *stated) if not self.sources.get(name)]
        require(
            (bool(self.program.strip()), "program", "say what runs these kernels"),
            (not unsourced, "sources", f"no source for {', '.join(unsourced)}"),
            *in_range(self, "runtime_bytes", "workspace_bytes", "seconds_per_graph", "cast_bytes"),
            *((name in _HIDDEN, "hides", f"{name!r} is not one of {', '.join(_HIDDEN)}") for name in self.hides),
            *((0 <= share <= 1, f"hides.{axis}", "must lie in [0, 1]") for axis, share in self.hides.items()),
            ({*self.token_links} == (_TOKEN_LINKS if self.sends_tokens else set[str]()), "token_links", both),
            *(
                (0 < share <= 1, f"token_links.{name}", "must lie in (0, 1]")
                for name, share in self.token_links.items()
            ),
        )

    def hides_sends(self, schedule: str) -> bool:
        """Return whether ranks compute while they send in this pipeline schedule."""
        return not any(fnmatchcase(schedule, pattern) for pattern in self.waits_for_sends)

    def expert_passes(self, chip: str) -> str:
        """Return the passes in which experts' products are in FP8 on a chip, where other products are."""
        if not self.fp8_experts:
            return "FIW"
        return "FI" if any(fnmatchcase(chip, pattern) for pattern in self.fp8_experts) else ""

    def entry(self, op: str, **traits: bool) -> Kernel | None:
        """Return the first kernel that names an operation, if one does, among those of operations with its traits."""
        for kernel in self.kernels:
            is_its = all(traits.get(trait) or not getattr(kernel, trait) for trait in _TRAITS)
            if is_its and any(fnmatchcase(op, pattern) for pattern in kernel.ops):
                return kernel
        return None

    @property
    def sets(self) -> Mapping[str, tuple[str, ...]]:
        """All sets of operations that can be recomputed, searched or stated."""
        return {**self.selective, **self.stated}

    def resolve(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Replace the framework's names of sets by their operations; other names are operations already."""
        return tuple(dict.fromkeys(op for name in names for op in self.sets.get(name, (name,))))

    def capacity_bytes(self, usable_bytes: int, headroom: float) -> int:
        """Return how much of a rank's usable memory a plan may fill if it leaves this share of it free.

        What an allocator reserves beside tensors may fill the headroom: its free blocks go back to the device when an
        allocation fails (PyTorch's c10/cuda/CUDACachingAllocator.cpp). It is a byte where the runtime takes more.
        """
        free = int(usable_bytes * (1 - headroom))
        if self.reserved:
            tensors = int((free - self.runtime_bytes) * (1 + self.reserved.share))
            free = min(usable_bytes, tensors + self.runtime_bytes)
        return max(1, free)

    def safe_headroom(self, usable_bytes: int) -> float:
        """Return the share of a rank's memory to leave free so that the most that an allocator may reserve fits too."""
        if not self.reserved:
            return 0.0
        tensors = (usable_bytes - self.runtime_bytes) / (1 + self.reserved.high)
        return max(0.0, 1 - (tensors + self.runtime_bytes) / usable_bytes)


@cache
def kernels_names() -> tuple[str, ...]:
    """Return the names of the tables that come with autoshard."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.json")))


@cache
def library_names() -> tuple[str, ...]:
    """Return the names of the libraries that may stand behind a table, as in ``te+deepep``."""
    return tuple(sorted(path.stem for path in _LIBRARIES.glob("*.json")))


def program_table(name: str) -> str:
    """Return the name of a program's own table, without libraries.

    >>> program_table("te+deepep"), program_table("te")
    ('te', 'te')
    """
    return name.partition(_WITH)[0]


def libraries_of(name: str) -> tuple[str, ...]:
    """Return the libraries behind a table.

    >>> libraries_of("te+deepep"), libraries_of("te")
    (('deepep',), ())
    """
    return tuple(name.split(_WITH)[1:])


def with_libraries(name: str, *libraries: str) -> str:
    """Return the name of a table with further libraries behind it.

    >>> with_libraries("te", "deepep"), with_libraries("te+deepep", "deepep"), with_libraries("torch_engine", "deepep")
    ('te+deepep', 'te+deepep', 'torch_engine')
    """
    longer = _WITH.join([name, *libraries])
    return name if table_fault(longer) else longer


def table_fault(name: str) -> str:
    """Say why there are no such kernels; "" where there are.

    >>> table_fault("te+deep")
    "there is no library 'deep'. Did you mean deepep?"
    """
    table, *libraries = name.split(_WITH)
    if table not in kernels_names():
        return f"there is no table {table!r}. {nearest(table, kernels_names(), 'kernels')}"
    unknown = [library for library in libraries if library not in library_names()]
    if unknown:
        return f"there is no library {unknown[0]!r}. {nearest(unknown[0], library_names())}"
    if len({*libraries}) < len(libraries):
        return "a library stands twice; keep one"
    if libraries and load_kernels(table).engine:
        return f"autoshard's engine runs {table} without {libraries[0]}. Use {table}"
    return ""


@cache
def load_kernels(name: str) -> Kernels:
    """Return a table by name, with the libraries behind it.

    >>> load_kernels("mcore").hides["dp"], load_kernels("te").hides.get("dp")
    (1.0, None)
    >>> load_kernels("te+deepep").program
    'Megatron-LM with TransformerEngine and DeepEP'
    """
    require((not (fault := table_fault(name)), "kernels", fault))
    table, *libraries = name.split(_WITH)
    fields_of = _read(_FOLDER / f"{table}.json")
    for library in libraries:
        added = _read(_LIBRARIES / f"{library}.json")
        program = f"{fields_of['program']} and {added['program']}"
        fields_of = _over(fields_of, {**added, "name": name, "program": program})
    return record.decode(Kernels, fields_of, where=f"kernels {name}")


def _read(path: Path) -> Mapping[str, Any]:
    """Read a table. One with the key ``like`` states only what differs from another."""
    table = json.loads(path.read_text("utf-8"))
    return _over(_read(path.with_name(f"{table.pop('like')}.json")), table) if "like" in table else table


def _over(base: Mapping[str, Any], table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a table over another: what it states replaces that of the base; its own kernels come first."""
    kernels = [*table.get("kernels", ()), *base["kernels"]]
    return {**base, **table, "kernels": kernels, "sources": {**base["sources"], **table.get("sources", {})}}
