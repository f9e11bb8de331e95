"""The blocks of a model's step, recomputed, cut and lowered; each made once, whatever its sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from autoshard.graph.block import Block, OpGraph
from autoshard.graph.decoder import decoder_graph, dim_sizes
from autoshard.graph.fusing import recompute
from autoshard.layout.layout import Cutting
from autoshard.layout.lower import Lowering
from autoshard.layout.program import Program
from autoshard.layout.redistribute import bytes_price
from autoshard.plan.recompute import Recompute
from autoshard.spec.kernels import Kernels, load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload

ENDS = ("embed", "head")  # the blocks that compute nothing again
ATOMS = ("edp", "ep", "cp", "kv", "rep")  # that may cut tensors; pp cuts layers
_NOMINAL = 2  # which way a layout is changed depends neither on the size of the tensor nor on that of the group


@cache
def split_pending(pending: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the atoms that a weight's gradient awaits: those that share the optimizer's work, and the others.

    >>> split_pending(("kv", "cp", "edp"))
    (('edp', 'cp'), ('kv',))
    """
    ordered = tuple(sorted(pending, key=ATOMS.index))
    shards = tuple(atom for atom in ordered if atom in ("edp", "ep", "cp"))
    return shards, tuple(atom for atom in ordered if atom not in shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """What the graph of a training step is made of; a micro-batch has one sequence, and prices set the real sizes."""

    model: ModelSpec
    workload: Workload
    kernels: str

    @property
    def graph(self) -> OpGraph:
        """The graph of one step."""
        return _graph(self)

    @property
    def platform(self) -> Kernels:
        """The kernels by their table."""
        return load_kernels(self.kernels)

    def sizes(self, micro_batch: int) -> Mapping[str, int]:
        """Return the size of every dim, for so many sequences over all of dp."""
        return dim_sizes(self.model, self.workload, self.platform, micro_batch)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its blocks: embedding, layers, head."""
        return (ENDS[0], *self.model.layer_counts, ENDS[1])

    def block(self, kind: str, drop: Recompute) -> Block:
        """Return a block, with what is computed again."""
        return _block(self, kind, drop.on_device)


def lowered(step: StepGraph, kind: str, drop: Recompute, cutting: Cutting, atoms: frozenset[str]) -> Program:
    """Lower a block with the cuts of these atoms; groups have a nominal size, since collectives do not depend on it."""
    return _lowered(step, kind, drop.on_device, cutting.alone(kind).only(atoms), atoms)


def nominal_sizes(atoms: frozenset[str]) -> Mapping[str, int]:
    """Return sizes that say only which atoms cut anything."""
    return {atom: _NOMINAL if atom in atoms else 1 for atom in ATOMS}


# What changes of layout cost where only the order of prices matters. Layouts do not name atoms that cut nothing, so one
# price serves all meshes, and what was found on one is known on the next.
NOMINAL_PRICE = bytes_price(1.0, nominal_sizes(frozenset(ATOMS)))


@cache
def _graph(step: StepGraph) -> OpGraph:
    return decoder_graph(step.model, step.workload, step.platform, micro_batch=1)


@cache
def _block(step: StepGraph, kind: str, drop: Recompute) -> Block:
    block = step.graph.block(kind)
    if drop.kind == "none":
        return block
    return recompute(block, step.platform, None if drop.kind == "full" else drop.ops)


@lru_cache(maxsize=256)  # a search lowers the blocks of a mixture in thousands of ways, each of them once
def _lowered(step: StepGraph, kind: str, drop: Recompute, cutting: Cutting, atoms: frozenset[str]) -> Program:
    return _forward(step, kind, cutting, atoms).finished(step.block(kind, drop))


@lru_cache(maxsize=64)  # all kinds of recompute of a block are lowered one after the other
def _forward(step: StepGraph, kind: str, cutting: Cutting, atoms: frozenset[str]) -> Lowering:
    sizes, keeps = nominal_sizes(atoms), step.platform.keeps_gathered
    block, cuts = step.block(kind, Recompute()), cutting.block(kind)
    return Lowering(block, cuts, sizes, NOMINAL_PRICE, boundary=cutting.boundary, keeps_gathered=keeps)
