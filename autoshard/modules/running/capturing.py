"""The passes of a rank as few functions: what torch computes between two collectives is one of them.

Both passes are traced together, without numbers, so that what torch keeps of a region for its gradients is made by one
function and read by another. Collectives, and functions that the user marks, are called as they are. Functions end
where a layer ends, so that equal layers have equal functions, which are written, and compiled, once.
"""

import operator
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)

from autoshard.engine.torch.execution import RankStep, Values, dropping, run_steps
from autoshard.modules.running.functions import FunctionWriter
from autoshard.modules.running.passes import Passes
from autoshard.modules.running.views import PLACE, VALUE, changes_in_place, shorten_views

_STEP = "step"  # what the node of a step that is called as it is says of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCapture:
    """Turns the steps of a rank into functions."""

    writer: FunctionWriter

    def captured(self, passes: Passes, values: Values) -> Passes:
        """Return the passes as functions, for parameters and inputs like these."""
        try:
            return _CapturedGraph(passes, values).passes(self.writer)
        except Exception as error:  # torch raises anything while it traces
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"the module runs step by step, without functions: {reason}", stacklevel=2)
            return passes


class _CapturedGraph:
    """Both passes as one graph of torch's operations."""

    def __init__(self, passes: Passes, values: Values) -> None:
        self.steps, self.ends = passes, [*passes.results, *passes.gradients]
        self.seeds: dict[str, Node] = {}
        fake, names = FakeTensorMode(), [*values]
        with fake:
            inputs = [torch.empty(value.shape, dtype=value.dtype, device=value.device) for value in values.values()]
        with fake, torch.no_grad():
            graph: Graph = make_fx(lambda *tensors: self._traced(dict(zip(names, tensors, strict=True))))(*inputs).graph
        self.inputs = dict(zip(names, graph.find_nodes(op="placeholder"), strict=True))
        shorten_views(graph)
        (output,) = graph.find_nodes(op="output")
        self.named = dict(zip(self.ends, output.args[0], strict=True))
        self.nodes = self._needed(graph, {*output.args[0]})

    def _needed(self, graph: Graph, alive: set[Node]) -> list[Node]:
        """Return what computes the ends, changes a tensor in place, or is called as it is."""
        needed: list[Node] = []
        for node in reversed(graph.nodes):
            computes = node.op == "call_function" and node not in self.seeds.values()
            if computes and (node in alive or node.target is _opaque or changes_in_place(node)):
                alive.update(node.all_input_nodes)
                needed.append(node)
        return needed[::-1]

    # -- tracing ---------------------------------------------------------------------------------------

    def _traced(self, values: Values) -> list[torch.Tensor]:
        """Run both passes while torch notes what they do."""
        inputs = dict(values)
        self._run("F", self.steps.forward, values)
        results = [values[name] for name in self.steps.results]
        if self.steps.backward:
            values = (
                inputs
                | {name: values[name] for name in self.steps.saved}
                | {name: self._seed(name, dict(zip(self.steps.results, results, strict=True))[result])
                   for name, result in self.steps.seeds.items()}
            )  # fmt: skip
            self._run("B", self.steps.backward, values)
        return [*results, *(values[name] for name in self.steps.gradients)]

    def _run(self, pass_: str, steps: Sequence[RankStep], values: Values) -> None:
        for step in steps:
            run_steps([replace(step, run=partial(_called_whole, step)) if step.stand_in else step], values)
            for node in reversed(_tracer().graph.nodes):
                if PLACE in node.meta:
                    break
                node.meta[PLACE] = pass_, step.layer

    def _seed(self, name: str, result: torch.Tensor) -> torch.Tensor:
        with disable_proxy_modes_tracing():
            seed = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        proxy = _tracer().create_proxy("call_function", _opaque, (name,), {})
        self.seeds[name] = proxy.node
        return track_tensor_tree(seed, proxy, constant=None, tracer=_tracer())

    # -- functions -------------------------------------------------------------------------------------

    def passes(self, writer: FunctionWriter) -> Passes:
        """Return the passes in functions of nodes between what is called as it is."""
        groups = [[*nodes] for _, nodes in groupby(self.nodes, key=_group)]
        readers: dict[Node, set[int]] = defaultdict(set)
        for number, nodes in enumerate(groups):
            for read in {source for node in nodes for source in node.all_input_nodes}:
                readers[read].add(number)
        outside = {**self.inputs, **self.seeds}
        names = {node: f"%{node.name}" for node in self.nodes} | {node: name for name, node in outside.items()}
        ends = {*self.named.values()}
        steps: dict[str, list[RankStep]] = {"F": [], "B": []}
        formats: dict[str, dict[str, torch.dtype]] = {"F": {}, "B": {}}  # of what comes from outside
        for number, nodes in enumerate(groups):
            pass_ = nodes[0].meta[PLACE][0]
            if _STEP in nodes[0].meta:
                step = _called_as_it_is(nodes, names)
            else:
                read_later = [node for node in nodes if node in ends or readers[node] - {number}]
                function = writer.function(nodes, read_later)
                reads, writes = (tuple(names[node] for node in ends_) for ends_ in (function.reads, function.writes))
                step = RankStep(run=function.run, reads=reads, writes=writes, empties=True)
            steps[pass_].append(step)
            formats[pass_] |= {name: outside[name].meta[VALUE].dtype for name in step.reads if name in outside}
        made_forward = {name for step in steps["F"] for name in step.writes} | self.inputs.keys()
        saved = frozenset(name for step in steps["B"] for name in step.reads if name in made_forward)
        forward, backward = (
            [_even(formats["F"]), *steps["F"], *self._renamed(self.steps.results, names)],
            [_even(formats["B"]), *steps["B"], *self._renamed(self.steps.gradients, names)],
        )
        return replace(
            self.steps, saved=saved,
            forward=tuple(dropping(forward, {*self.steps.results, *saved})),
            backward=tuple(dropping(backward, self.steps.gradients)),
        )  # fmt: skip

    def _renamed(self, ends: Sequence[str], names: Mapping[Node, str]) -> Iterator[RankStep]:
        for name in ends:
            yield RankStep(run=lambda value: (value,), reads=(names[self.named[name]],), writes=(name,))


def _tracer() -> Any:
    mode = get_proxy_mode()
    assert mode, "nothing is traced"
    return mode.tracer


def _opaque(*_: Any) -> Any:
    """Stand in the graph for what is called as it is, or comes from outside."""


def _called_whole(step: RankStep, *reads: torch.Tensor) -> Sequence[torch.Tensor]:
    """Let the graph have a step as one node."""
    assert step.stand_in, "the graph may have what is in it"
    tracer = _tracer()
    proxies = tuple(get_proxy_slot(tensor, tracer).proxy for tensor in reads)
    proxy = tracer.create_proxy("call_function", _opaque, proxies, {})
    proxy.node.meta[_STEP] = step
    with disable_proxy_modes_tracing():
        results = tuple(step.stand_in(*reads))
    return track_tensor_tree(results, proxy, constant=None, tracer=tracer)


def _group(node: Node) -> object:
    """Return what nodes of one function share: pass and layer, or the step that is called."""
    source = node.args[0] if node.target is operator.getitem else node
    is_step = isinstance(source, Node) and _STEP in source.meta
    return source.name if is_step and isinstance(source, Node) else node.meta[PLACE]


def _called_as_it_is(nodes: Sequence[Node], names: Mapping[Node, str]) -> RankStep:
    """Return a step whose results lie in memory as the functions expect it."""
    first, *results = nodes
    step: RankStep = first.meta[_STEP]
    by_number = {node.args[1]: names[node] for node in results}
    writes = tuple(by_number.get(number, f"{names[first]} {number}") for number in range(len(step.writes)))
    reads, called = tuple(names[node] for node in first.args if isinstance(node, Node)), step.run
    assert called, "nothing comes from outside here"

    def run(*values: Any) -> Sequence[Any]:
        return [value.contiguous() if isinstance(value, torch.Tensor) else value for value in called(*values)]

    return RankStep(run=run, reads=reads, writes=writes)


def _even(dtypes: Mapping[str, torch.dtype]) -> RankStep:
    """Return a step that lays what comes from outside out in memory as it was traced."""
    formats = [*dtypes.values()]

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [tensor.to(dtype).contiguous() for tensor, dtype in zip(tensors, formats, strict=True)]

    return RankStep(run=run, reads=tuple(dtypes), writes=tuple(dtypes))
