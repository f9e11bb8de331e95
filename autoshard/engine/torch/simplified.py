"""Graphs of torch's operations with fewer kernels and the same numbers, before a compiler takes them.

The kernels of a block are written each by itself, so that several compute the same thing of what a router chose.
Compilers start a kernel for each count, scan and scatter that is left.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map_only

_aten, _prims = torch.ops.aten, torch.ops.prims
_Operation = Any  # a node of a graph: torch's type of its arguments is all that an argument may be
_FEW = 8  # numbers along a dim that are found, or written, by so many comparisons with all of it
_MOST_COMPARED = 1024  # numbers of a row that a compiler holds at a time: not those of a vocabulary


def simplify(graph: GraphModule) -> None:
    """Compute equal things once, and counts from scans; find and write few numbers of a row by comparisons."""
    _compute_once(graph.graph)
    for node in [*graph.graph.nodes]:
        if node.target is _aten.sum.dim_IntList:
            _count_by_scan(graph.graph, node)
        elif node.target is _aten.scatter.src:
            _write_by_comparison(graph.graph, node)
        elif node.target is _aten.scatter.value:
            _write_number_by_comparison(graph.graph, node)
        elif node.target is _aten.sort.stable:
            _find_by_comparison(graph.graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _compute_once(graph: Graph) -> None:
    """Let an operation of the same arguments stand once; results of the graph keep memories of their own."""
    results, first = {*graph.output_node().all_input_nodes}, dict[str, Node]()
    for node in [*graph.nodes]:
        if node.op == "call_function" and _is_pure(node.target):
            key = repr((str(node.target), node.args, node.kwargs))  # which names nodes, and tells 1 from 1.0
            earlier = first.setdefault(key, node)
            if earlier is not node and node not in results:
                node.replace_all_uses_with(earlier)
                graph.erase_node(node)


def _is_pure(target: Any) -> bool:
    """Say whether an operation changes nothing, draws no numbers, and returns no memory that is to be filled."""
    if not hasattr(target, "overloadpacket"):
        return target.__name__ == "getitem"
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not (random or target._schema.is_mutable or "empty" in target.overloadpacket.__name__)


def _count_by_scan(graph: Graph, total: _Operation) -> None:
    """Take the sum of whole numbers along a dim from the end of their running sum, where that is computed, too."""
    numbers, dims, *options = total.args
    if options or total.kwargs or not dims or len(dims) != 1:
        return
    value, (dim,) = numbers.meta["val"], dims
    scans = (user for user in numbers.users if user.target is _aten.cumsum.default and user.args == (numbers, dim))
    scan = next(scans, None)
    if scan is None or scan.kwargs or value.is_floating_point() or not isinstance(value.shape[dim], int):
        return
    if value.shape[dim]:
        numbers.append(scan)  # which reads nothing else, so that it may stand before all that reads the sum
        with graph.inserting_before(total):
            total.replace_all_uses_with(_call(graph, _aten.select.int, scan, dim, value.shape[dim] - 1))


def _write_by_comparison(graph: Graph, scatter: _Operation) -> None:
    """Write few numbers along the last dim of a constant in one pass over the result: each looks who is its own."""
    base, dim, index, source = scatter.args
    shape, written = scatter.meta["val"].shape, index.meta["val"].shape
    if base.target is not _aten.full.default or scatter.kwargs or dim not in (-1, len(shape) - 1):
        return
    if written[:-1] != shape[:-1] or source.meta["val"].shape != written or not _is_few(written[-1]):
        return
    if not isinstance(shape[-1], int) or shape[-1] > _MOST_COMPARED:
        return
    with graph.inserting_before(scatter):
        places = _counted(graph, shape[-1], index)
        number = _constant(graph, -1, index)  # of those that are written here
        for column in range(written[-1]):
            place = _call(graph, _aten.slice.Tensor, index, -1, column, column + 1)
            is_here = _call(graph, _aten.eq.Tensor, place, places)
            number = _call(graph, _aten.where.self, is_here, _constant(graph, column, index), number)
        found = _call(graph, _aten.gather.default, source, -1, _call(graph, _aten.clamp_min.default, number, 0))
        is_written = _call(graph, _aten.ge.Scalar, number, 0)
        scatter.replace_all_uses_with(_call(graph, _aten.where.self, is_written, found, base))


def _write_number_by_comparison(graph: Graph, scatter: _Operation) -> None:
    """Write a number at one place of each row of a constant where the result is read, as a loss does at its labels."""
    base, dim, index, number = scatter.args
    shape, written = [*scatter.meta["val"].shape], [*index.meta["val"].shape]
    if base.target is not _aten.full.default or scatter.kwargs or not shape or not isinstance(shape[dim], int):
        return
    size, shape[dim] = shape[dim], 1
    if written != shape:
        return
    row = [1] * len(shape)
    row[dim] = size
    with graph.inserting_before(scatter):
        places = _call(graph, _aten.reshape.default, _counted(graph, size, index), row)
        is_here = _call(graph, _aten.eq.Tensor, index, places)
        value = _constant(graph, number, scatter)
        scatter.replace_all_uses_with(_call(graph, _aten.where.self, is_here, value, base))


def _find_by_comparison(graph: Graph, order: _Operation) -> None:
    """Find the first few numbers of sorted rows one after the other, in one pass over the rows.

    As in the sort, nan is the largest number, and of equal ones the first comes first.
    """
    numbers = order.args[0]
    value, options = numbers.meta["val"], {"dim": -1, **order.kwargs}
    width, last = value.shape[-1], (-1, value.dim() - 1)
    cuts = [cut for result in order.users for cut in result.users]
    counts = {_first_of_rows(cut, last) for cut in cuts}
    count: Any = counts.pop() if len(counts) == 1 else None
    is_whole = len(order.args) == 1 and options["dim"] in last and options.get("descending") and options.get("stable")
    if not is_whole or not value.is_floating_point() or not _is_few(count):
        return
    if not isinstance(width, int) or not count <= width <= _MOST_COMPARED:
        return
    with graph.inserting_before(order):
        places = _first_places(graph, numbers, count)
        found = _call(graph, _aten.gather.default, numbers, -1, places)
    for cut in cuts:
        cut.replace_all_uses_with(places if cut.args[0].args[1] == 1 else found)


def _first_of_rows(cut: _Operation, last: tuple[int, int]) -> Any:
    """Return how many first numbers of each row a node takes; None if it does something else."""
    is_cut = cut.target is _aten.slice.Tensor and len(cut.args) == 4 and cut.args[1] in last and cut.args[2] == 0
    return cut.args[3] if is_cut else None


def _first_places(graph: Graph, numbers: _Operation, count: int) -> _Operation:
    """Return the places of so many largest numbers of each row, the largest first."""
    columns = _counted(graph, numbers.meta["val"].shape[-1], numbers)
    least, is_nan = _constant(graph, float("-inf"), numbers), _call(graph, _aten.isnan.default, numbers)
    beyond, is_left, places = _constant(graph, _MOST_COMPARED, columns), None, list[_Operation]()
    for _ in range(count):
        left = _call(graph, _aten.where.self, is_left, numbers, least) if is_left else numbers
        largest = _call(graph, _aten.amax.default, left, [-1], True)
        both_nan = _call(graph, _aten.logical_and.default, is_nan, _call(graph, _aten.isnan.default, largest))
        is_it = _call(graph, _aten.logical_or.default, _call(graph, _aten.eq.Tensor, numbers, largest), both_nan)
        is_it = _call(graph, _aten.logical_and.default, is_it, is_left) if is_left else is_it
        place = _call(graph, _aten.amin.default, _call(graph, _aten.where.self, is_it, columns, beyond), [-1], True)
        is_other = _call(graph, _aten.ne.Tensor, columns, place)
        is_left = _call(graph, _aten.logical_and.default, is_left, is_other) if is_left else is_other
        places.append(place)
    return _call(graph, _aten.cat.default, places, -1)


def _is_few(count: Any) -> bool:
    return isinstance(count, int) and 0 < count <= _FEW


def _counted(graph: Graph, count: int, like: _Operation) -> _Operation:
    """Insert the numbers from 0 on, where another tensor lies."""
    options = {"dtype": torch.int64, "device": like.meta["val"].device, "requires_grad": False}
    return _call(graph, _prims.iota.default, count, start=0, step=1, **options)


def _constant(graph: Graph, number: float, like: _Operation) -> _Operation:
    """Insert a number in the format of another tensor."""
    value = like.meta["val"]
    return _call(graph, _aten.full.default, [], number, dtype=value.dtype, device=value.device)


def _call(graph: Graph, target: Any, *arguments: Any, **options: Any) -> _Operation:
    """Insert an operation, with a stand-in for its result."""
    node: _Operation = graph.call_function(target, arguments, options)
    node.meta["val"] = target(*tree_map_only(Node, lambda argument: argument.meta["val"], arguments), **options)
    return node
