"""Lower bounds of layouts whose blocks are not cut yet: those that take far too long, or too much, need no tables.

Whatever cuts a block has, it runs the same kernels. An atom divides the work of an operation, and a tensor that it
moves, at most if the Rules let it cut one of their dims. So all of that is counted as if every atom cut all that it may
cut, each part by itself. Where the Rules leave an atom one dim in every operation, its messages are known before all
else is cut: tokens go to experts and back over ep, keys go around the ring of cp. Other messages, full tiles, sums of
gradients and the step phase take nothing. These are a few sums over columns of layouts, of any number of which they
take some milliseconds.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.blocks.choices import Atoms
from autoshard.blocks.cutting import Terms, allowed_dims
from autoshard.cost.collective import Number, Ring
from autoshard.cost.compute import KernelWork, seen_share
from autoshard.cost.kernel_run import KernelRun
from autoshard.cost.setting import BlockMemory, BlockWork, Question, block_cost
from autoshard.cost.sharded import CutBlocks, LoweredBlock
from autoshard.graph.kinds.attention import SCORES, Attend, AttendGradient
from autoshard.graph.kinds.optimizer import UPDATES
from autoshard.graph.op import Op
from autoshard.layout.layout import Cuts, Cutting, local_sizes
from autoshard.layout.legal import cut_operations, op_dims, together
from autoshard.layout.sharding import Message
from autoshard.plan.lowering import ATOMS
from autoshard.plan.recompute import Recompute
from autoshard.schedule.waves import Floats, Ints
from autoshard.search.fill.stage_options import SURE
from autoshard.spec.kernels import load_kernels

_NOTHING = BlockMemory(
    saved_bytes=0, waiting_bytes=0, remade_bytes=0, working_bytes=0, placeholder_bytes=0, weights={}, tied_weights={}
)


def uncut_seconds(
    question: Question,
    terms: Terms,
    rows: Mapping[str, Ints],
    meshes: tuple[Mapping[str, Ints], Callable[[Atoms], Ring]],
    capacity: float,
) -> Floats:
    """Return a lower bound of the step of every layout, for any schedule and recompute, however its blocks are cut.

    ``meshes`` has the sizes of the atoms of every layout, and the groups of ranks over some of them. The bound is
    infinite where a rank has no room for its share of all states, and for what a layer at work keeps and makes again.
    """
    (atoms, ring), sequences = meshes, rows["mbs"] * rows["dp"]
    sizes = question.sizes(sequences.astype(np.float64))
    columns = {atom: column.astype(np.float64) for atom, column in atoms.items()}
    layers = dict(question.model.layer_counts)
    blocks = {kind: UncutBlock.of(question, terms, kind) for kind in question.step.kinds}
    rings = {(atom,): ring((atom,)) for block in blocks.values() for atom in block.sent}
    pass_s = {kind: block.pass_s(sizes, columns, rings) for kind, block in blocks.items()}
    all_s: Floats = sum((layers.get(kind, 1) * seconds for kind, seconds in pass_s.items()), np.zeros(len(sequences)))
    most_layers = -(-question.model.num_layers // rows["pp"])  # which some rank has, of the fastest kind at least
    fullest_s = most_layers * np.min(np.broadcast_arrays(*(pass_s[kind] for kind in layers)), axis=0)
    rank_s = np.maximum(all_s / rows["pp"], fullest_s)
    held = np.min([blocks[kind].held_bytes(sizes, columns) for kind in layers], axis=0)
    num_ranks = rows["pp"] * math.prod(columns.values())
    fits = _peak_bytes(question, held + _state_bytes(question) / num_ranks) <= capacity
    return np.where(fits, question.workload.global_batch // sequences * rank_s * (1 - SURE), np.inf)


def _state_bytes(question: Question) -> float:
    """Return the bytes of all weights, gradients, masters and moments, each on one rank only."""
    workload = question.workload
    part_bytes = workload.precision.state_bytes(UPDATES[workload.optimizer].num_moments)
    return float(question.step.graph.num_parameters() * sum(part_bytes.values()))


def _messages(question: Question, terms: Terms, kind: str, atom: str) -> Sequence[Message]:
    """Return what a block sends along an atom whatever else cuts it; nothing, unless an atom has one dim everywhere.

    Experts stand whole over cp, as slots may be cut instead; so of cp only rings count.
    """
    cuts: dict[str, Cuts] = {}
    for op in cut_operations(block := question.step.block(kind, Recompute())):
        dims = allowed_dims(question.step, terms, kind, op.name, atom)
        dims = tuple(dim for dim in dims if dim != "experts") if len(dims) > 1 else dims
        if len(dims) != 1:
            return ()
        by_dim = {dims[0]: (atom,)} if dims[0] else {}
        cuts[op.name] = by_dim | {dim: together(by_dim, tied) for dim, tied in op.kind.tied_dims()}
    boundary = {dim: tuple(cut for cut in atoms if cut == atom) for dim, atoms in terms.boundary.items()}
    cutting = Cutting.of({kind: cuts}, boundary)
    lowered = CutBlocks(step=question.step, cutting=cutting, atoms=frozenset([atom])).block(kind, Recompute())
    rings = {op.kind.ring_dim for op in block.ops if op.kind.ring_dim}
    return [message for message in lowered.sharding.messages if atom == "ep" or message.collective.dim in rings]


def _peak_bytes(question: Question, held: Number) -> Number:
    """Return what a rank that holds so much uses, with what its platform needs beside it."""
    kernels = load_kernels(question.kernels)
    share = kernels.reserved.share if kernels.reserved else 0.0
    return ((held + kernels.workspace_bytes) * (1 + share) + kernels.runtime_bytes) * (1 - SURE)


@dataclass(frozen=True, slots=True, kw_only=True)
class UncutBlock:
    """A block with nothing cut, and the atoms that its operations may be cut by."""

    question: Question
    block: LoweredBlock
    cut_dims: Mapping[str, Mapping[str, Collection[str]]]  # operation -> atom -> dims that it divides where it may cut
    sent: Mapping[str, Sequence[Message]]  # atom that has one dim in every operation -> messages, if it cuts alone
    ops: Mapping[str, Op] = field(default_factory=dict[str, Op])

    @classmethod
    def of(cls, question: Question, terms: Terms, kind: str) -> "UncutBlock":
        """Lower a block with no atom, and ask the Rules what each atom may cut."""
        block = question.step.block(kind, Recompute())
        cutting = Cutting.of({kind: {op.name: {} for op in cut_operations(block)}}, {})
        cut_dims: dict[str, dict[str, set[str]]] = defaultdict(dict)
        for op in cut_operations(block):
            for atom in ATOMS:
                dims = {*allowed_dims(question.step, terms, kind, op.name, atom)}
                tied = {dim for dim, token_dims in op.kind.tied_dims() if dims & {*token_dims}}
                cut_dims[op.name][atom] = dims | tied
        lowered = CutBlocks(step=question.step, cutting=cutting, atoms=frozenset()).block(kind, Recompute())
        return cls(
            question=question,
            block=lowered,
            cut_dims=cut_dims,
            sent={atom: messages for atom in ("ep", "cp") if (messages := _messages(question, terms, kind, atom))},
            ops={op.name: op for op in lowered.block.ops},
        )

    def pass_s(self, sizes: Mapping[str, Number], atoms: Mapping[str, Floats], rings: Mapping[Atoms, Ring]) -> Number:
        """Return the seconds of a micro-batch in all passes, at least."""
        kernels = tuple((run, self._work(run, sizes, atoms)) for run in self.block.runs)
        messages = tuple(
            (message, self._sent_bytes(message, sizes, atoms)) for sent in self.sent.values() for message in sent
        )
        work = BlockWork(kernels=kernels, messages=messages, hides_tp=0.0, memory=_NOTHING)
        seconds = block_cost(work, rings, self.question.rates).seconds
        return sum(part_s for parts in seconds.values() for part_s in parts.values())

    def _sent_bytes(self, message: Message, sizes: Mapping[str, Number], atoms: Mapping[str, Floats]) -> Number:
        """Return the bytes of a rank's buffer, if all atoms cut the tensor; busy experts have more than the mean."""
        busy = local_sizes(sizes, message.cuts, {**dict.fromkeys(ATOMS, 1.0), "ep": atoms["ep"]})
        rest = math.prod(size for atom, size in atoms.items() if atom != "ep")
        over_ep = any("ep" in cut for cut in message.cuts.values())
        return self.block.block.tensors[message.tensor].num_bytes(busy) / (rest if over_ep else rest * atoms["ep"])

    def held_bytes(self, sizes: Mapping[str, Number], atoms: Mapping[str, Floats]) -> Number:
        """Return what a rank holds of a layer at work in backward, at least: all that it keeps without recompute.

        What recompute does not keep it makes again.
        """
        kept = {entry.storage: entry.tensor for entry in self.block.block.saved}
        return sum(tensor.num_bytes(sizes) for tensor in kept.values()) / math.prod(atoms.values())

    def _work(self, run: KernelRun, sizes: Mapping[str, Number], atoms: Mapping[str, Floats]) -> KernelWork:
        """Return what a kernel does at least on a rank."""
        block, ratio = self.block.block, run.flops_ratio
        matrix: Number = 0.0
        attention: Number = 0.0
        vector: Number = 0.0
        for op in run.ops:
            call, share = block.call(op, sizes), 1 / self._most(op.source, {*op_dims(block, op)}, atoms)
            if isinstance(op.kind, Attend | AttendGradient):
                share = share * (seen_share(op.kind, sizes["seq"], 1, run.mask_tile) if run.skips_masked else 1.0)
                attention = attention + ratio * share * op.kind.matrix_flops(call)
            else:
                matrix = matrix + share * op.kind.matrix_flops(call)
            vector = vector + share * op.kind.vector_flops(call)
        moved = run.traffic_ratio * sum(self._moved(run, sizes, atoms))
        if run.score_bytes:
            scores = math.prod(sizes[dim] for dim in SCORES) / self._most(run.ops[0].source, {*SCORES}, atoms)
            moved = moved + run.score_bytes * scores
        return KernelWork.of(run, (matrix, attention, vector), moved)

    def _moved(self, run: KernelRun, sizes: Mapping[str, Number], atoms: Mapping[str, Floats]) -> Iterator[Number]:
        """Yield the bytes of each tensor that a kernel moves, at least."""
        for name, tensor in run.touched:
            source = self.ops[name].source
            yield tensor.num_bytes(sizes) / self._most(source, {*tensor.dims}, atoms)

    def _most(self, op: str, dims: Collection[str], atoms: Mapping[str, Floats]) -> Number:
        """Return into how many parts at most an operation may cut what has these dims; a ring brings its dim to all."""
        cut_dims, ring = self.cut_dims.get(op, {}), self.ops[op].kind.ring_dim
        return math.prod(atoms[atom] for atom, cut in cut_dims.items() if ({*dims} - {ring}) & {*cut})
