"""The passes of a rank as few compiled functions: what torch computes between two collectives is one of them.

Both passes are traced together, without numbers, so that what torch keeps of a region for its gradients is made by one
function and read by another. Collectives, and functions that the user marks, are called as they are. Functions end
where a layer ends, so that equal layers have equal functions, which are compiled once.
"""

import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.node import map_arg

from autoshard.engine.torch.compiled import compiler_of
from autoshard.modules.running.steps import Passes, RankStep, Values, dropping

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_FEWEST = 2  # operations that a compiler can make something of
_STEP, _PLACE, _VALUE = "step", "place", "val"  # what nodes say of themselves; torch adds the last: how a result looks


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCompiler:
    """Compiles the passes of a rank; equal functions once."""

    device: torch.device
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])

    def compiled(self, passes: Passes, values: Values) -> Passes:
        """Return the passes as compiled functions, for parameters and inputs like these."""
        try:
            return _Graph(passes, values).passes(self._function)
        except Exception as error:  # torch raises anything while it traces
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"the module runs without being compiled: {reason}", stacklevel=2)
            return passes

    def _function(self, nodes: Sequence[Node], reads: Sequence[Node], writes: Sequence[Node]) -> Callable[..., Any]:
        places = {node: f"%{number}" for number, node in enumerate((*reads, *nodes))}
        shown = [(str(node.target), _numbered(node, places)) for node in nodes]
        given = [node.meta[_VALUE] for node in reads]
        looks = [(tuple(one.shape), one.stride(), one.dtype) for one in given]
        key = repr((shown, looks, [places[node] for node in writes]))
        if key not in self.functions:
            self.functions[key] = self._made(nodes, reads, writes)
        return self.functions[key]

    def _made(self, nodes: Sequence[Node], reads: Sequence[Node], writes: Sequence[Node]) -> Callable[..., Any]:
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in reads}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output([copies[node] for node in writes])
        run = GraphModule(torch.nn.Module(), graph).forward
        if sum(not _is_view(node) for node in nodes) < _FEWEST:
            return run
        piece = _Taking(run)
        found = compiler_of(self.device)(piece, [node.meta[_VALUE] for node in reads])
        return run if found is piece else lambda *tensors: found([*tensors])


class _Taking:
    """A function that takes a list and uses it up."""

    __name__ = "a part of the module"  # in warnings

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, some: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        given = tuple(some)
        some.clear()
        return self.function(*given)


class _Graph:
    """Both passes as one graph of torch's operations."""

    def __init__(self, passes: Passes, values: Values) -> None:
        self.old, self.ends = passes, [*passes.results, *passes.gradients]
        self.seeds: dict[str, Node] = {}
        fake = FakeTensorMode()
        with fake:
            given = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in values.values()]
        names = [*values]
        with fake, torch.no_grad():
            graph: Graph = make_fx(lambda *tensors: self._traced(dict(zip(names, tensors, strict=True))))(*given).graph
        self.given = dict(zip(names, graph.find_nodes(op="placeholder"), strict=True))
        (output,) = graph.find_nodes(op="output")
        for node in graph.nodes:
            if node.target in _SAME:
                node.replace_all_uses_with(node.args[0])
        self.named = dict(zip(self.ends, output.args[0], strict=True))
        alive = {*output.args[0]}
        nodes = [node for node in graph.nodes if node.op in ("call_function", "get_attr") and node.target not in _SAME]
        self.nodes: list[Node] = []
        for node in reversed(nodes):
            if node.target is not _given and not (node in alive or _changes(node)):
                continue
            if node not in self.seeds.values():
                alive.update(node.all_input_nodes)
                self.nodes.append(node)
        self.nodes.reverse()

    # -- tracing ---------------------------------------------------------------------------------------

    def _traced(self, values: Values) -> list[torch.Tensor]:
        """Run both passes while torch notes what they do."""
        begun = dict(values)
        self._run("F", self.old.forward, values)
        results = [values[name] for name in self.old.results]
        if self.old.backward:
            values = (
                begun
                | {name: values[name] for name in self.old.kept}
                | {name: self._seed(name, results[self.old.results.index(one)]) for name, one in self.old.seeds.items()}
            )
            self._run("B", self.old.backward, values)
        return [*results, *(values[name] for name in self.old.gradients)]

    def _run(self, pass_: str, steps: Sequence[RankStep], values: Values) -> None:
        for step in steps:
            reads = [values[name] for name in step.reads]
            made = _called(step, reads) if step.made else step.run(*reads)
            values.update(zip(step.writes, made, strict=True))
            for name in step.drops:
                values.pop(name, None)
            for node in reversed(_tracer().graph.nodes):
                if _PLACE in node.meta:
                    break
                node.meta[_PLACE] = pass_, step.layer

    def _seed(self, name: str, result: torch.Tensor) -> torch.Tensor:
        with disable_proxy_modes_tracing():
            seed = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        proxy = _tracer().create_proxy("call_function", _given, (name,), {})
        self.seeds[name] = proxy.node
        return track_tensor_tree(seed, proxy, constant=None, tracer=_tracer())

    # -- functions -------------------------------------------------------------------------------------

    def passes(self, function: Callable[..., Callable[..., Any]]) -> Passes:
        """Return the passes in functions of nodes between what is called as it is."""
        groups = [[*nodes] for _, nodes in groupby(self.nodes, key=_group)]
        readers: dict[Node, set[int]] = defaultdict(set)
        for number, nodes in enumerate(groups):
            for read in {one for node in nodes for one in node.all_input_nodes}:
                readers[read].add(number)
        begun = {**self.given, **self.seeds}
        names = {node: f"%{node.name}" for node in self.nodes} | {node: name for name, node in begun.items()}
        ends = {*self.named.values()}
        steps: dict[str, list[RankStep]] = {"F": [], "B": []}
        taken: dict[str, dict[str, torch.dtype]] = {"F": {}, "B": {}}
        for number, nodes in enumerate(groups):
            made = [node for node in nodes if node in ends or readers[node] - {number}]
            pass_ = nodes[0].meta[_PLACE][0]
            step = _called_as_it_is(nodes, names) if _STEP in nodes[0].meta else _computed(nodes, made, names, function)
            steps[pass_].append(step)
            taken[pass_] |= {one: begun[one].meta[_VALUE].dtype for one in step.reads if one in begun}
        made_forward = {name for step in steps["F"] for name in step.writes} | self.given.keys()
        kept = frozenset(name for step in steps["B"] for name in step.reads if name in made_forward)
        forward, backward = (
            [_even(taken["F"]), *steps["F"], *self._renamed(self.old.results, names)],
            [_even(taken["B"]), *steps["B"], *self._renamed(self.old.gradients, names)],
        )
        return replace(
            self.old, kept=kept,
            forward=tuple(dropping(forward, {*self.old.results, *kept})),
            backward=tuple(dropping(backward, self.old.gradients)),
        )  # fmt: skip

    def _renamed(self, ends: Sequence[str], names: Mapping[Node, str]) -> Iterator[RankStep]:
        for name in ends:
            yield RankStep(run=lambda one: (one,), reads=(names[self.named[name]],), writes=(name,))


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode, "nothing is traced"
    return mode.tracer


def _given(*_: Any) -> Any:
    """Stand in the graph for what is called as it is, or given from outside."""


def _called(step: RankStep, reads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Let the graph have a step as one node."""
    assert step.made, "a compiler may see what is in it"
    tracer = _tracer()
    proxies = tuple(get_proxy_slot(one, tracer).proxy for one in reads)
    proxy = tracer.create_proxy("call_function", _given, proxies, {})
    proxy.node.meta[_STEP] = step
    with disable_proxy_modes_tracing():
        made = tuple(step.made(*reads))
    return track_tensor_tree(made, proxy, constant=None, tracer=tracer)


def _group(node: Node) -> object:
    """Return what nodes of one function share: pass and layer, or the step that is called."""
    source = node.args[0] if node.target is operator.getitem else node
    is_step = isinstance(source, Node) and _STEP in source.meta
    return source.name if is_step and isinstance(source, Node) else node.meta[_PLACE]


def _called_as_it_is(nodes: Sequence[Node], names: Mapping[Node, str]) -> RankStep:
    """Return a step whose results lie in memory as compiled functions expect it."""
    first, *results = nodes
    step: RankStep = first.meta[_STEP]
    by_number = {node.args[1]: names[node] for node in results}
    writes = tuple(by_number.get(number, f"{names[first]} {number}") for number in range(len(step.writes)))
    reads = tuple(names[node] for node in first.args if isinstance(node, Node))

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [one.contiguous() for one in step.run(*tensors)]

    return RankStep(run=run, reads=reads, writes=writes)


def _computed(
    nodes: Sequence[Node], made: Sequence[Node], names: Mapping[Node, str], function: Callable[..., Callable[..., Any]]
) -> RankStep:
    own = {*nodes}
    reads = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in own))
    return RankStep(
        run=function(nodes, reads, made), reads=tuple(names[one] for one in reads),
        writes=tuple(names[one] for one in made),
    )  # fmt: skip


def _even(dtypes: Mapping[str, torch.dtype]) -> RankStep:
    """Return a step that lays what is given out in memory as it was traced."""
    formats = [*dtypes.values()]

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [one.to(dtype).contiguous() for one, dtype in zip(tensors, formats, strict=True)]

    return RankStep(run=run, reads=tuple(dtypes), writes=tuple(dtypes))


def _numbered(node: Node, places: Mapping[Node, str]) -> str:
    return repr(map_arg((node.args, node.kwargs), places.__getitem__))


def _is_view(node: Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is None or (bool(schema.returns[0].alias_info) and not schema.is_mutable)


def _changes(node: Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
