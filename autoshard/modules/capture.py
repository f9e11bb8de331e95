"""The program of a torch module, read operation by operation: what each does to dims, and which it needs whole."""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import InputError, nearest, require
from autoshard.modules.dims import Collision, NotAligned, Position, factors, fresh, name_places, note, size_of
from autoshard.modules.export import ExportedModule
from autoshard.modules.local import MARK, NAMESPACE
from autoshard.modules.nodes import Node, line_of, replaced, tensors_of, torch_name
from autoshard.modules.program import (
    Read,
    Reading,
    Result,
    Sort,
    TensorPlace,
    Traced,
    TracedProgram,
    TracedStep,
    View,
    agreed,
    free_name,
)
from autoshard.modules.reach import reaching, steps_to, trained_values
from autoshard.modules.rewriting.inlining import refused_casts
from autoshard.modules.rewriting.randomness import is_in_parts
from autoshard.modules.rules import RULES, rule_of
from autoshard.modules.rules.arguments import understands
from autoshard.modules.rules.local import local
from autoshard.modules.rules.refused import refuse_operation, refuse_random, refuse_sparse
from autoshard.modules.rules.unknown import unknown
from autoshard.modules.running.batches import example_inputs

_SAME = (
    "alias", "clone", "contiguous", "dropout", "feature_dropout", "lift_fresh_copy", "to", "_to_copy", "type_as",
)  # fmt: skip
_DRAWN = (*_SAME, *RULES)  # dropout that drops nothing, and nets that draw no numbers, are among these
_IGNORED = ("_assert_tensor_metadata", "sym_size", "_assert_scalar", "sym_constrain_range_for_size")


@dataclass(frozen=True)
class Captured:
    """A module's program, its graph as torch exported it, and which nodes give the inputs of the program."""

    program: TracedProgram
    exported: ExportedModule
    inputs: Mapping[str, Node]  # of values that are neither parameters nor get a gradient
    parameters: Mapping[str, str]  # name of the value -> name in the module
    makers: Mapping[str, Node]  # of values that are all that a node gives


def capture(
    module: torch.nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    hints: Mapping[str, Sequence[str]] | None = None,
    results: Sequence[str] | None = None,
) -> Captured:
    """Read the forward pass of a module; inputs that require a gradient get one.

    ``hints`` names dims of inputs, by the name of the argument: {"x": ("batch", "seq", "hidden")}. ``results`` says
    which of several results are wanted, by their places in what the module returns.
    """
    return read(ExportedModule.of(module, example_inputs(inputs)), hints, results)


def read(
    exported: ExportedModule,
    hints: Mapping[str, Sequence[str]] | None = None,
    results: Sequence[str] | None = None,
) -> Captured:
    """Read a module's forward pass as torch has exported it."""
    reader = ProgramReader(exported, hints or {})
    for node in exported.nodes:
        reader.add(node)
    return reader.captured(results)


class ProgramReader:
    """Reads the nodes of an exported graph in order; collects the values and steps of the program."""

    def __init__(self, exported: ExportedModule, hints: Mapping[str, Sequence[str]]) -> None:
        self.exported, self.hints = exported, hints
        self.values: list[Traced] = []
        self.steps: list[TracedStep] = []
        self.views: dict[Node, View | tuple[View, ...]] = {}
        self.inputs: dict[str, Node] = {}
        self.makers: dict[str, Node] = {}
        self.kept_whole: list[str] = []
        self.numbers: Iterator[int] = itertools.count()
        self.names = Counter(node.name for node in exported.nodes)  # of values, too
        floats = [weight.dtype for _, weight in exported.program.named_parameters() if weight.is_floating_point()]
        self.usual = exported.call.autocast or (floats[0] if floats else torch.float64)  # format of numbers
        self.parameters = exported.paths

    def captured(self, chosen: Sequence[str] | None) -> Captured:
        """Return the part of the program that the ``chosen`` results need; None stands for all results."""
        results = tuple(self._results(chosen))
        steps = steps_to(self.steps, [result.read.value for result in results if result.read])
        used = {read.value for step in steps for read in step.reads} | {end.read.value for end in results if end.read}
        values = tuple(value for value in self.values if value in used)
        trained = [value for value in values if self._is_trained(value)]
        program = TracedProgram(
            values=values, steps=steps, results=results, kept_whole=tuple(self.kept_whole),
            trained=reaching(steps, results, trained), modules=self._modules(),
        )  # fmt: skip
        parameters = {value.name: self.parameters[value.name] for value in values if value.origin == "parameter"}
        inputs = {value.name: self.inputs[value.name] for value in values if value.origin == "input"}
        return Captured(
            program=program, exported=self.exported, inputs=inputs, parameters=parameters, makers=self.makers
        )  # fmt: skip

    def _is_trained(self, value: Traced) -> bool:
        return value.origin == "carried" or self.parameters.get(value.name) in self.exported.call.trained

    def _modules(self) -> Mapping[str, Read]:
        """Return the last value that each submodule makes."""
        last_values: dict[str, Read] = {}
        for node, view in self.views.items():
            if isinstance(view, View) and view.value.origin == "made":
                for path, _ in (node.meta.get("nn_module_stack") or {}).values():
                    last_values[path] = Read(value=view.value, positions=view.positions)
        last_values.pop("", None)
        return last_values

    def _results(self, chosen: Sequence[str] | None) -> Iterator[Result]:
        """Yield the results of the module in order, and the buffers that it changes.

        Gradients begin at the ``chosen`` results; without a choice at single numbers (losses), or else at all results.
        """
        returned = list(self.exported.returned())
        places = [place for place, _, is_buffer in returned if not is_buffer]
        unknown = [name for name in chosen or () if name not in places]
        require(*((False, f"results.{name}", f"is no result. {nearest(name, places)}") for name in unknown))
        views = {place: self.views.get(node) for place, node, _ in returned if isinstance(node, torch.fx.Node)}
        values = {place: view for place, view in views.items() if isinstance(view, View)}
        trained_places = values.keys() if chosen is None else values.keys() & {*chosen}
        require(
            (
                bool(trained_places),
                "module",
                "returns no tensor that follows from a parameter, or an input with a gradient",
            )
        )
        trained = {value for value in self.values if self._is_trained(value)}
        with_gradient = trained_values(self.steps, trained)
        floats = {
            place: view for place, view in values.items() if view.value in with_gradient and place in (chosen or places)
        }
        losses = [place for place, view in floats.items() if not view.value.dims]
        seeds = floats if chosen else losses or floats
        for place, node, is_buffer in returned:
            view = values.get(place)
            if not is_buffer and chosen is not None and place not in chosen:
                yield Result(name=place)
            else:
                yield Result(
                    name=place, read=view and Read(value=view.value, positions=view.positions), otherwise=node,
                    is_buffer=is_buffer, is_seeded=not is_buffer and place in seeds,
                    is_trained=view is not None and view.value in with_gradient,
                )  # fmt: skip

    def add(self, node: Node) -> None:
        """Read one node; one that depends on no parameter and no input with a gradient is an input of the program."""
        if node.op == "placeholder":
            self._placeholder(node)
        elif node.op == "call_function":
            refuse_random(node, _DRAWN)
            before = node.all_input_nodes
            if any(is_in_parts(read) or (read in self.views and read.name not in self.inputs) for read in before):
                self._operation(node)

    def _placeholder(self, node: Node) -> None:
        if node.name in self.parameters:
            whole_path = self.parameters[node.name]
            tied_node = next((tied for tied in self.views if self.parameters.get(tied.name) == whole_path), None)
            if tied_node is not None:
                self.views[node] = self.views[tied_node]
                return
            path = [part for part in whole_path.split(".") if not part.isdecimal()] or [whole_path]
            hint = path[-2] if len(path) > 1 and path[-1] in ("weight", "bias") else path[-1]
            self._value(node, "parameter", [re.sub("_(weight|bias)$", "", hint)][: node.meta["val"].dim()])
        elif getattr(self.exported.arguments.get(node.name), "requires_grad", False):
            self._value(node, "carried", self.hints.get(node.name, ()))

    def _hinted(self, node: Node) -> Sequence[str]:
        """Return the user's names for the dims of an input; a view of the same shape has the names of its source."""
        viewed = node.all_input_nodes[0] if torch_name(node.target) in ("view", *_SAME) else node
        is_same = viewed.meta["val"].shape == node.meta["val"].shape
        return self.hints.get((viewed if is_same else node).name, ())

    def _value(self, node: Node, origin: Any, hints: Sequence[str]) -> View:
        """Add a value with the shape of a node and with new dims; return how the node lays it out."""
        tensor = node.meta["val"]
        if not all(isinstance(size, int) for size in tensor.shape):
            raise InputError.of(line_of(node), f"{node.name} has a shape that only a run knows. {MARK}")
        refuse_sparse(node, tensor, "is")
        message = f"names {len(hints)} dims, and the input has {tensor.dim()}"
        require((len(hints) <= tensor.dim(), f"hints.{node.name}", message))
        is_given, pairs = origin != "parameter", itertools.zip_longest(tensor.shape, hints, fillvalue="")
        positions = tuple(fresh(size, hint, is_given=is_given and bool(hint)) for size, hint in pairs)  # pyright: ignore
        value = Traced(
            number=next(self.numbers), name=node.name, positions=positions, origin=origin, format=tensor.dtype,
            is_index=not tensor.is_floating_point(), is_wide=self._is_wide(tensor),
        )  # fmt: skip
        name_places(node.name if is_given else "".join(hints), positions, int(node.op == "placeholder"))
        note(value.number, positions)
        self.values.append(value)
        self.names[value.name] += 1
        view = self.views[node] = View(value, positions)
        return view

    def view_of(self, node: Node) -> View:
        """Return how a node lays out a value; a node that the program does not make is an input of it."""
        if node not in self.views:
            self.inputs[node.name] = node
            return self._value(node, "input", self._hinted(node))
        view = self.views[node]
        assert isinstance(view, View), f"{node.name} is several tensors"
        return view

    def _operation(self, node: Node) -> None:
        target: Any = node.target
        name = getattr(target, "_opname", getattr(target, "__name__", str(target)))
        if name == "getitem":
            views = self.views[node.args[0]]
            assert isinstance(views, tuple), f"{node.args[0]} is one tensor"
            self.views[node] = views[node.args[1]]
            return
        if torch_name(target) in _IGNORED:
            return
        if name == "wrap_with_autocast":
            raise refused_casts(self.exported.program.graph_module, node, self.exported.call.autocast)
        refuse_operation(node, name)
        values, steps = len(self.values), len(self.steps)
        try:
            self._read(name, node)
        except (Collision, NotAligned):  # its dims cannot be told apart
            new_inputs = [value for value in self.values[values:] if value.origin != "made"]
            self.names -= Counter(value.name for value in self.values[values:] if value.origin == "made")
            self.values[values:], self.steps[steps:] = new_inputs, []  # what the rule had added so far
            self.whole(node)

    def _read(self, name: str, node: Node) -> None:
        """Add the steps of an operation: by the rule of its name, as a pointwise one, or by probing without a rule."""
        is_torch = node.target.namespace == "aten"
        rule = rule_of(name if is_torch else node.target._schema.name, node)
        if is_torch and not understands(node):
            unknown(self, node)
        elif is_torch and name in _SAME:
            self.rounded(node, self.view_of(node.args[0]), node.args[0].meta["val"].dtype)
        elif node.target.namespace.startswith(NAMESPACE):
            local(self, node)
        elif rule:
            rule(self, node)
        elif torch.Tag.pointwise in node.target.tags or torch_name(node.target) in ("detach", "fill"):
            self.local(node, self.broadcast(node))
        else:
            unknown(self, node)

    def rounded(self, node: Node, view: View, dtype: torch.dtype) -> None:
        """Make the numbers of a view a node's result; a step rounds them where the node has another format."""
        if node.meta["val"].dtype == dtype:
            self.views[node] = view
            return
        self.formatted(node, Reading(view, list(view.positions)), dtype)

    def formatted(self, node: Node, reading: Reading, dtype: torch.dtype, name: str = "") -> Reading:
        """Return a reading of the same numbers in the format of a node; a step converts them if it is another."""
        if node.meta["val"].dtype == dtype:
            return reading
        arguments = TensorPlace(0), node.meta["val"].dtype
        view = self.step(
            node, ([reading], reading.positions), sort="cheap", function=torch.Tensor.to, arguments=arguments, name=name
        )
        return Reading(view, list(reading.positions))

    def _is_wide(self, tensor: torch.Tensor) -> bool:
        """Say whether a module of 16 bits computes this in more."""
        return tensor.is_floating_point() and tensor.dtype.itemsize > self.usual.itemsize == 2

    def readings(self, node: Node) -> list[Reading]:
        """Return the tensors that a node reads, in the order of its arguments."""
        views = [self.view_of(source) for source in tensors_of((node.args, node.kwargs))]
        return [Reading(view, list(view.positions)) for view in views]

    def is_product(self, reading: Reading, axis: int) -> bool:
        """Say whether an axis is the whole output of a product with a weight, or of that product with its bias."""
        maker = next((step for step in self.steps if step.makes is reading.view.value), None)
        last_leaves = factors(reading.view.value.positions[-1])
        if maker is None or factors(reading.positions[axis]) != last_leaves:
            return False
        return maker.sort == "product" or maker.function is torch.add

    def broadcast(self, node: Node) -> tuple[list[Reading], list[Position]]:
        """Return the tensors that a node reads, aligned with its result as broadcasting does, and its positions."""
        readings = self.readings(node)
        rank = node.meta["val"].dim()
        return readings, agreed(readings, rank, range(rank))

    def local(
        self, node: Node, alignment: tuple[Sequence["Reading"], Sequence[Position]], whole: Sequence[Position] = (),
        **more: Any,
    ) -> None:  # fmt: skip
        """Add a step that each rank runs on its parts of the tensors."""
        self.step(node, alignment, whole=whole, **more)

    def whole(self, node: Node, **more: Any) -> None:
        """Add a step of which nothing is known: every rank reads whole tensors and makes whole results."""
        readings = self.readings(node)
        value, views = node.meta["val"], list[View]()
        needed = [position for reading in readings for position in reading.positions]
        self.kept_whole.append(f"{node.name} ({node.target}): {line_of(node)}")
        for number, tensor in enumerate([value] if isinstance(value, torch.Tensor) else value):
            positions = [fresh(size) for size in tensor.shape]
            more |= {"whole": [*needed, *positions], "number": None if isinstance(value, torch.Tensor) else number}
            views.append(self.step(node, (self.readings(node), positions), **more))
        self.views[node] = views[0] if isinstance(value, torch.Tensor) else tuple(views)

    def shape_of(self, reading: Reading) -> tuple[int, ...]:
        """Return the size of each position of a tensor."""
        return tuple(size_of(position) for position in reading.positions)

    def _module_of(self, readings: Sequence[Reading]) -> str:
        """Name a product after the module whose parameter it reads; "" where it reads none."""
        paths = (self.parameters[read.view.value.name] for read in readings if read.view.value.name in self.parameters)
        path = next(paths, "")
        module_path = path.rpartition(".")[0] or path
        return free_name(module_path.replace(".", "_"), self.names) if path else ""

    def step(  # noqa: PLR0913
        self,
        node: Node,
        alignment: tuple[Sequence[Reading], Sequence[Position]],
        *,
        whole: Sequence[Position] = (),
        summed: Sequence[Position] = (),
        sort: Sort = "local",
        function: Callable[..., Any] | None = None,
        arguments: tuple[Any, ...] | None = None,
        name: str = "",
        number: int | None = None,
        products: Sequence[Sequence[Position]] = (),
        format: torch.dtype | None = None,
    ) -> View:
        """Add a step; return its result. ``number`` selects one of a node's several results."""
        readings, result_positions = alignment
        positions = tuple(result_positions)
        product_name = self._module_of(readings) if sort in ("product", "rows") else ""
        name = product_name or name or node.name
        several = node.meta["val"]
        output = several if isinstance(several, torch.Tensor) else several[number or 0]
        if number is not None:
            name = f"{node.name}_{number}"
            function = function or functools.partial(_one_of, function=node.target, number=number)
        value = Traced(
            number=next(self.numbers), name=name or node.name, positions=positions, origin="made",
            format=format or output.dtype, is_index=not output.is_floating_point(), is_wide=self._is_wide(output),
        )  # fmt: skip
        name_places(node.name, positions, 0)
        for reading in readings:
            note(-1 - reading.view.value.number if reading.renamed else reading.view.value.number, reading.positions)
        note(value.number, positions)
        slots = {source: TensorPlace(number) for number, source in enumerate(tensors_of((node.args, node.kwargs)))}
        with_slots: Any = replaced((node.args, node.kwargs), slots)
        self.values.append(value)
        self.names[value.name] += 1
        if number is None and math.prod(map(size_of, positions)) == output.numel():
            self.makers[value.name] = node
        self.steps.append(
            TracedStep(
                name=value.name,
                path=list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())[-1][0],
                sort=sort,
                function=function or node.target,
                arguments=with_slots[0] if arguments is None else arguments,
                keywords=with_slots[1] if arguments is None else {},
                reads=tuple(
                    Read(value=use.view.value, positions=tuple(use.positions), renamed=use.renamed) for use in readings
                ),
                makes=value,
                whole=frozenset(factors(dim for position in whole for dim in position)),
                summed=frozenset(factors(dim for position in summed for dim in position)),
                products=tuple(factors(dim for position in product for dim in position) for product in products),
            )
        )
        view = self.views[node] = View(value, positions)
        return view


def _one_of(*arguments: Any, function: Callable[..., Any], number: int, **keywords: Any) -> torch.Tensor:
    """Return the result of this number, of a function with several results."""
    return function(*arguments, **keywords)[number]
