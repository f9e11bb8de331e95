"""Pins: the layouts of some tensors as a user wants them, the cuts that they fix at operations, and their conflicts.

A pin fixes the cuts of its targets: of the forward operation that makes the tensor, or of all that read it.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.errors import Fault, Faults, InputError, nearest
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import Dims, Op
from autoshard.layout.layout import Cuts, Layout, show_atoms
from autoshard.layout.legal import cut_operations, op_dims, queues
from autoshard.spec.mesh import ATOMS

BOUNDARY = "boundary"
_SIZES = {atom: 2 for atom in ATOMS if atom != "pp"}  # pins are read for every mesh: each atom may cut something


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """The layout that a tensor must have; ``origin`` is the option or file that says so.

    A pending sum is pinned only where the layout names it: ``+tp`` asks that the tensor's maker sums over a dim cut
    over tp.
    """

    tensor: str
    layout: Layout
    origin: str = "Python"

    def __str__(self) -> str:
        """Print the text form after its origin."""
        return f"{self.origin} {self.tensor}={self.layout}"

    def fault(self, message: str) -> Fault:
        """Return a fault of this pin."""
        return Fault(where=f"{self.origin} {self.tensor}", message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPins:
    """The constraints that pins put on an operation: cuts of dims, and dims over which an atom leaves a sum pending."""

    cuts: Cuts = field(default_factory=dict[str, tuple[str, ...]])
    sums: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    origin: str = ""

    def leaves(self, atom: str, dims: Sequence[str]) -> tuple[str, ...]:
        """Return the dims among ``dims`` that an atom may still cut; an empty name stands for no dim."""
        pinned_dims = [dim for dim, cut in self.cuts.items() if atom in cut]
        if pinned_dims:
            return tuple(dim for dim in dims if dim in pinned_dims)
        return tuple(dim for dim in dims if dim not in self.cuts and dim in self.sums.get(atom, dims))


def parse_pin(text: str, origin: str) -> Pin:
    """Read ``NAME=[batch/dp, hidden/tp]``.

    >>> print(parse_pin("attn_in=[batch/dp, seq, hidden]", "--pin"))
    --pin attn_in=[batch/dp, seq, hidden]
    """
    name, equals, layout = text.partition("=")
    if not equals or not name.strip():
        raise InputError.of(origin, f"{text!r} is not a pin. Write it like 'NAME=[batch/dp, hidden/tp]'")
    try:
        return Pin(tensor=name.strip(), layout=Layout.parse(layout), origin=origin)
    except InputError as error:
        raise InputError(
            Fault(where=f"{origin} {name.strip()}", message=fault.message) for fault in error.faults
        ) from error


def pins_of(layouts: Mapping[str, str | Layout], origin: str) -> tuple[Pin, ...]:
    """Read pins from a mapping of names to layouts (``pins:`` of a recipe, a dict in Python); all faults at once."""
    pins, faults = list[Pin](), Faults()
    for name, layout in layouts.items():
        with faults.of():
            pins.append(parse_pin(f"{name}={layout}", origin))
    faults.refuse()
    return tuple(pins)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedCut:
    """The cut of one dim of a target as a pin asks for it; ``path`` leads from the pinned tensor to the target."""

    atoms: tuple[str, ...]
    pin: Pin
    path: tuple[str, ...]

    def __str__(self) -> str:
        """Print how it cuts."""
        return f"cut over {show_atoms(self.atoms)}" if self.atoms else "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinConstraints:
    """The cuts that pins fix, by target, and the dims that an atom may cut so that its sum stays pending."""

    cuts: Mapping[str, Mapping[str, PinnedCut]]
    sums: Mapping[str, Mapping[str, Dims]]

    def of_block(self, kind: str) -> Mapping[str, OpPins]:
        """Return the constraints of each operation of a block."""
        pins_by_op: dict[str, OpPins] = {}
        for target in {*self.cuts, *self.sums}:
            if target.startswith(f"{kind}."):
                pinned = self.cuts.get(target, {})
                pins_by_op[target.removeprefix(f"{kind}.")] = OpPins(
                    cuts={dim: cut.atoms for dim, cut in pinned.items()},
                    sums=self.sums.get(target, {}),
                    origin=" and ".join(dict.fromkeys(str(cut.pin) for cut in pinned.values())),
                )
        return pins_by_op


def pin_constraints(graph: OpGraph, pins: Iterable[Pin]) -> PinConstraints:
    """Read the constraints of pins on the blocks of a step; one InputError holds every fault and every conflict."""
    targets, pins = _PinTargets(graph), tuple(pins)
    faults = dict.fromkeys(fault for pin in pins for fault in _pin_faults(targets, pin))
    if faults:
        raise InputError(faults)
    collector = _Collector(targets, pins)
    for pin in pins:
        for name in targets.named.get(pin.tensor, ()):
            collector.add(pin, name)
    collector.split_ties()
    collector.verify()
    if collector.conflicts:
        raise InputError(fault for _, fault in collector.conflicts.values())
    return PinConstraints(cuts=collector.cuts, sums=collector.sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PinTarget:
    """A forward operation, or the boundary between blocks.

    ``aligned`` names the operations, itself among them, that cut tied dims and their others as it does; the first
    joins them. ``summed`` holds, for each tensor that it makes, the dims over which it sums, or takes the maximum if it
    ``maximises``.
    """

    name: str
    dims: Dims
    whole: Dims = ()
    tied: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    aligned: tuple[str, ...] = ()
    summed: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    maximises: bool = False

    @property
    def free(self) -> Dims:
        """The dims that an atom may cut on its own."""
        return tuple(dim for dim in self.dims if dim not in self.whole and dim not in self.tied)

    def sources(self, dim: str) -> Dims:
        """Return the dims that an atom cuts when it cuts this one: itself, or those to which it is tied."""
        return tuple(source for source in self.tied.get(dim, (dim,)) if source in self.free)


class _PinTargets:
    """The targets of a step by name (``layer.q``), the dims and the targets of every tensor, and what names stand for.

    The layout of a tensor is that of its maker, or else of its readers. A name without its block stands for the tensor
    of that name in every block, and that of a tied weight for both of its copies.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.by_name: dict[str, _PinTarget] = {}
        self.dims: dict[str, Dims] = {}
        self.of_tensor: dict[str, list[str]] = {}
        self.named: dict[str, tuple[str, ...]] = {}
        for block in graph.blocks:
            self._add(block, f"{block.kind}.")
        self.named |= {name: (name,) for name in self.dims}
        for pair in graph.tied.items():
            for name, tensors in self.named.items():
                if set(pair) & set(tensors):
                    self.named[name] = tuple(dict.fromkeys((*tensors, *pair)))

    def _add(self, block: Block, prefix: str) -> None:
        ops = cut_operations(block)
        for op in block.select("micro_batch", "F"):
            for name in (*op.inputs, *op.outputs):
                if prefix + name not in self.dims:
                    self.dims[prefix + name] = block.tensors[name].dims
                    self.of_tensor[prefix + name] = []
                    self.named[name] = (*self.named.get(name, ()), prefix + name)
        outputs = {name for op in ops for name in op.outputs}
        groups: dict[str, list[str]] = defaultdict(list)  # queue -> the operations that read its numbers
        for reader, queue in queues(block).items():
            groups[queue.name].append(reader)
        aligned = {name: (queue, *readers) for queue, readers in groups.items() for name in (queue, *readers)}
        for op in sorted(ops, key=lambda operation: operation.name):
            self.by_name[prefix + op.name] = _target(block, op, prefix, aligned.get(op.name, ()))
            for name in {*op.inputs} - outputs | {*op.outputs}:
                self.of_tensor[prefix + name].append(prefix + op.name)
        for name in (*block.takes, *(name for name in block.gives if block.tensors[name].dims)):
            self.by_name[BOUNDARY] = _PinTarget(name=BOUNDARY, dims=self.dims[prefix + name])
        for name in block.takes:
            self.of_tensor[prefix + name].insert(0, BOUNDARY)


def _target(block: Block, op: Op, prefix: str, aligned: tuple[str, ...]) -> _PinTarget:
    tied = dict(op.kind.tied_dims())
    read = dict.fromkeys(dim for name in op.inputs for dim in block.tensors[name].dims)
    summed: dict[str, Dims] = {}
    for name in op.outputs:  # it sums over what it reads and this output lacks, unless that lives on in a tied dim
        dims = block.tensors[name].dims
        live_dims = {*dims, *op.kind.whole_dims(), *tied, *(source for dim in dims for source in tied.get(dim, ()))}
        summed[prefix + name] = tuple(dim for dim in read if dim not in live_dims)
    return _PinTarget(
        name=prefix + op.name,
        dims=op_dims(block, op),
        whole=op.kind.whole_dims(),
        tied=tied,
        aligned=tuple(prefix + name for name in aligned),
        summed=summed,
        maximises=isinstance(op.kind, Reduce) and op.kind.function == "max",
    )


def _pin_faults(targets: _PinTargets, pin: Pin) -> Iterator[Fault]:
    """Yield the faults of a pin by itself."""
    names = targets.named.get(pin.tensor, ())
    if not names:
        message = f"no tensor of the forward pass has this name. {nearest(pin.tensor, list(targets.named))}"
        yield pin.fault(message)
    stated = tuple(dim for dim, _ in pin.layout.dims)
    for name in names:
        dims = targets.dims[name]
        if stated != dims:
            yield pin.fault(f"has the dims [{', '.join(dims)}], not [{', '.join(stated)}]")
            continue
        if not targets.of_tensor[name]:
            yield pin.fault(f"no operation of the forward pass reads {name}: nothing would change")
        for target in (targets.by_name[target_name] for target_name in targets.of_tensor[name]):
            for dim, cut in pin.layout.dims:
                if cut and not target.sources(dim):
                    reason = f"{target.name} needs {dim} whole: it cannot be cut over {show_atoms(cut)}"
                    yield pin.fault(f"{reason}. Pin {dim} without atoms")
            for sign, atoms, gives in (
                ("+", pin.layout.sums, not target.maximises),
                ("^", pin.layout.maxima, target.maximises),
            ):
                if atoms and not (gives and target.summed.get(name)):
                    yield pin.fault(f"{target.name} leaves nothing pending as {sign}{show_atoms(atoms)}. Leave it out")
    yield from (pin.fault(str(fault)) for fault in pin.layout.faults(_SIZES))


class _Collector:
    """The constraints while they are gathered, and the conflicts between them."""

    def __init__(self, targets: _PinTargets, pins: Sequence[Pin]) -> None:
        self._pins = pins
        self.targets = targets
        self.cuts: dict[str, dict[str, PinnedCut]] = {}
        self.sums: dict[str, dict[str, Dims]] = {}
        self.conflicts: dict[tuple[Pin, Pin], tuple[int, Fault]] = {}  # with the length of the path between the pins
        self._pending: dict[tuple[str, str], PinnedCut] = {}

    def add(self, pin: Pin, name: str) -> None:
        """Record the cuts and pending sums that a pin fixes at the targets of its tensor."""
        for target in (self.targets.by_name[target_name] for target_name in self.targets.of_tensor[name]):
            path = _path(name, target.name)
            for dim, cut in pin.layout.dims:
                self._pin(target, dim, PinnedCut(atoms=cut, pin=pin, path=path))
            for atom in (*pin.layout.sums, *pin.layout.maxima):
                self.sums.setdefault(target.name, {})[atom] = target.summed[name]
                self._pending[target.name, atom] = PinnedCut(atoms=(atom,), pin=pin, path=path)

    def split_ties(self) -> None:
        """Where a tied dim is pinned, pin the dims to which it is tied: a run of the atoms for each, in order."""
        for name in sorted(self.cuts):
            target = self.targets.by_name[name]
            for dim in sorted(self.cuts[name].keys() & target.tied.keys()):
                cut = self.cuts[name][dim]
                runs = _runs(target, dim, cut.atoms, self.cuts[name])
                for source, run in (runs or {}).items():
                    self._pin(target, source, PinnedCut(atoms=run, pin=cut.pin, path=cut.path))
                if runs is None:  # blame the first pin that leaves no fitting runs by itself, or with the others
                    source_text, pinned = " and ".join(target.tied[dim]), self.cuts[name]
                    sources = [candidate for candidate in target.sources(dim) if candidate in pinned]
                    alone = [
                        candidate
                        for candidate in sources
                        if _runs(target, dim, cut.atoms, {candidate: pinned[candidate]}) is None
                    ]
                    clash = f"{name} has {dim} cut as {source_text}"
                    self._conflict(clash, pinned[(*alone, *sources)[0]], cut, f"Cut {dim} as you cut {source_text}")

    def verify(self) -> None:
        """Note where an atom would have two uses in one operation."""
        for name, pinned in sorted(self.cuts.items()):
            target = self.targets.by_name[name]
            for first_dim, second_dim in itertools.combinations([dim for dim in target.free if dim in pinned], 2):
                both = tuple(atom for atom in pinned[first_dim].atoms if atom in pinned[second_dim].atoms)
                if both:
                    clash = f"{name} cannot use {show_atoms(both)} for {first_dim} and for {second_dim}"
                    self._conflict(clash, pinned[first_dim], pinned[second_dim], "Give them different atoms")
            self._verify_sums(target)

    def _verify_sums(self, target: _PinTarget) -> None:
        """Note where an atom should leave a sum pending, but is used elsewhere or has no dim to be summed over."""
        pinned = self.cuts[target.name]
        for atom, summed in self.sums.get(target.name, {}).items():
            is_blocked = all(dim in pinned and atom not in pinned[dim].atoms for dim in summed)
            used = [dim for dim in target.free if dim in pinned and dim not in summed and atom in pinned[dim].atoms]
            for dim in used or (summed if is_blocked else ()):
                clash = f"{target.name} has {dim} {pinned[dim]}, and no sum stays pending over {atom}"
                pending = self._pending[target.name, atom]
                self._conflict(clash, pinned[dim], pending, "Leave a dim free to be summed over")

    def _pin(self, target: _PinTarget, dim: str, cut: PinnedCut) -> None:
        """Note a cut here and, for linked dims, at all aligned operations."""
        linked = {*target.tied, *(source for sources in target.tied.values() for source in sources)}
        everywhere = target.aligned and dim in linked
        for name in target.aligned if everywhere else (target.name,):
            path = cut.path if name == target.name else _path(*cut.path, target.aligned[0], name)
            new_cut = PinnedCut(atoms=cut.atoms, pin=cut.pin, path=path)
            first = self.cuts.setdefault(name, {}).setdefault(dim, new_cut)
            if first.atoms != new_cut.atoms:
                clash = f"{name} cannot have {dim} {first} and {new_cut}"
                self._conflict(clash, first, new_cut, "Give them the same cut")

    def _conflict(self, clash: str, first: PinnedCut, second: PinnedCut, advice: str) -> None:
        """Note two pins that exclude each other once, where the path between them is shortest."""
        first, second = sorted((first, second), key=lambda cut: self._pins.index(cut.pin))
        length = len(first.path) + len(second.path)
        if (first.pin, second.pin) not in self.conflicts or length < self.conflicts[first.pin, second.pin][0]:
            chain = _chain(first.path, second.path)
            message = (
                f"{first.pin} and {second.pin} exclude each other: {clash} ({chain}). {advice}, or leave one pin out"
            )
            self.conflicts[first.pin, second.pin] = length, Fault(where="pins", message=message)


def _runs(target: _PinTarget, dim: str, atoms: tuple[str, ...], pinned: Mapping[str, PinnedCut]) -> Cuts | None:
    """Return the runs of a tied dim's atoms for the dims it is tied to, long ones first, that agree with all pins."""
    sources = target.sources(dim)
    for ends in itertools.combinations_with_replacement(range(len(atoms) + 1), len(sources) - 1):
        bounds = (0, *(len(atoms) - end for end in reversed(ends)), len(atoms))
        runs = {source: atoms[start:stop] for source, start, stop in zip(sources, bounds, bounds[1:], strict=False)}
        if all(source not in pinned or pinned[source].atoms == run for source, run in runs.items()):
            return runs
    return None


def _path(*names: str) -> tuple[str, ...]:
    """Return names in a row, neighbours of one name once: a tensor has the name of the operation that makes it."""
    return tuple(name for name, _ in itertools.groupby(names))


def _chain(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """Print the way from one pinned tensor over operations to the other.

    >>> _chain(("attn_in", "q"), ("q.weight", "q")), _chain(("q", ), ("q.weight", "q"))
    ('attn_in -> q <- q.weight', 'q <- q.weight')
    """
    return first[0] if first == second else " <- ".join([" -> ".join(first), *reversed(second[:-1])])
