"""What a block takes and holds on one rank, read off its sharded graph, under a question and one layout's numbers.

All numbers may be columns, with an entry for each of many candidates.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.calibration import Calibration
from autoshard.cost.collective import Number, Ring, Route, mesh_ring
from autoshard.cost.compute import KernelWork, Rates, kernel_time, kernel_work, rank_rates, waiting_time
from autoshard.cost.dispatch import TokenSends
from autoshard.cost.kernel_run import KernelRun, RankSizes, SizesOf, bytes_in, rank_sizes, saved_bytes, working_bytes
from autoshard.cost.sharded import Blocks, LoweredBlock, atom_groups
from autoshard.cost.terms import CostTerm
from autoshard.graph.kinds.experts import Dispatch, DispatchGradient
from autoshard.layout.layout import Collective, DimSizes, local_sizes
from autoshard.layout.sharding import Message
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import ATOMS, StepGraph
from autoshard.plan.recompute import Recompute
from autoshard.spec.cluster import Cluster
from autoshard.spec.kernels import Kernels, load_kernels
from autoshard.spec.mesh import Mesh, axis_of_atoms, state_groups
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import DTYPE_BYTES, Workload

Rows = NDArray[Any] | slice
PASSES = ("F", "I", "W")
TP = ("kv", "rep")
_TO_EXPERTS = Dispatch | DispatchGradient
IN_PIECES = ("all_gather", "reduce_scatter")  # one for each rank, of which a product can wait for the first alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is priced: which model on which cluster for which work, with which kernels, constants and further terms."""

    model: ModelSpec
    cluster: Cluster
    workload: Workload
    kernels: str
    calibration: Calibration
    terms: tuple[CostTerm, ...] = ()  # a plan states its own in its provenance

    @property
    def step(self) -> StepGraph:
        """What the graph is made of."""
        return StepGraph(model=self.model, workload=self.workload, kernels=self.kernels)

    def sizes(self, num_sequences: Any) -> Mapping[str, Number]:
        """Return the size of every dim over all of dp; of a mixture that drops nothing, with how busy experts are."""
        sizes, workload = self.step.sizes(num_sequences), self.workload
        even = workload.expert_capacity is not None or self.step.platform.pads_experts
        return sizes if even or not self.model.num_experts else DimSizes(sizes, workload.expert_imbalance)

    @property
    def rates(self) -> Rates:
        """What a rank reaches in the workload's number format."""
        return rank_rates(self.cluster, self.workload.precision, self.calibration, load_kernels(self.kernels))

    def ring(self, mesh: Mesh, atoms: tuple[str, ...]) -> Ring:
        """Return the group of ranks along some atoms of a mesh, as this question's kernels send in it."""
        tokens = TokenSends.of(self.model, self.step.platform)
        return mesh_ring(self.cluster, mesh, atoms, self.calibration, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Sizes of the dims before sharding, sizes of the atoms, and the order of cp's sequences; or columns of them."""

    sizes: Mapping[str, Number]
    atoms: Mapping[str, Number]
    cp_order: str | NDArray[np.str_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(BlockSizes):
    """One layout's numbers: its blocks, their sizes, its rings; or columns of them."""

    blocks: Blocks
    rings: Mapping[tuple[str, ...], Ring]  # of every group of ranks that something is sent in
    zero: Literal[0, 1, 3]
    copies: Number = 1  # of the states that ZeRO divides
    parts: Number = 1  # of a rank's piece of the weights, which ranks that hold the same piece update
    # Where there are several copies or parts: the groups of ``state_groups``.
    state_rings: Mapping[tuple[str, ...], Ring] = field(default_factory=dict[tuple[str, ...], Ring])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PerCandidate:
    """A dataclass of arrays whose last axis is that of candidates."""

    def only(self, rows: Rows) -> Self:
        """Return some of the candidates, or one several times."""
        return only(self, rows)


_COLUMNS = (PerCandidate, Setting, DimSizes, Ring, Route)
_PLAIN = frozenset({float, int, bool, str, type(None)})


def only(value: Any, rows: Rows) -> Any:
    """Return some candidates of every array inside a value made of dataclasses, dicts and tuples."""
    return value if type(rows) is slice and rows == slice(None) else _selected(value, rows)


def _selected(value: Any, rows: Rows) -> Any:
    kind = cast(type[Any], type(value))  # compared, as that is faster than isinstance
    if kind is np.ndarray:
        return value[..., rows]
    names = () if kind in _PLAIN else _names(kind)
    if names:
        return kind(**_each_selected({name: getattr(value, name) for name in names}, rows))
    if kind is tuple:
        return tuple([_selected(item, rows) for item in value])
    return _each_selected(value, rows) if kind is dict else value


def _each_selected(items: dict[Any, Any], rows: Rows) -> dict[Any, Any]:
    """Return some candidates of every value; most values are arrays."""
    return {key: item[..., rows] if type(item) is np.ndarray else _selected(item, rows) for key, item in items.items()}


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    """Return the fields of a dataclass whose arrays have candidates; none for all else."""
    return tuple(column.name for column in fields(kind)) if issubclass(kind, _COLUMNS) else ()


def setting_of(question: Question, candidate: Candidate, blocks: Blocks) -> Setting:
    """Return the numbers of a single candidate whose blocks are these."""
    mesh = mesh_of(candidate, question.model, question.cluster)
    groups, copies = atom_groups(blocks.every()), mesh.num_copies(candidate.zero_group)
    parts = mesh.num_parts(candidate.zero_group, candidate.weight_group)
    shared = state_groups(groups, parted=parts > 1) if copies * parts > 1 else ()
    groups |= stage_groups(load_kernels(question.kernels))
    return Setting(
        blocks=blocks,
        sizes=question.sizes(candidate.mbs * candidate.dp),
        atoms={atom: mesh.size(atom) for atom in ATOMS},
        rings=rings_on(question, mesh, groups),
        zero=candidate.zero,
        copies=copies,
        parts=parts,
        state_rings=rings_on(question, mesh.divided(copies, parts), shared),
        cp_order=candidate.cp_order,
    )


def rings_on(question: Question, mesh: Mesh, groups: Iterable[tuple[str, ...]]) -> Mapping[tuple[str, ...], Ring]:
    """Return the rings of some groups of ranks, by their atoms."""
    return {atoms: question.ring(mesh, atoms) for atoms in groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """What a block holds on one rank, for one micro-batch, and its weights there."""

    saved_bytes: Number
    waiting_bytes: Number  # what a split backward keeps from I to W instead of what is saved
    remade_bytes: Number  # what recompute brings back while this block is in backward
    working_bytes: Number  # at most at any time of a pass, beside states and kept activations
    placeholder_bytes: Number  # that stay once for all such blocks of a rank
    host_bytes: Number = 0  # kept in host memory instead of what is saved
    weights: Mapping[tuple[str, ...], Number]  # atoms that the gradient's sum is pending over -> weights on the rank
    tied_weights: Mapping[tuple[str, ...], Number]  # likewise, those that share their values with another block's


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What one execution of a block does, sends and holds on one rank, whatever the rates and links."""

    kernels: tuple[tuple[KernelRun, KernelWork], ...]
    messages: tuple[tuple[Message, Number], ...]  # with the bytes of a rank's buffer where it is largest
    hides_tp: float
    memory: BlockMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One execution of a block on one rank: seconds by pass and part, bytes sent by axis, memory."""

    seconds: Mapping[str, Mapping[str, Number]]  # pass -> part (compute, waiting, tp, cp, ep) -> seconds
    sent_bytes: Mapping[str, Number]
    memory: BlockMemory
    hidden_s: Number = 0.0  # of what is sent, behind kernels: not in the seconds of tp
    started_s: Number = 0.0  # what hosts take to start all of it; 0 where a graph runs as a whole
    starts: Number = 0.0  # how many kernels and messages that is
    scattered_bytes: Number = 0.0  # of sums over tp that are scattered: whole tensors, each free once it is sent

    def part_s(self, part: str) -> Number:
        """Return the seconds of one part over all passes."""
        return sum(self.seconds[name].get(part, 0.0) for name in PASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What is the same under every recompute of a block with the same numbers."""

    works: dict[tuple[object, ...], KernelWork] = field(default_factory=dict[tuple[object, ...], KernelWork])
    seconds: dict[KernelWork, Number] = field(default_factory=dict[KernelWork, Number])
    kept_bytes: dict[str, Number] = field(default_factory=dict[str, Number])  # by storage, where all is kept
    by_cuts: dict[object, RankSizes] = field(default_factory=dict[object, RankSizes])


def work_of(
    question: Question, setting: Setting, kind: str, drop: Recompute, counted: Counted | None = None
) -> BlockWork:
    """Count what one block of a layout does."""
    whole = setting.blocks.block(kind, Recompute())
    return block_work(setting.blocks.block(kind, drop), whole, setting, question.cluster.chip.matrix_tile, counted)


def block_work(
    sharded: LoweredBlock, whole: LoweredBlock, sizes: BlockSizes, matrix_tile: int, counted: Counted | None = None
) -> BlockWork:
    """Count what a block does, sends and holds; ``whole`` is it without recompute."""
    block, sharding, atoms = sharded.block, sharded.sharding, sizes.atoms
    sizes_of = rank_sizes(sizes.sizes, atoms, counted.by_cuts if counted else None)
    op_sizes = {name: sizes_of(cuts) for name, cuts in sharding.op_cuts.items()}
    saved = sum(saved_bytes(block, sharding, sizes_of, atoms).values())
    kept_bytes = counted.kept_bytes if counted else dict[str, Number]()
    if not kept_bytes:
        kept_bytes |= saved_bytes(whole.block, whole.sharding, sizes_of, atoms)
    weights: dict[bool, dict[tuple[str, ...], Number]] = {True: defaultdict(int), False: defaultdict(int)}
    for tensor in block.parameters:
        counts, pending = weights[tensor.name in sharded.tied], sharding.parameter_pending[tensor.name]
        counts[pending] = counts[pending] + tensor.num_elements(sizes_of(sharding.parameter_cuts[tensor.name]))
    # Each of the shape of one tensor that holds some weights; experts have one each, all alike.
    placeholders: Number = 0
    for tensor in (block.tensors[name] for names in sharded.placeholders for name in names):
        local = {**sizes_of(sharding.parameter_cuts[tensor.name]), "experts": 1}
        placeholders = placeholders + tensor.num_elements(local) * DTYPE_BYTES[tensor.dtype]
    memory = BlockMemory(
        saved_bytes=saved,
        waiting_bytes=sum(
            bytes_in(block.tensors[name], layouts, sizes_of, atoms) for name, layouts in sharding.waiting_cuts.items()
        ),
        remade_bytes=sum(kept_bytes.values()) - saved,
        working_bytes=working_bytes(sharded.moments, kept_bytes, op_sizes, sizes_of),
        placeholder_bytes=placeholders,
        weights=weights[False],
        tied_weights=weights[True],
    )
    kernels = [*works_of(sharded, sharded.runs, sizes, sizes_of, matrix_tile, counted)]
    for run, values in sharded.sums:
        moved = sum(sizes_of(value.layout.cuts).num_bytes(block.tensors[value.tensor]) for value in values)
        kernels.append((run, KernelWork(moved_bytes=moved, launches=run.launches)))
    return BlockWork(
        kernels=tuple(kernels),
        messages=tuple(
            (message, sizes_of(message.cuts).num_bytes(block.tensors[message.tensor])) for message in sharding.messages
        ),
        hides_tp=sharded.hides_tp,
        memory=memory,
    )


def works_of(
    sharded: LoweredBlock,
    runs: Iterable[KernelRun],
    sizes: BlockSizes,
    sizes_of: SizesOf,
    matrix_tile: int,
    counted: Counted | None = None,
) -> Iterator[tuple[KernelRun, KernelWork]]:
    """Count what runs of kernels of a block do, unless they are ``counted`` already."""
    op_cuts, works = sharded.sharding.op_cuts, (counted or Counted()).works
    op_sizes = {name: sizes_of(cuts) for name, cuts in op_cuts.items()}
    # Zig-zag cuts sequences so that all ranks have the same, as heads do; stretches in a row do not.
    seq_cut = op_cuts.get("attend", {}).get("seq", ())
    stretches = np.where(sizes.cp_order == "contiguous", math.prod(sizes.atoms[atom] for atom in seq_cut), 1)
    seq_len = sizes.sizes.get("seq", 1)  # only attention asks
    for run in runs:
        moved = tuple((op, tensor.name) for op, tensor in run.touched)
        key = (run.pass_, tuple(op.name for op in run.ops), moved)
        if key not in works:
            works[key] = kernel_work(sharded.block, run, op_sizes, matrix_tile, seq_len, stretches)
        yield run, works[key]


def block_cost(
    work: BlockWork, rings: Mapping[tuple[str, ...], Ring], rates: Rates, counted: Counted | None = None
) -> BlockCost:
    """Price a block: every kernel by its roofline, unless it is ``counted`` already, every message by its ring."""
    kernel_s = (counted or Counted()).seconds
    seconds: dict[str, dict[str, Number]] = {name: defaultdict(float) for name in PASSES}
    started: dict[str, Number] = defaultdict(float)
    eager = any(kernel.launches for _, kernel in work.kernels)
    for run, kernel in work.kernels:
        parts = seconds[run.pass_]
        if kernel not in kernel_s:
            kernel_s[kernel] = kernel_time(kernel, rates)
        parts["compute"] = parts["compute"] + kernel_s[kernel]
        started[run.pass_] = started[run.pass_] + kernel.launches * rates.launch_s
    for once_s, ways in ((rates.layer_s, _ways(work.kernels)), (rates.experts_s, _ways(work.kernels, _TO_EXPERTS))):
        for pass_ in ("F", "I"):
            started[pass_] = started[pass_] + once_s * sum(name == pass_ for name, _ in ways)
    sent: dict[str, Number] = defaultdict(float)
    hidden: dict[str, Number] = defaultdict(float)
    scattered: Number = 0.0
    num_sent: Number = 0  # messages over more than one rank
    for message, message_bytes in work.messages:
        ring, axis = rings[message.collective.atoms], axis_of_atoms(message.collective.atoms)
        parts, time_s = seconds[message.pass_], ring.busy_s(message.collective, message_bytes, eager=eager)
        started[message.pass_] = started[message.pass_] + ring.starts_s(message.collective)
        parts[axis] = parts[axis] + time_s
        sent[axis] = sent[axis] + ring.sent_bytes(message.collective, message_bytes)
        num_sent = num_sent + (ring.size > 1)
        if message.collective.kind == "reduce_scatter":
            scattered = scattered + message_bytes * (ring.size > 1)
        if work.hides_tp and axis == "tp" and message.collective.kind in IN_PIECES:
            hidden[message.pass_] = hidden[message.pass_] + work.hides_tp * (1 - 1 / ring.size) * time_s
    for pass_, most_s in hidden.items():
        parts = seconds[pass_]
        hidden[pass_] = np.minimum(most_s, parts["compute"])
        parts["tp"] = parts["tp"] - hidden[pass_]
    for pass_, started_s in started.items() if eager else ():
        seconds[pass_]["waiting"] = waiting_time(sum(seconds[pass_].values()), started_s, rates)
    return BlockCost(
        seconds=seconds,
        sent_bytes=sent,
        memory=work.memory,
        hidden_s=sum(hidden.values()),
        started_s=sum(started.values()) if eager else 0.0,
        starts=sum(kernel.launches for _, kernel in work.kernels) + num_sent,
        scattered_bytes=scattered,
    )


def _ways(kernels: Iterable[tuple[KernelRun, KernelWork]], kinds: type | UnionType = object) -> set[tuple[str, bool]]:
    """Return in which passes operations of some kinds run; what is computed again is one more."""
    return {(run.pass_, run.ops[0].again) for run, _ in kernels if any(isinstance(op.kind, kinds) for op in run.ops)}


def price_block(
    question: Question, setting: Setting, kind: str, drop: Recompute, counted: Counted | None = None
) -> BlockCost:
    """Price one block of a layout."""
    cost = block_cost(work_of(question, setting, kind, drop, counted), setting.rings, question.rates, counted)
    return offloaded(cost, question) if drop.offload else cost


def offloaded(cost: BlockCost, question: Question) -> BlockCost:
    """Return the cost of a block that keeps in host memory what it saves: it takes what its passes do not hide of that.

    The backward pass hides as much as it takes, split or not: W of one micro-batch runs before I of the next.
    """
    kept, cluster, computes = cost.memory.saved_bytes, question.cluster, load_kernels(question.kernels).host_computes
    link = (cluster.host_bandwidth_bytes_per_s or np.inf) / cluster.ranks_per_chip
    moved_s = kept / (question.rates.memory_bytes_per_s / 2 if computes else link)  # a copy is read and written
    seconds = {**cost.seconds}
    for first, halves in (("F", ("F",)), ("I", ("I", "W"))):
        hidden_s: Number = sum(sum(cost.seconds[half].values()) for half in halves) * (not computes)
        seconds[first] = {**cost.seconds[first], "host": np.maximum(0.0, moved_s - hidden_s)}
    return replace(cost, seconds=seconds, memory=replace(cost.memory, saved_bytes=0.0 * kept, host_bytes=kept))


def stage_groups(kernels: Kernels) -> frozenset[tuple[str, ...]]:
    """Return the groups of ranks in which a hidden state is handed from stage to stage."""
    return frozenset([("pp",), TP] if kernels.parts_sends else [("pp",)])


def handed_on(setting: Setting, kernels: Kernels) -> tuple[Number, Number]:
    """Return how long a micro-batch's hidden state is on its way to the next stage, and which share a rank sends."""
    whole_bytes, links = boundary_bytes(setting), setting.rings["pp",]
    boundary = _any_layer(setting).sharding.boundary
    if not kernels.parts_sends or any({*TP} & {*cut} for cut in boundary.values()):
        return links.send_s(whole_bytes), 1.0
    ring, gather = setting.rings[TP], Collective(kind="all_gather", dim=None, atoms=TP)
    gathers_s = ring.time_s(gather, whole_bytes) * (ring.size > 1)
    return links.send_s(whole_bytes / ring.size) + gathers_s, 1.0 / ring.size


def boundary_bytes(setting: Setting) -> Number:
    """Return the bytes of the hidden state that a rank hands to the next stage for one micro-batch."""
    layer = _any_layer(setting)
    assert layer.block.carry_in, "a layer takes the hidden state from the block before"
    local = local_sizes(setting.sizes, layer.sharding.boundary, setting.atoms)
    return layer.block.tensors[layer.block.carry_in].num_bytes(local)


def _any_layer(setting: Setting) -> LoweredBlock:
    """Return one of the layers, all of which take and give the same hidden state."""
    return setting.blocks.block(setting.blocks.step.kinds[1], Recompute())
