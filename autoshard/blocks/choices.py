"""What an operation may choose: the dims that each atom may cut, and the sums that it lets pass."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import InputError
from autoshard.graph.block import Block
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import Differentiable, Dims, Op, Tensor
from autoshard.layout.layout import Cuts, Layout
from autoshard.layout.legal import op_dims, together
from autoshard.layout.pin import OpPins
from autoshard.plan.rules.strategy import AtomCut, StrategyRule

Atoms = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpChoice:
    """How an operation and its gradients run: cuts, and atoms over which a sum passes through, forward and backward."""

    cuts: Cuts
    passed: Atoms = ()
    passed_back: Atoms = ()

    @property
    def busy(self) -> frozenset[str]:
        """The atoms that cut a dim."""
        return frozenset(atom for cut in self.cuts.values() for atom in cut)

    def layout(self, dims: Dims, sums: Sequence[str] = ()) -> Layout:
        """Return how it cuts a tensor of these dims."""
        cuts = tuple((dim, tuple(self.cuts.get(dim, ()))) for dim in dims)
        return Layout(dims=cuts, sums=tuple(sorted(sums)))

    def awaited(self, dims: Dims) -> frozenset[str]:
        """Return the atoms over which the gradient of an input awaits a sum: they cut only dims that it lacks."""
        return (self.busy - {atom for dim in dims for atom in self.cuts.get(dim, ())}) | set(self.passed_back)


def atom_dims(
    block: Block, op: Op, atom: str, rules: Sequence[StrategyRule] = (), pins: OpPins | None = None
) -> tuple[str, ...]:
    """Return the dims that an atom may cut in an operation; an empty name stands for none.

    Pins go before what the axes are for, but not before what an engine can run.
    """

    def refusal(dim: str, among: Sequence[StrategyRule]) -> str:
        place = AtomCut.of(block, op, atom, dim or None)
        return next((str(rejection) for rule in among if (rejection := rule.rejection(place))), "")

    bound = {*op.kind.whole_dims(), *dict(op.kind.tied_dims())}
    dims = (*sorted(dim for dim in op_dims(block, op) if dim not in bound), "")
    allowed = tuple(dim for dim in dims if not refusal(dim, rules))
    if pins is None:
        return allowed
    pinned = pins.leaves(atom, allowed)
    if pinned:
        return pinned
    binding = [rule for rule in rules if not rule.yields_to_pins]
    reasons = {dim: refusal(dim, binding) for dim in pins.leaves(atom, dims)}
    if all(reasons.values()):
        reason = next(iter(reasons.values()), f"{op.name} has no place left for {atom}")
        raise InputError.of(pins.origin, reason)
    return tuple(dim for dim, reason in reasons.items() if not reason)


def op_cuts(
    block: Block, op: Op, atoms: Sequence[str], allowed: Sequence[Sequence[str]] | None = None
) -> tuple[Cuts, ...]:
    """Return every legal cut of an operation, each atom in one of the dims that are allowed to it, or in none.

    Several atoms of one dim cut it in the mesh's order.
    """
    choices: list[Cuts] = []
    for dims in itertools.product(*(allowed or [atom_dims(block, op, atom) for atom in atoms])):
        cuts = {dim: tuple(atom for atom, at in zip(atoms, dims, strict=True) if at == dim) for dim in dims if dim}
        cuts |= {dim: together(cuts, tied) for dim, tied in op.kind.tied_dims()}
        choices.append({dim: cut for dim, cut in cuts.items() if cut})
    return tuple(choices)


def made_layout(op: Op, tensors: Mapping[str, Tensor], tensor: str, choice: OpChoice) -> Layout:
    """Return how an operation leaves a result: what cuts a dim that it has lost is pending, and what passes through."""
    dims = tensors[tensor].dims
    read = {dim for name in op.inputs for dim in tensors[name].dims}
    cut, kept_atoms = ({atom for dim in dim_set for atom in choice.cuts.get(dim, ())} for dim_set in (read, dims))
    index = op.outputs.index(tensor)
    passes = any(index in outputs for outputs in op.kind.linear_through().values())
    plain = choice.layout(dims, sorted({*(cut - kept_atoms), *(choice.passed if passes else ())}))
    if isinstance(op.kind, Reduce) and op.kind.function == "max":
        return Layout(dims=plain.dims, maxima=plain.sums)
    return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRule:
    """The pending sums that an operation lets pass, so that one Collective sums them later.

    ``forward`` is that of its first input, ``backward`` that of its result's gradient; the gradients of the inputs
    ``into`` await what passed forward.
    """

    forward: bool
    backward: bool
    into: frozenset[int]

    @classmethod
    def of(cls, op: Op, block: Block) -> "PassRule":
        """Read it off the kind and the kinds of its gradient."""
        assert isinstance(op.kind, Differentiable), f"{op.name}: {op.kind.label} stands in a forward pass"
        inputs = [block.tensors[name] for name in op.inputs]
        roles = ("activation", "parameter")
        needed = [number for number, tensor in enumerate(inputs) if tensor.role in roles and tensor.dtype != "int64"]
        steps = [(step.kind, step) for step in op.kind.gradient(inputs, needed) if step.kind is not None]
        linear = [step for kind, step in steps if 0 in kind.linear_through() and step.reads[0] == "d0"]
        readers = [step for _, step in steps if "d0" in step.reads]
        into = {
            step.gives[output]
            for kind, step in steps
            for read, outputs in kind.linear_through().items()
            for output in outputs
            if step.reads[read] == "in0"
        }
        delivers = [
            reader.kind
            for reader in block.select("micro_batch", "F")
            if reader.inputs and reader.inputs[0] in op.outputs
        ]
        settled = any(isinstance(kind, Deliver) and kind.settles for kind in delivers)
        return cls(
            forward=0 in op.kind.linear_through() and inputs[0].role == "activation",
            backward=bool(linear) and len(linear) == len(readers) and not settled,
            into=frozenset(number for number in into if number is not None),
        )


def subsets(atoms: Sequence[str]) -> Iterator[Atoms]:
    """Yield every subset, the smaller first.

    >>> list(subsets(("a", "b")))
    [(), ('a',), ('b',), ('a', 'b')]
    """
    for count in range(len(atoms) + 1):
        yield from itertools.combinations(atoms, count)


def real_cuts(cuts: Cuts) -> dict[str, Atoms]:
    """Return only the dims that are cut."""
    return {dim: tuple(cut) for dim, cut in cuts.items() if cut}
