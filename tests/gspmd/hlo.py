"""The collectives of a program that XLA has partitioned, read off its text."""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.spec.mesh import Mesh
from tests.gspmd.sent import Sent

_LINE = re.compile(
    r"^ +(?:ROOT )?%(?P<name>[\w.-]+) = \w+\[(?P<shape>[\d,]*)\]\S* (?P<kind>[\w-]+)\((?P<reads>[^)]*)\)(?P<rest>.*)$",
    re.MULTILINE,
)
_LISTED = re.compile(r"replica_groups=\{(?P<rows>\{[\d,{}]+\})\}")
_COUNTED = re.compile(r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

Groups = frozenset[frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a program."""

    name: str
    kind: str
    elements: int
    reads: tuple[str, ...]
    rest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A collective of the text: its kind, the elements of the largest buffer, the groups that it goes over in turn."""

    kind: str
    elements: int
    over: tuple[Groups, ...]


def sent_by_xla(text: str, mesh: Mapping[str, int]) -> Counter[Sent]:
    """Return the collectives of a program, which must all go along axes of the mesh."""
    found: Counter[Sent] = Counter()
    for one in _written(text):
        over = {atom for groups in one.over for atom in _atoms(groups, mesh)}
        found[Sent(kind=one.kind, elements=one.elements, over=tuple(atom for atom in mesh if atom in over))] += 1
    return found


def bytes_by_xla(text: str, dtype_bytes: int) -> float:
    """Return the bytes that a rank sends, counted as for autoshard; a permutation sends a whole buffer."""
    total = 0.0
    for one in _written(text):
        ranks = math.prod(map(_size, one.over))
        share = (2 if one.kind == "all_reduce" else 1) * (ranks - 1) / ranks
        total += one.elements * dtype_bytes * (1 if one.kind == "collective_permute" else share)
    return total


def _written(text: str) -> Iterator[Written]:
    """Yield the collectives of a program, as a backend with all kinds of collectives would send them.

    XLA's partitioner writes no reduce-scatter but an all-reduce of which every reader takes a slice, and sums over two
    axes of the mesh one after the other. The former counts as a reduce-scatter, the latter as one all-reduce: both ways
    GSPMD sends less than what its text says, never more.
    """
    program = {one.name: one for one in _instructions(text)}
    readers: Mapping[str, list[Instruction]] = defaultdict(list)
    for one in program.values():
        for name in one.reads:
            readers[name].append(one)
    for one in program.values():
        after = readers[one.name]
        if one.kind == "all-reduce" and [reader.kind for reader in after] != [
            one.kind
        ]:  # or it is summed further there
            sums = [one]
            while (before := program[sums[-1].reads[0]]).kind == one.kind and len(readers[before.name]) == 1:
                sums.append(before)
            over = tuple(_groups(each.rest) for each in sums)
            most = one.elements / math.prod(map(_size, over))
            sliced = after and all(reader.kind == "dynamic-slice" and reader.elements <= most for reader in after)
            yield Written(kind="reduce_scatter" if sliced else "all_reduce", elements=one.elements, over=over)
        elif one.kind == "collective-permute":
            yield Written(kind="collective_permute", elements=one.elements, over=())
        elif one.kind in _COLLECTIVES and one.kind != "all-reduce":
            groups = _groups(one.rest)
            elements = one.elements * (_size(groups) if one.kind == "reduce-scatter" else 1)
            yield Written(kind=one.kind.replace("-", "_"), elements=elements, over=(groups,))


def _instructions(text: str) -> list[Instruction]:
    """Read a program line by line; what gives several tensors sends nothing.

    >>> one, = _instructions("  %a.1 = f64[3,40]{1,0} all-reduce(%dot.5), replica_groups={{0,1}}, to_apply=%add")
    >>> one.name, one.kind, one.elements, one.reads
    ('a.1', 'all-reduce', 120, ('dot.5',))
    """
    found = [
        Instruction(
            name=line["name"],
            kind=line["kind"],
            elements=math.prod(int(size) for size in line["shape"].split(",") if size),
            reads=tuple(re.findall(r"%([\w.-]+)", line["reads"])),
            rest=line["rest"],
        )
        for line in _LINE.finditer(text)
    ]
    unread = [kind for kind in _COLLECTIVES if text.count(f" {kind}(") != sum(one.kind == kind for one in found)]
    assert not unread, f"the text has {unread} of another form"
    return found


def _atoms(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the atoms along which the ranks of groups differ."""
    laid = Mesh.virtual(**mesh)
    for count in range(1, len(mesh) + 1):
        for atoms in itertools.combinations(mesh, count):
            if groups == frozenset(map(frozenset, laid.groups(atoms))):
                return atoms
    raise AssertionError(f"no axes of {mesh} group ranks as {groups}")


def _size(groups: Groups) -> int:
    return len(next(iter(groups)))


def _groups(rest: str) -> Groups:
    """Read groups of ranks: rows, or all ranks counted along some axes, transposed, and cut into rows.

    >>> sorted(map(sorted, _groups(", replica_groups=[4,2]<=[2,4]T(1,0), dimensions={1}")))
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    >>> sorted(map(sorted, _groups(", replica_groups={{0,4},{1,5}}, to_apply=%add")))
    [[0, 4], [1, 5]]
    """
    if listed := _LISTED.search(rest):
        return frozenset(frozenset(map(int, row.split(","))) for row in re.findall(r"[\d,]*\d", listed["rows"]))
    counted = _COUNTED.search(rest)
    assert counted, f"no groups in {rest}"
    dims = [int(size) for size in counted["dims"].split(",")]
    order = [int(axis) for axis in counted["order"].split(",")] if counted["order"] else None
    rows = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(int(counted["shape"].split(",")[0]), -1)
    return frozenset(frozenset(row) for row in rows.tolist())
