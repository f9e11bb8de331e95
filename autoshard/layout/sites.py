"""A graph as propagation sees it: where an atom may cut something, and which places share a tensor.

A site is a forward operation, or the boundary between blocks; at a site an atom cuts one dim or none. Delivers are no
sites: they join the maker of a tensor with its readers, whatever each of them calls the dims.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.graph.block import Block, OpGraph
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.kinds.pointwise import Reduce
from autoshard.graph.op import Dims, Op

BOUNDARY = "boundary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place of cutting: ``dims`` in the order in which its tensors name them, tied ones last.

    ``weights`` are the dims whose cut also cuts a parameter that it reads; ``alike`` names the sites, itself among
    them, that must cut ``linked`` dims as it does, first the one that joins them; ``summed`` holds, for each tensor
    that it makes, the dims over which it sums (or takes the maximum, if it ``maximises``).
    """

    name: str
    dims: Dims
    whole: Dims = ()
    tied: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    weights: Dims = ()
    alike: tuple[str, ...] = ()
    linked: Dims = ()
    summed: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    maximises: bool = False

    @property
    def free(self) -> Dims:
        """The dims that an atom may cut on its own."""
        return tuple(dim for dim in self.dims if dim not in self.whole and dim not in self.tied)

    def homes(self, dim: str) -> Dims:
        """Return the dims that an atom cuts when it cuts this one: itself, or those to which it is tied."""
        return tuple(home for home in self.tied.get(dim, (dim,)) if home in self.free)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A site at a tensor: ``names`` are its dims as this site calls them, ``rank`` counts its tensors, inputs first."""

    site: str
    names: Dims
    rank: int
    makes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """All sites; of each tensor that sites share the ends; of each tensor its dims and the sites that give its layout.

    ``called`` holds the tensors that a name may stand for.
    """

    sites: Mapping[str, Site]
    shared: tuple[tuple[End, ...], ...]
    holders: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Dims]
    called: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: OpGraph | Block) -> "Net":
        """Read a whole step, whose names are ``layer.q``, or a single block, whose names are ``q``."""
        if isinstance(graph, Block):
            return _joined([_BlockNet(graph, "")], {})
        return _joined([_BlockNet(block, f"{block.kind}.") for block in graph.blocks], graph.tied)


def _joined(blocks: "Sequence[_BlockNet]", ties: Mapping[str, str]) -> Net:
    """Put blocks side by side: one boundary between all of them, tied weights shared."""
    sites = {site.name: site for block in blocks for site in block.sites()}
    hubs = {name: ends for block in blocks for name, ends in block.hubs().items()}
    for copy, origin in ties.items():
        hubs[origin] = (*hubs[origin], *hubs.pop(copy))
    carried = [name for block in blocks for name in block.carried()]
    tensors = {name: dims for block in blocks for name, dims in block.tensors().items()}
    if carried:
        sites[BOUNDARY] = Site(name=BOUNDARY, dims=tensors[carried[0]])
        for rank, name in enumerate(carried):
            end = End(site=BOUNDARY, names=tensors[name], rank=rank, makes=not any(end.makes for end in hubs[name]))
            hubs[name] = (*hubs[name], end)
    return Net(
        sites=sites,
        shared=tuple(ends for ends in hubs.values() if len(ends) > 1),
        holders={name: sites for block in blocks for name, sites in block.holders().items()},
        tensors=tensors,
        called=_called(blocks, ties),
    )


def _called(blocks: "Sequence[_BlockNet]", ties: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """Let a name without its block stand for that tensor in every block that has it, and a tied weight for both."""
    short: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        for name in block.tensors():
            plain = name.removeprefix(block.prefix)
            short[plain] = (*short.get(plain, ()), name)
    found = {**short, **{name: (name,) for block in blocks for name in block.tensors()}}
    for pair in ties.items():
        for name, tensors in found.items():
            if set(pair) & set(tensors):
                found[name] = tuple(dict.fromkeys((*tensors, *pair)))
    return found


class _BlockNet:
    """One block's part of a net; ``prefix`` goes before every name."""

    def __init__(self, block: Block, prefix: str) -> None:
        forward = block.select("micro_batch", "F")
        self.block = block
        self.prefix = prefix
        self.ops = [op for op in forward if not isinstance(op.kind, Deliver)]
        self._delivers = {op.outputs[0]: op for op in forward if isinstance(op.kind, Deliver)}
        self._made = {name for op in self.ops for name in op.outputs}

    def tensors(self) -> Mapping[str, Dims]:
        """Return the dims of every tensor of the forward pass."""
        names = [name for op in self.block.select("micro_batch", "F") for name in (*op.inputs, *op.outputs)]
        return {self.prefix + name: self.block.tensors[name].dims for name in names}

    def carried(self) -> Iterator[str]:
        """Yield the hidden state that comes in and the one that goes out."""
        yield from (self.prefix + name for name in (self.block.carry_in, self.block.carry_out) if name)

    def holders(self) -> Mapping[str, tuple[str, ...]]:
        """Return for each tensor the sites whose cuts are its layout: its maker's, or else its readers'."""
        found: dict[str, list[str]] = {name: [] for name in self.tensors()}
        for op in self.ops:
            for name in {*op.inputs} - self._made | {*op.outputs}:
                found[self.prefix + name].append(self.prefix + op.name)
        if self.block.carry_in:
            found[self.prefix + self.block.carry_in].append(BOUNDARY)
        return {name: tuple(sorted(sites)) for name, sites in found.items()}

    def sites(self) -> Iterator[Site]:
        """Yield the block's operations."""
        groups = self._alike()
        for op in self.ops:
            tied = dict(op.kind.tied_dims())
            alike = groups.get(op.name, ())
            yield Site(
                name=self.prefix + op.name,
                dims=tuple(dict.fromkeys((*self._dims(op.inputs), *self._dims(op.outputs), *tied))),
                whole=op.kind.whole_dims(),
                tied=tied,
                weights=self._weight_dims(op),
                alike=tuple(self.prefix + name for name in alike),
                linked=tuple(dim for dims in tied.values() for dim in dims) if alike else (),
                summed={self.prefix + name: self._summed(op, name) for name in op.outputs},
                maximises=isinstance(op.kind, Reduce) and op.kind.function == "max",
            )

    def hubs(self) -> Mapping[str, tuple[End, ...]]:
        """Return the ends of every tensor that is made, read or delivered, under the name that it is made by."""
        found: dict[str, tuple[End, ...]] = {}
        for op in self.ops:
            site = self.prefix + op.name
            for rank, name in enumerate((*op.inputs, *op.outputs)):
                makes = rank >= len(op.inputs)
                root, names = (name, self._dims([name])) if makes else self._root(name)
                end = End(site=site, names=names, rank=rank, makes=makes)
                found[self.prefix + root] = (*found.get(self.prefix + root, ()), end)
        for name in self.carried():
            found.setdefault(name, ())
        return found

    def _root(self, name: str) -> tuple[str, Dims]:
        """Return the tensor behind its delivers, and its dims as the reader of ``name`` calls them."""
        names = self._dims([name])  # a deliver renames dims where they stand: positions correspond
        while name in self._delivers:
            name = self._delivers[name].inputs[0]
        return name, names

    def _dims(self, names: Sequence[str]) -> Dims:
        return tuple(dim for name in names for dim in self.block.tensors[name].dims)

    def _weight_dims(self, op: Op) -> Dims:
        weights = [name for name in op.inputs if self.block.tensors[name].role == "parameter"]
        return tuple(dim for dim in self._dims(weights) if dim not in op.kind.whole_dims())

    def _summed(self, op: Op, output: str) -> Dims:
        """Return the dims that it reads and this output lacks, unless they live on in a dim that is tied to them."""
        held = [
            home
            for dim in self._dims([output])
            for home in (dim, *dict(op.kind.tied_dims()).get(dim, ()), *op.kind.whole_dims())
        ]
        return tuple(
            dim for dim in dict.fromkeys(self._dims(op.inputs)) if dim not in (*held, *dict(op.kind.tied_dims()))
        )

    def _alike(self) -> Mapping[str, tuple[str, ...]]:
        """Group operations that tie the same dims and read places which one of them counted: places are local."""
        groups: dict[str, tuple[str, ...]] = {}
        for op in self.ops:
            counted = {name for name in op.outputs if self.block.tensors[name].dtype == "int64"}
            ties = op.kind.tied_dims()
            readers = [
                other.name
                for other in self.ops
                if other.kind.tied_dims() == ties and counted & {self._root(name)[0] for name in other.inputs}
            ]
            if ties and readers:
                groups |= dict.fromkeys((op.name, *readers), (op.name, *readers))
        return groups
