"""What a rank sends, in the same words for the plan's table, for calls of torch_xla and for the text of a graph."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Groups = tuple[tuple[int, ...], ...]
_BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "bf16": 2, "f16": 2, "pred": 1}
_DTYPES = {"torch.float64": "f64", "torch.float32": "f32", "torch.bfloat16": "bf16"}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(
    rf"^ +(?:ROOT )?%[\w.-]+ = (?P<makes>.+?) (?P<kind>{'|'.join(_KINDS)})\((?P<reads>.*?)\)(?P<rest>, .*)$",
    re.MULTILINE,
)
_SHAPE = re.compile(r"\b(?P<dtype>[a-z]+\d*)\[(?P<sizes>[\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=\{(?P<rows>[\d,{}]*)\}")
_CUT = "cut"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sent:
    """One collective: its kind, the bytes of a rank's buffer where that is largest, and all its groups of ranks.

    >>> one = Sent.parse("all_gather 512 B of {0,1}{2,3}")
    >>> one.groups, str(one)
    (((0, 1), (2, 3)), 'all_gather 512 B of {0,1}{2,3}')
    """

    kind: str
    size_bytes: int
    groups: Groups

    @classmethod
    def parse(cls, text: str) -> "Sent":
        """Read the text form."""
        kind, size, _, _, groups = text.split()
        return cls(kind=kind, size_bytes=int(size), groups=_rows(groups))

    def __str__(self) -> str:
        """Print the text form."""
        rows = ("{" + ",".join(map(str, one)) + "}" for one in self.groups)
        return f"{self.kind} {self.size_bytes} B of {''.join(rows)}"


def in_graph(text: str) -> list[Sent]:
    """Return the collectives of a graph that go to other ranks; what gives several tensors is one.

    >>> one = "  %all-reduce.1 = (f32[4,8]{1,0}, f32[]) all-reduce(f32[4,8]{1,0} %a.1, f32[] %b.1)"
    >>> str(in_graph(one + ", replica_groups={{0,1},{2,3}}, to_apply=%MaxComputation.7")[0])
    'all_reduce_max 128 B of {0,1}{2,3}'
    """
    found = list(_LINE.finditer(text))
    for kind in _KINDS:
        assert text.count(f" {kind}(") == sum(one["kind"] == kind for one in found), f"{kind} of another form"
    made = (_of_line(one) for one in found)
    return [one for one in made if len(one.groups[0]) > 1]


def _of_line(line: re.Match[str]) -> Sent:
    makes, reads = ([_size(one) for one in _SHAPE.finditer(line[part])] for part in ("makes", "reads"))
    if line["kind"] == "all-reduce":
        makes, reads = makes[:-1], reads[:-1]  # the last is the token that orders sums
    listed = _GROUPS.search(line["rest"])
    assert listed, f"no groups in {line['rest']}"
    largest = "_max" if "to_apply=%Max" in line["rest"] else ""
    kind = f"{line['kind'].replace('-', '_')}{largest}"
    return Sent(kind=kind, size_bytes=max(sum(makes), sum(reads)), groups=_rows(listed["rows"]))


def _size(shape: re.Match[str]) -> int:
    return _BYTES[shape["dtype"]] * math.prod(int(size) for size in shape["sizes"].split(",") if size)


def _rows(text: str) -> Groups:
    return tuple(sorted(tuple(map(int, row.split(","))) for row in re.findall(r"[\d,]*\d", text.replace("},{", "} {"))))


def in_calls(calls: Sequence[str]) -> Iterator[list[Sent]]:
    """Yield for every graph of a step, in order, what ranks asked torch_xla to send in it."""
    graph: list[Sent] = []
    for name, how, tensors, groups, _ in map(json.loads, calls):
        if name == _CUT:
            yield graph
            graph = []
        elif len(groups[0]) > 1:
            graph.append(_of_call(name, how, tensors, groups))
    assert not graph, f"never run: {graph}"


def _of_call(name: str, how: str, tensors: Any, groups: Sequence[Sequence[int]]) -> Sent:
    sizes = [_BYTES[_DTYPES[dtype]] * math.prod(shape) for dtype, shape in tensors]
    rows = tuple(sorted(map(tuple, groups)))
    kind = next(kind for kind in ("all_gather", "all_reduce", "reduce_scatter") if kind in name)
    if name.endswith("_out"):
        sizes = [max(sizes)]  # one of the two is where the result goes
    wider = len(rows[0]) if kind == "all_gather" and not name.endswith("_out") else 1
    return Sent(kind=f"{kind}{'_max' if how == 'max' else ''}", size_bytes=sum(sizes) * wider, groups=rows)
