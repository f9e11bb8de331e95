"""What pinned layouts ask of which operation, or why they cannot hold."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import Fault, InputError, nearest
from autoshard.layout.layout import Cuts, show_atoms, whole_axes
from autoshard.layout.pin import Pin
from autoshard.layout.sites import Net, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A pin that asks for the cut of one dim of a site; ``path`` leads from the pinned tensor to the site."""

    atoms: tuple[str, ...]
    pin: Pin
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What pins fix: the cut of dims, and which dims an atom may cut so that a sum stays pending over it."""

    cuts: Mapping[str, Mapping[str, Claim]]
    sums: Mapping[str, Mapping[str, tuple[str, ...]]]

    def places(self, site: Site, atom: str) -> tuple[str, ...]:
        """Return the dims that pins leave to an atom which they do not place there themselves."""
        claimed = self.cuts.get(site.name, {})
        open_dims = self.sums.get(site.name, {}).get(atom, site.free)
        shut = {home for dim in claimed for home in site.homes(dim)}
        return tuple(dim for dim in open_dims if dim not in shut)


def claims_of(net: Net, atoms: Mapping[str, int], sizes: Mapping[str, int] | None, pins: Iterable[Pin]) -> Claims:
    """Read what pins fix; every fault and every conflict is told at once."""
    pins = tuple(pins)
    faults = dict.fromkeys(fault for pin in pins for fault in _pin_faults(net, atoms, sizes, pin))
    if faults:
        raise InputError(faults)
    collector = _Collector(net, atoms, pins)
    for pin in pins:
        for name in net.called.get(pin.tensor, ()):
            collector.add(pin, name)
    collector.split_ties()
    collector.verify()
    if collector.conflicts:
        raise InputError(collector.conflicts.values())
    return Claims(cuts=collector.cuts, sums=collector.sums)


def _pin_faults(net: Net, atoms: Mapping[str, int], sizes: Mapping[str, int] | None, pin: Pin) -> Iterator[Fault]:
    """Yield what is wrong with one pin by itself."""
    where = f"{pin.origin} {pin.tensor}"
    names = net.called.get(pin.tensor, ())
    if not names:
        message = f"no tensor of the forward pass has this name. {nearest(pin.tensor, list(net.called))}"
        yield Fault(where=where, message=message)
    stated = tuple(dim for dim, _ in pin.layout.dims)
    for name in names:
        dims = net.tensors[name]
        if stated != dims:
            yield Fault(where=where, message=f"has the dims [{', '.join(dims)}], not [{', '.join(stated)}]")
        elif not net.holders[name]:
            yield Fault(where=where, message=f"no operation of the forward pass reads {name}: nothing would change")
        else:
            yield from _use_faults(net, atoms, pin, name)
    for fault in pin.layout.faults(atoms, None if sizes is None else _known(sizes, stated)):
        yield Fault(where=where, message=f"{fault}")


def _known(sizes: Mapping[str, int], dims: Sequence[str]) -> Mapping[str, int]:
    """Return the sizes; a dim that nothing has is told where dims are compared, not here."""
    return {dim: sizes.get(dim, 2**62) for dim in dims}


def _use_faults(net: Net, atoms: Mapping[str, int], pin: Pin, name: str) -> Iterator[Fault]:
    """Yield where an operation that makes or reads the tensor cannot be cut so."""
    where = f"{pin.origin} {pin.tensor}"
    for site in (net.sites[holder] for holder in net.holders[name]):
        for dim, cut in pin.layout.dims:
            if _real(cut, atoms) and not site.homes(dim):
                reason = f"{site.name} needs {dim} whole: it cannot be cut over {show_atoms(cut)}"
                yield Fault(where=where, message=f"{reason}. Pin {dim} without atoms")
        for sign, names, gives in (
            ("+", pin.layout.sums, not site.maximises),
            ("^", pin.layout.maxima, site.maximises),
        ):
            if _real(names, atoms) and not (gives and site.summed.get(name)):
                reason = f"{site.name} leaves nothing pending as {sign}{show_atoms(names)}"
                yield Fault(where=where, message=f"{reason}. Leave it out")


def _real(atoms: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Drop atoms of size 1, which cut nothing; one that is unknown is told elsewhere."""
    return tuple(atom for atom in atoms if sizes.get(atom, 2) > 1)


class _Collector:
    """Claims while they are gathered, and the conflicts between them."""

    def __init__(self, net: Net, atoms: Mapping[str, int], pins: Sequence[Pin]) -> None:
        self._order = pins
        self.net = net
        self.atoms = atoms
        self.cuts: dict[str, dict[str, Claim]] = {}
        self.sums: dict[str, dict[str, tuple[str, ...]]] = {}
        self.conflicts: dict[tuple[Pin, Pin], Fault] = {}
        self._told: dict[tuple[Pin, Pin], int] = {}
        self._asked: dict[tuple[str, str], Claim] = {}

    def add(self, pin: Pin, name: str) -> None:
        """Take in what a pin asks of the sites that hold its tensor."""
        for holder in self.net.holders[name]:
            site = self.net.sites[holder]
            for dim, cut in pin.layout.dims:
                self._claim(site, dim, Claim(atoms=_real(cut, self.atoms), pin=pin, path=_path(name, holder)))
            for atom in _real((*pin.layout.sums, *pin.layout.maxima), self.atoms):
                self.sums.setdefault(holder, {})[atom] = site.summed[name]
                self._asked[holder, atom] = Claim(atoms=(atom,), pin=pin, path=_path(name, holder))

    def split_ties(self) -> None:
        """Where a tied dim is claimed, claim the dims to which it is tied: a run of the atoms for each, in order."""
        for name in sorted(self.cuts):
            site = self.net.sites[name]
            for dim in sorted(self.cuts[name].keys() & site.tied.keys()):
                claim = self.cuts[name][dim]
                fitting = _fitting(site, dim, claim.atoms, self.cuts[name])
                if fitting is None:
                    self._blame_ties(site, dim, claim)
                    continue
                for home, run in fitting.items():
                    self._claim(site, home, Claim(atoms=run, pin=claim.pin, path=claim.path))

    def verify(self) -> None:
        """Tell where an atom would have two uses in one operation."""
        for name, claimed in sorted(self.cuts.items()):
            site = self.net.sites[name]
            for one, two in itertools.combinations([dim for dim in site.free if dim in claimed], 2):
                both = tuple(atom for atom in claimed[one].atoms if atom in claimed[two].atoms)
                if both:
                    clash = f"{name} cannot use {self._show(both)} for {one} and for {two}"
                    self._conflict(clash, claimed[one], claimed[two], "Give them different atoms")
            self._verify_sums(site)

    def _verify_sums(self, site: Site) -> None:
        """Tell where an atom should leave a sum pending, but is used elsewhere or has no dim left to be summed over."""
        claimed = self.cuts[site.name]
        for atom, places in self.sums.get(site.name, {}).items():
            shut = all(place in claimed and atom not in claimed[place].atoms for place in places)
            used = [dim for dim in site.free if dim in claimed and dim not in places and atom in claimed[dim].atoms]
            for dim in used or (places if shut else ()):
                how, over = self._how(claimed[dim].atoms), self._show((atom,))
                clash = f"{site.name} has {dim} {how}, and no sum stays pending over {over}"
                self._conflict(clash, claimed[dim], self._asked[site.name, atom], "Leave a dim free to be summed over")

    def _claim(self, site: Site, dim: str, claim: Claim) -> None:
        """Note a claim here and, for linked dims, wherever they must be cut alike."""
        linked = dim in site.linked or dim in site.tied
        for name in site.alike if linked and site.alike else (site.name,):
            path = claim.path if name == site.name else _through(claim.path, site.alike[0], name)
            held = self.cuts.setdefault(name, {})
            mine = Claim(atoms=claim.atoms, pin=claim.pin, path=path)
            first = held.setdefault(dim, mine)
            if first.atoms != mine.atoms:
                clash = f"{name} cannot have {dim} {self._how(first.atoms)} and {self._how(mine.atoms)}"
                self._conflict(clash, first, mine, "Give them the same cut")

    def _blame_ties(self, site: Site, dim: str, claim: Claim) -> None:
        """Tell the first pin that leaves no fitting runs by itself, or the first of those that do so together."""
        held = {home: self.cuts[site.name][home] for home in site.homes(dim) if home in self.cuts[site.name]}
        alone = [home for home in held if _fitting(site, dim, claim.atoms, {home: held[home]}) is None]
        others = " and ".join(site.tied[dim])
        clash = f"{site.name} has {dim} cut as {others}"
        self._conflict(clash, held[(*alone, *held)[0]], claim, f"Cut {dim} as you cut {others}")

    def _conflict(self, clash: str, one: Claim, two: Claim, advice: str) -> None:
        """Tell two pins that exclude each other once, where the way between them is shortest."""
        one, two = sorted((one, two), key=lambda claim: self._order.index(claim.pin))
        chain = _chain(one.path, two.path)
        message = f"{one.pin} and {two.pin} exclude each other: {clash} ({chain}). {advice}, or leave one pin out"
        length = len(one.path) + len(two.path)
        if length < self._told.get((one.pin, two.pin), length + 1):
            self._told[one.pin, two.pin] = length
            self.conflicts[one.pin, two.pin] = Fault(where="pins", message=message)

    def _how(self, atoms: tuple[str, ...]) -> str:
        return f"cut over {self._show(atoms)}" if atoms else "whole"

    def _show(self, atoms: tuple[str, ...]) -> str:
        return show_atoms(whole_axes(atoms, self.atoms))


def _fitting(site: Site, dim: str, atoms: tuple[str, ...], claimed: Mapping[str, Claim]) -> Cuts | None:
    """Return the runs of a tied dim's atoms for the dims it is tied to, long ones first, that agree with all claims."""
    homes = site.homes(dim)
    for ends in itertools.combinations_with_replacement(range(len(atoms) + 1), len(homes) - 1):
        bounds = (0, *(len(atoms) - end for end in reversed(ends)), len(atoms))
        runs = {home: atoms[start:stop] for home, start, stop in zip(homes, bounds, bounds[1:], strict=False)}
        if all(home not in claimed or claimed[home].atoms == run for home, run in runs.items()):
            return runs
    return None


def _path(*names: str) -> tuple[str, ...]:
    """Return names in a row, neighbours of one name once: a tensor is called as the operation that makes it."""
    return tuple(name for name, _ in itertools.groupby(names))


def _through(path: tuple[str, ...], joint: str, name: str) -> tuple[str, ...]:
    """Lead a path on to a site that must be cut alike, by way of the one that joins them."""
    return _path(*path, joint, name)


def _chain(one: tuple[str, ...], two: tuple[str, ...]) -> str:
    """Print the way from one pinned tensor over operations to the other.

    >>> _chain(("attn_in", "q"), ("q.weight", "q")), _chain(("q", ), ("q.weight", "q"))
    ('attn_in -> q <- q.weight', 'q <- q.weight')
    """
    if one == two:
        return one[0]
    return " <- ".join([" -> ".join(one), *reversed(two[:-1])])
