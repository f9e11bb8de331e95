"""The best cuts of a whole model at one point of the outer search, under the Rules of its axes and engine."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import MappingProxyType

import numpy as np

from autoshard.blocks.choices import Atoms, atom_dims, op_cuts
from autoshard.blocks.operators import SharedCuts, solve, solve_columns
from autoshard.blocks.parts import PricedParts
from autoshard.blocks.problem import OperatorProblem
from autoshard.cost.collective import Number, Ring
from autoshard.cost.setting import Question, only
from autoshard.errors import InputError
from autoshard.layout.layout import Collective, Cuts, Cutting
from autoshard.layout.legal import cut_operations, together
from autoshard.layout.pin import Pin
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate, Fold, boundary_cuts
from autoshard.plan.lowering import ATOMS, StepGraph
from autoshard.plan.recompute import Recompute
from autoshard.plan.rules.columns import Engine
from autoshard.plan.rules.strategy import CpKind, StrategyRule, strategy_rules
from autoshard.schedule.waves import Ints

_FEW = 6  # meshes that look for the cheapest ways between layouts of tensors with very many
_WHOLE = ("weights", "gradients")  # that ranks hold whole unless ZeRO-3 divides all
_MOST_KEPT = 256  # cuttings: those of a frontier over four sizes of a cluster are fewer, and each is a few kilobytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What limits the cuts of a model: an engine's Rules, the layout between blocks, pinned layouts."""

    engine: Engine
    sequence_parallel: bool
    cp_kind: CpKind = "ring"
    between: str | None = None  # layout between blocks; None: what sequence_parallel says
    fold: Fold | None = None  # axes beside ep whose ranks hold other experts each; None: as is fastest
    pins: tuple[Pin, ...] = ()

    @classmethod
    def of(cls, candidate: Candidate, engine: Engine, pins: tuple[Pin, ...] = ()) -> "Terms":
        """Return the terms of a candidate."""
        sp, between = candidate.sequence_parallel, candidate.boundary
        return cls(
            engine=engine,
            sequence_parallel=sp,
            cp_kind=candidate.cp_kind,
            between=between,
            fold=candidate.fold,
            pins=pins,
        )

    @property
    def rules(self) -> tuple[StrategyRule, ...]:
        """The Rules about Strategies."""
        sp, cp_kind = self.sequence_parallel, self.cp_kind
        return strategy_rules(self.engine, sequence_parallel=sp, cp_kind=cp_kind, fold=self.fold)

    @property
    def boundary(self) -> Cuts:
        """The cut of the hidden state between blocks."""
        return boundary_cuts(self.between, sequence_parallel=self.sequence_parallel)


@lru_cache(maxsize=_MOST_KEPT)
def solved_cutting(question: Question, candidate: Candidate, terms: Terms) -> Cutting:
    """Return the cheapest cutting of a candidate's blocks: one table per kind, whatever is computed again.

    It also says how dp, cp and ep would cut if they were larger than 1, so that it serves other meshes: the atoms that
    are of size 1 here are added where the Rules leave them just one dim, in the order of the mesh. With tp 1 either way
    of ``sequence_parallel`` may be given. They are kept, because a frontier asks for them under every limit of memory.
    """
    tables: dict[str, Mapping[str, Cuts]] = {}
    meshes, priced = Meshes.of(question, candidate), PricedParts()
    for kind in question.step.kinds:
        problem = operator_problem(question, meshes, terms, kind)
        cuts, whole = solve(problem, priced).cuts, dict[str, Cuts]()
        for op in cut_operations(problem.block):
            atoms_by_dim = {dim: list(cut) for dim, cut in cuts[op.name].items()}
            for atom in (atom for atom in ATOMS if atom not in problem.real_atoms):
                with suppress(InputError):  # pins leave it none; that is an error where it cuts something
                    dims = allowed_dims(question.step, terms, kind, op.name, atom)
                    if len(dims) > 1:  # a cp of 1 stands with slots
                        dims = tuple(dim for dim in dims if dim != "experts")
                    if len(dims) == 1 and dims[0]:
                        atoms_by_dim.setdefault(dims[0], []).append(atom)
            ordered = {dim: tuple(sorted(atoms, key=ATOMS.index)) for dim, atoms in atoms_by_dim.items()}
            whole[op.name] = {**ordered, **{dim: together(ordered, tied) for dim, tied in op.kind.tied_dims()}}
        tables[kind] = whole
    return Cutting.of(tables, terms.boundary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """What the blocks of one mesh are cut by, or in columns those of many: atoms, links, and how much work there is."""

    atoms: Mapping[str, Number]
    num_sequences: Number  # of a micro-batch, over all of dp
    num_micro_batches: Number
    ring: Callable[[tuple[str, ...]], Ring]  # of the groups over some atoms

    def only(self, columns: Ints) -> "Meshes":
        """Return some of the columns."""
        return Meshes(
            atoms=only(self.atoms, columns),
            num_sequences=self.num_sequences[columns],
            num_micro_batches=self.num_micro_batches[columns],
            ring=lambda atoms: only(self.ring(atoms), columns),
        )

    @classmethod
    def of(cls, question: Question, candidate: Candidate) -> "Meshes":
        """Return that of a single candidate."""
        mesh = mesh_of(candidate, question.model, question.cluster)
        return cls(
            atoms={atom: mesh.size(atom) for atom in ATOMS},
            num_sequences=candidate.mbs * candidate.dp,
            num_micro_batches=max(1, question.workload.global_batch // (candidate.dp * candidate.mbs)),
            ring=lambda atoms: question.ring(mesh, atoms),
        )


def shared_cuttings(
    question: Question, meshes: Meshes, terms_and_slack: tuple[Terms, float], between: Callable[[], None]
) -> Iterator[tuple[Cutting, Ints]]:
    """Yield cuttings for columns of meshes, each with the numbers of those that it serves.

    ``terms_and_slack`` are the terms, and the share by which blocks may take longer there than with their own cuts,
    which ``solved_cutting`` finds; they hold no more. ``between`` is called before each part of a block is priced, and
    may stop this.
    """
    (terms, slack), kinds = terms_and_slack, question.step.kinds
    count, parts, priced = len(meshes.atoms["edp"]), dict[str, tuple[SharedCuts, ...]](), PricedParts()
    few = meshes.only(np.unique(np.linspace(0, count - 1, _FEW).astype(np.int64)))
    real = tuple(atom for atom, size in meshes.atoms.items() if np.any(size > 1))
    state_bytes = float(sum(question.workload.precision.state_bytes(num_moments=0)[part] for part in _WHOLE))
    for kind in kinds:
        between()
        few_columns = operator_problem(question, few, terms, kind, real)
        problem = operator_problem(question, meshes, terms, kind, real)
        problem = replace(problem, few=few_columns, state_bytes_per_weight=state_bytes)
        parts[kind] = solve_columns(problem, slack, priced, between)
    numbers = np.empty((len(kinds), count), dtype=np.int64)
    for row, shared in zip(numbers, parts.values(), strict=True):
        for number, part in enumerate(shared):
            row[part.columns] = number
    distinct, which = np.unique(numbers, axis=1, return_inverse=True)
    rows: list[list[int]] = distinct.T.tolist()
    for index, column in enumerate(rows):
        cuts = {kind: parts[kind][number].cuts for kind, number in zip(kinds, column, strict=True)}
        yield Cutting.of(cuts, terms.boundary), np.flatnonzero(which.reshape(-1) == index)


def operator_problem(
    question: Question, meshes: Meshes, terms: Terms, kind: str, real: Atoms | None = None
) -> OperatorProblem:
    """Return the problem of one block, with collectives priced on the links of its mesh, or of many at once.

    ``real`` names the atoms that may cut something.
    """
    real = tuple(atom for atom, size in meshes.atoms.items() if size > 1) if real is None else real

    @cache
    def ring(over: frozenset[str]) -> Ring:
        return meshes.ring(tuple(sorted(over, key=ATOMS.index)))

    def seconds(collective: Collective, message_bytes: Number) -> Number:
        # Hosts start messages meanwhile, but cuts with many small ones would let a device wait for all of them.
        return ring(frozenset(collective.atoms)).time_s(collective, message_bytes)

    return OperatorProblem(
        block=question.step.block(kind, Recompute()),
        sizes=question.sizes(meshes.num_sequences),
        atoms=meshes.atoms,
        boundary={dim: tuple(atom for atom in cut if atom in real) for dim, cut in terms.boundary.items()},
        rates=question.rates,
        seconds=seconds,
        num_micro_batches=meshes.num_micro_batches,
        keeps_gathered=question.step.platform.keeps_gathered,
        allowed=allowed_cuts(question.step, terms, kind, real),
    )


@cache
def allowed_cuts(step: StepGraph, terms: Terms, kind: str, real: Atoms) -> Mapping[str, tuple[Cuts, ...]]:
    """Return the cuts that Rules and pins allow to each operation of a block; only these atoms are larger than 1."""
    block = step.block(kind, Recompute())
    dims = {op: [allowed_dims(step, terms, kind, op.name, atom) for atom in real] for op in cut_operations(block)}
    return MappingProxyType({op.name: op_cuts(block, op, real, allowed) for op, allowed in dims.items()})


@cache
def allowed_dims(step: StepGraph, terms: Terms, kind: str, op: str, atom: str) -> tuple[str, ...]:
    """Return the dims that an atom may cut in an operation; an empty name stands for none."""
    block, pins = step.block(kind, Recompute()), None
    if terms.pins:
        from autoshard.blocks.pinned import constraints  # most searches have no pins, and start sooner without

        pins = constraints(step, terms.pins).of_block(kind).get(op)
    return atom_dims(block, block.op(op), atom, terms.rules, pins)
