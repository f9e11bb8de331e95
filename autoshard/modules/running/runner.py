"""Runs the program of a rank: forward and backward of a sharded module as one operation of autograd."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autoshard.engine.torch.execution import Values, run_steps
from autoshard.errors import InputError, require
from autoshard.layout.layout import Layout
from autoshard.modules.region import Positions
from autoshard.modules.rewriting.randomness import new_key
from autoshard.modules.running.batches import BatchRows, OwnRows
from autoshard.modules.running.capturing import PassCapture
from autoshard.modules.running.functions import FunctionWriter
from autoshard.modules.running.inputs import FixedInputs, InputPart, VaryingInputs
from autoshard.modules.running.overflow import spread_overflow
from autoshard.modules.running.placing import placeable, placements
from autoshard.modules.running.rank_program import RankProgram, local_shape
from autoshard.modules.running.weights import RestingWeight
from autoshard.run.placement import dims_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchLook:
    """How a rank's part of a tensor lies as torch sees it. It is prepared once, since every call asks."""

    order: tuple[int, ...]  # of dims in the program
    local_shape: tuple[int, ...]
    shape: torch.Size  # of the whole
    stride: tuple[int, ...]
    where: tuple[Placement, ...]
    is_cut: bool
    positions: Positions

    @classmethod
    def of(cls, program: RankProgram, layout: Layout, positions: Positions) -> "TorchLook":
        """Prepare the part that a value of the program has of a tensor."""
        sizes = program.sharding.traced.sizes
        shape = torch.Size(math.prod(sizes[dim] for dim in position) for position in positions)
        return cls(
            order=tuple(dims_of(layout).index(dim) for position in positions for dim in position),
            local_shape=tuple(local_shape(program.place, layout, positions)),
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
            where=placements(layout, positions, sizes, program.atoms),
            is_cut=bool(layout.cuts),
            positions=positions,
        )


class RankRunner:
    """Calls the program of a rank with parameters and inputs, and makes what the module returns."""

    def __init__(self, program: RankProgram, device_mesh: DeviceMesh, capture: PassCapture | None) -> None:
        sharding = program.sharding
        self.passes, self.capture = {True: program.trained, False: program.alone}, capture
        self.captured = set[bool]()  # a pass is captured before it first runs
        self.program, self.sharding, self.device_mesh = program, sharding, device_mesh
        captured = sharding.captured
        self.exported, self.traced = captured.exported, sharding.traced
        results = captured.program.results
        outside = [result.otherwise for result in results if result.read is None]  # of what is sharded
        random = {draw.name: draw for draw in self.exported.random}
        self.random = {name: random[node.name] for name, node in captured.inputs.items() if node.name in random}
        inputs = [node for name, node in captured.inputs.items() if name not in self.random]
        self.fixed = FixedInputs(self.exported, {node.name: node for node in inputs})
        inputs = [node for node in inputs if node.name not in self.fixed.names]
        outside_nodes = [node for node in outside if isinstance(node, torch.fx.Node)]
        nodes = {node.name: node for node in [*inputs, *outside_nodes] if node.name not in self.exported.paths}
        # Results outside share memory with arguments as the module has it, which a function need not keep.
        is_written = capture is not None and all(node.name in self.exported.paths for node in outside_nodes)
        writer = FunctionWriter(device=program.context.formats.device) if is_written else None
        self.nodes = VaryingInputs(self.exported, nodes, writer)
        self.input_parts = {
            name: [
                InputPart.of(
                    value, self.traced.dims[value.tensor], self.traced.sizes, program.place, self.random.get(name)
                )
                for value in program.inputs[name]
            ]
            for name in (*captured.inputs, *self.traced.block.takes)
        }
        self.varying = [name for name in captured.inputs if name not in self.fixed.names and name not in self.random]
        self.batch_dims: dict[tuple[int, ...], frozenset[tuple[str, ...]]] = {}  # by which inputs are parts
        self.results = {result.name: result for result in results}
        self.buffers = {*self.exported.buffers, *(name for name, result in self.results.items() if result.is_buffer)}
        for place, (tensor, positions) in self.traced.results.items():
            layout = program.program.results[tensor].layout
            same = placeable(layout, positions, self.traced.sizes, program.atoms).dims == layout.dims
            require((same, f"results.{place}", "is cut as DTensor cannot say; choose another batch axis"))
        of_results = program.program.results
        self.looks = {
            place: TorchLook.of(program, of_results[tensor].layout, positions)
            for place, (tensor, positions) in self.traced.results.items()
        }
        back = {name: of_results[self.traced.block.given_back(name)] for name in self.traced.block.takes}
        self.gradients = {
            name: (value.name, TorchLook.of(program, value.layout, self.traced.dims[name]))
            for name, value in back.items()
        }
        trained = [result.name for result in results if result.is_trained and result.name in self.traced.results]
        self.moved = {self.traced.results[name][0] for name in trained}

    def without_gradient(self, tensor: str) -> str:
        """Say that no gradient begins at a result, and how to shard the module so that one does."""
        places = [place for place, (name, _) in self.traced.results.items() if name == tensor]
        seeded = [place for place, result in self.results.items() if result.is_seeded]
        remedy = f"shard it with results={[*seeded, *places]}"
        return f"gradients of a sharded module begin at {', '.join(seeded)}, not at {', '.join(places)}; {remedy}"

    def __call__(self, module: torch.nn.Module, flat: Sequence[Any], rows: BatchRows | None = None) -> Any:
        """Run the module; ``flat`` has its arguments, those in lists and mappings one by one.

        Results of a batch that came in parts are this rank's ``rows``.
        """
        arguments = dict(zip(self.exported.arguments, flat, strict=True))
        buffers, key = {path: tensor_at(module, path) for path in self.buffers}, self._key()
        nodes = self.nodes.values(arguments, buffers, key)
        tensors = [tensor_at(module, weight.path) for weight in self.program.weights.values()]
        tensors += [arguments[name] for name in self.traced.block.takes]
        keys = {} if key is None else dict.fromkeys(self.random, key)
        inputs = {name: nodes[name] for name in self.varying} | keys
        if torch.is_grad_enabled():
            parts: Sequence[Any] = _ShardedCall.apply(self, inputs, *tensors)  # pyright: ignore[reportUnknownMemberType]
        else:
            parts = self.forward(inputs, tensors, None)
        return self._assemble_outputs(
            module, dict(zip(self.traced.block.gives, parts, strict=True)), (nodes, buffers), rows
        )

    def _key(self) -> torch.Tensor | None:
        """Return the key of a call that draws random numbers: that of rank 0, since generators may differ."""
        if not self.exported.random:
            return None
        key = new_key(self.program.context.formats.device)
        dist.broadcast(key, 0)
        return key

    def _assemble_outputs(
        self,
        module: torch.nn.Module,
        parts: Mapping[str, Any],
        outside: tuple[Mapping[str, Any], Mapping[str, torch.Tensor]],  # nodes and buffers
        rows: BatchRows | None,
    ) -> Any:
        """Assemble the module's outputs from this rank's parts of the results; copy changed buffers into the module."""
        flat: list[Any] = []
        nodes, buffers = outside
        for place, result in self.results.items():
            value = result.otherwise
            if place in self.traced.results:
                tensor, own_rows = self.traced.results[place][0], None if result.is_buffer else rows
                value = self._as_torch(parts[tensor], self.looks[place], own_rows)
            elif isinstance(value, torch.fx.Node):
                path = self.exported.paths.get(value.name)
                value = tensor_at(module, path) if path else nodes[value.name]
                if rows and not path and self._has_rows(value.shape, (), rows):
                    value = rows.within(value)
            if result.is_buffer:
                buffers[place].copy_(value.detach())
            else:
                flat.append(value)
        return self.exported.result(flat)

    def _has_rows(self, shape: Sequence[int], positions: Positions, rows: BatchRows) -> bool:
        """Say whether the first dim of a result is that of the batch, or a product that begins with it."""
        if rows.parts not in self.batch_dims:
            self.batch_dims[rows.parts] = self._dims_of_batch(rows.parts)
        dims = self.batch_dims[rows.parts]
        if not positions or not dims:
            return len(shape) > 0 and shape[0] == rows.total
        return any(positions[0][: len(batch)] == batch for batch in dims)

    def _dims_of_batch(self, parts: Sequence[int]) -> frozenset[tuple[str, ...]]:
        """Return the first dims of the inputs that are parts of a batch, as far as the program reads them."""
        arguments = [*self.exported.arguments]
        cut = {arguments[number] for number in parts}
        read = {name: node.name for name, node in self.sharding.captured.inputs.items()}
        read |= {name: name for name in self.traced.block.takes}
        tensors = [self.program.inputs[name][0].tensor for name, argument in read.items() if argument in cut]
        return frozenset(self.traced.dims[tensor][0] for tensor in tensors)

    def _as_torch(self, local: torch.Tensor, look: TorchLook, rows: BatchRows | None = None) -> torch.Tensor:
        """Lay a rank's part of a result out as the module does: its rows of the batch, or a DTensor where it is cut."""
        part = local.permute(look.order).reshape(look.local_shape)
        if rows and self._has_rows(look.shape, look.positions, rows):
            return OwnRows.apply(part, rows, look.where, look.shape)  # pyright: ignore
        if not look.is_cut:
            return part
        return DTensor.from_local(
            part, self.device_mesh, look.where, run_check=False, shape=look.shape, stride=look.stride
        )

    def forward(
        self, inputs: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor], saved: Values | None
    ) -> list[torch.Tensor]:
        """Run the forward pass; if ``saved`` is a dict, the values that a backward pass reads are added to it."""
        program, block = self.program, self.traced.block
        values = self._parameters(zip(program.weights.values(), tensors, strict=False)) | self.fixed.values(
            self.input_parts
        )
        for name, tensor in (*inputs.items(), *zip(block.takes, tensors[len(program.weights) :], strict=True)):
            whole = tensor.detach()
            values.update((part.value, part.cut(whole)) for part in self.input_parts[name])
        trains = saved is not None
        if self.capture and trains not in self.captured:
            self.captured.add(trains)
            self.passes[trains] = self.capture.captured(self.passes[trains], values)
        passes = self.passes[trains]
        run_steps(passes.forward, values)
        if saved is not None:
            saved.update((name, values[name]) for name in passes.saved)
        results: list[torch.Tensor] = []
        for value in (program.program.results[name] for name in block.gives):
            sums, maxima = (program.context.world.group(atoms) for atoms in (value.layout.sums, value.layout.maxima))
            result = values[value.name]  # ranks have terms of it, if it is a single number
            result = sums.all_reduce(result.clone()) if sums else result
            results.append(maxima.all_reduce(result.clone(), largest=True) if maxima else result)
        return results

    def backward(
        self, values: Values, tensors: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor | None]
    ) -> list[Any]:
        """Run the backward pass from the gradients of results to those of parameters and inputs.

        ``values`` are those that the forward pass saved; nobody else may hold them, so that their memory is free as
        soon as they are dropped.
        """
        program, block = self.program, self.traced.block
        weights = program.weights.values()
        again = [pair for pair in zip(weights, tensors, strict=False) if pair[0].held in self.passes[True].read_again]
        values.update(self._parameters(again))
        for name, gradient in zip(block.gives, upstream, strict=True):
            if f"d.{name}" in block.tensors:
                layout = program.program.results[name].layout
                zero = torch.zeros(program.place.shape(layout), dtype=tensors[0].dtype, device=tensors[0].device)
                values[f"d.{name}"] = zero if gradient is None else gradient
        with self._casts_of_forward():
            run_steps(self.passes[True].backward, values)
        if self.exported.call.autocast is torch.float16 and self.device_mesh.size() > 1:
            parts = [values[weight.gradient] for weight in weights if weight.computed]
            spread_overflow(parts, program.context.formats.device)
        gradients: list[Any] = []
        for weight, parameter in zip(weights, tensors, strict=False):
            if weight.computed:
                gradients.append(_like(parameter, values[weight.gradient].to(parameter.dtype), weight.placements))
            else:
                gradients.append(None)
        for value, look in self.gradients.values():
            whole = self._as_torch(values[value], look)
            gradients.append(whole.full_tensor() if isinstance(whole, DTensor) else whole)
        return gradients

    def _casts_of_forward(self) -> AbstractContextManager[Any]:
        """Let backward cast as forward did, wherever it is called."""
        device, formats = self.device_mesh.device_type, self.exported.call.autocast
        if formats is None and not torch.is_autocast_enabled(device):
            return nullcontext()  # which takes a tenth of the time
        return torch.autocast(device, dtype=formats, enabled=formats is not None)

    def _parameters(self, pairs: Iterable[tuple[RestingWeight, torch.Tensor]]) -> Values:
        """Return this rank's parts of parameters, as they rest."""
        parts: Values = {}
        for weight, parameter in pairs:
            if not isinstance(parameter, DTensor):
                message = "was replaced by a plain tensor; change the numbers of the parameter instead"
                raise InputError.of(weight.path, message)
            local = _laid(parameter, weight.placements)._local_tensor  # pyright: ignore[reportPrivateUsage]
            parts[weight.held] = local.detach()
        return parts


class _ShardedCall(torch.autograd.Function):
    """Forward and backward of a sharded program as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, runner: RankRunner, inputs: Mapping[str, torch.Tensor], *tensors: torch.Tensor) -> Any:  # pyright: ignore
        ctx.runner, ctx.tensors, ctx.saved = runner, tensors, Values()
        with torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):  # a checkpoint around has its own
            parts = runner.forward(inputs, tensors, ctx.saved)
        results = dict(zip(runner.traced.block.gives, parts, strict=True))
        ctx.mark_non_differentiable(*(result for name, result in results.items() if name not in runner.moved))
        ctx.set_materialize_grads(False)
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.saved is None:
            raise RuntimeError("a sharded module has run backward for this result already; call it again")
        if torch.is_grad_enabled():
            raise RuntimeError("a sharded module has no gradients of gradients; leave create_graph=True out")
        runner: RankRunner = ctx.runner
        for name, gradient in zip(runner.traced.block.gives, upstream, strict=True):
            if gradient is not None and f"d.{name}" not in runner.traced.block.tensors:
                raise RuntimeError(runner.without_gradient(name))
        values, ctx.saved = ctx.saved, None
        return None, None, *ctx.runner.backward(values, ctx.tensors, upstream)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Keep what torch saves inside of a program as it is."""
    return tensor


def tensor_at(module: torch.nn.Module, path: str) -> torch.Tensor:
    """Return the parameter or buffer at a path. Every call asks for all, so no method of the module is called."""
    *modules, name = path.split(".")
    for child in modules:
        module = module.__dict__["_modules"][child]
    parameter = module.__dict__["_parameters"].get(name)
    return module.__dict__["_buffers"][name] if parameter is None else parameter


def _like(parameter: torch.Tensor, local: torch.Tensor, where: Sequence[Placement]) -> DTensor:
    """Return a gradient, of which a rank has a part, as its parameter lies."""
    assert isinstance(parameter, DTensor), "parameters of a sharded module are DTensors"
    if parameter.placements == tuple(where):
        return DTensor(local, parameter._spec, requires_grad=False)  # pyright: ignore[reportPrivateUsage]
    gradient = DTensor.from_local(
        local, parameter.device_mesh, where, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return gradient.redistribute(placements=parameter.placements)


def _laid(tensor: DTensor, where: Sequence[Placement]) -> DTensor:
    """Return a tensor in these placements. It lies in others only where a program was traced for a later call."""
    return tensor if tensor.placements == tuple(where) else tensor.redistribute(placements=where)
