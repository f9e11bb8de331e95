"""Runs the program of a rank: forward and backward of a sharded module as one operation of autograd."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autoshard.engine.torch.execution import Values, run_steps
from autoshard.errors import InputError, require
from autoshard.layout.layout import Layout
from autoshard.layout.program import Value
from autoshard.modules.region import Positions
from autoshard.modules.rewriting.randomness import new_key
from autoshard.modules.running.capturing import PassCapture
from autoshard.modules.running.placing import placeable, placements
from autoshard.modules.running.rank_program import RankProgram, local_shape
from autoshard.run.placement import dims_of


class RankRunner:
    """Calls the program of a rank with parameters and inputs, and makes what the module returns."""

    def __init__(self, program: RankProgram, device_mesh: DeviceMesh, capture: PassCapture | None) -> None:
        sharding = program.sharding
        self.passes, self.capture = {True: program.trained, False: program.alone}, capture
        self.captured = set[bool]()  # a pass is captured when it is first run
        self.program, self.sharding, self.device_mesh = program, sharding, device_mesh
        captured = sharding.captured
        self.exported, self.traced = captured.exported, sharding.traced
        apart = [one.otherwise for one in captured.program.results if one.read is None]
        random = {one.name: one for one in self.exported.random}
        self.random = {name: random[node.name] for name, node in captured.inputs.items() if node.name in random}
        inputs = [node for name, node in captured.inputs.items() if name not in self.random]
        nodes = [*inputs, *(one for one in apart if isinstance(one, torch.fx.Node))]
        self.nodes = {one.name: one for one in nodes if one.name not in captured.exported.paths}
        self.part = self.exported.part([*self.nodes.values()])
        self.results = {one.name: one for one in captured.program.results}
        self.buffers = {*self.exported.buffers, *(name for name, one in self.results.items() if one.is_buffer)}
        for place, (tensor, positions) in self.traced.results.items():
            layout = program.program.results[tensor].layout
            same = placeable(layout, positions, self.traced.sizes, program.atoms).dims == layout.dims
            require((same, f"results.{place}", "is cut as DTensor cannot say; choose another batch axis"))
        trained = [name for name, one in self.results.items() if one.is_trained and name in self.traced.results]
        self.moved = {self.traced.results[name][0] for name in trained}

    def without_gradient(self, tensor: str) -> str:
        """Say that no gradient begins at a result, and what to ask for."""
        places = [place for place, (name, _) in self.traced.results.items() if name == tensor]
        begun = [place for place, one in self.results.items() if one.is_seeded]
        remedy = f"shard it with results={[*begun, *places]}"
        return f"gradients of a sharded module begin at {', '.join(begun)}, not at {', '.join(places)}; {remedy}"

    def __call__(self, module: torch.nn.Module, flat: Sequence[Any]) -> Any:
        """Run the module for arguments one by one."""
        arguments = dict(zip(self.exported.arguments, flat, strict=True))
        buffers, key = {path: tensor_at(module, path) for path in self.buffers}, self._key()
        nodes = dict(zip(self.nodes, self.exported.values(self.part, arguments, buffers, key), strict=True))
        tensors = [tensor_at(module, weight.path) for weight in self.program.weights.values()]
        tensors += [arguments[name] for name in self.traced.block.takes]
        drawn = {} if key is None else dict.fromkeys(self.random, key)
        inputs = {name: nodes[name] for name in self.sharding.captured.inputs if name not in drawn} | drawn
        if torch.is_grad_enabled():
            made: Sequence[Any] = _ShardedCall.apply(self, inputs, *tensors)  # pyright: ignore[reportUnknownMemberType]
        else:
            made = self.forward(inputs, tensors, None)
        return self._returned(module, dict(zip(self.traced.block.gives, made, strict=True)), nodes, buffers)

    def _key(self) -> torch.Tensor | None:
        """Return the key of a call that draws random numbers: that of rank 0, since generators may differ."""
        if not self.exported.random:
            return None
        key = new_key(self.program.context.formats.device)
        dist.broadcast(key, 0)
        return key

    def _returned(
        self,
        module: torch.nn.Module,
        made: Mapping[str, Any],
        nodes: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> Any:
        """Return what the module returns, and write the buffers that it changes."""
        flat: list[Any] = []
        for place, result in self.results.items():
            one = result.otherwise
            if place in self.traced.results:
                tensor, positions = self.traced.results[place]
                one = self._as_torch(made[tensor], self.program.program.results[tensor].layout, positions)
            elif isinstance(one, torch.fx.Node):
                path = self.exported.paths.get(one.name)
                one = tensor_at(module, path) if path else nodes[one.name]
            if result.is_buffer:
                buffers[place].copy_(one.detach())
            else:
                flat.append(one)
        return self.exported.result(flat)

    def _as_torch(self, local: torch.Tensor, layout: Layout, positions: Positions) -> torch.Tensor:
        """Lay a rank's part of a result out as the module does; a DTensor where it is cut."""
        order = [dims_of(layout).index(dim) for position in positions for dim in position]
        one = local.permute(order).reshape(local_shape(self.program.place, layout, positions))
        if not layout.cuts:
            return one
        sizes = self.traced.sizes
        shape = torch.Size(math.prod(sizes[dim] for dim in position) for position in positions)
        where = placements(layout, positions, sizes, self.program.atoms)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(one, self.device_mesh, where, run_check=False, shape=shape, stride=stride)

    def forward(
        self, inputs: Mapping[str, torch.Tensor], tensors: Sequence[torch.Tensor], kept: Values | None
    ) -> list[torch.Tensor]:
        """Run the forward pass; what backward reads is added to ``kept``, if there will be one."""
        program, block = self.program, self.traced.block
        values = self._parameters(tensors)
        for name, tensor in (*inputs.items(), *zip(block.takes, tensors[len(program.weights) :], strict=True)):
            for value in self.program.given[name]:
                values[value.name] = self._part_of(name, value, tensor.detach())
        trains = kept is not None
        if self.capture and trains not in self.captured:
            self.captured.add(trains)
            self.passes[trains] = self.capture.captured(self.passes[trains], values)
        passes = self.passes[trains]
        run_steps(passes.forward, values)
        if kept is not None:
            kept.update((name, values[name]) for name in passes.kept)
        found: list[torch.Tensor] = []
        for value in (program.program.results[name] for name in block.gives):
            sums, maxima = (program.context.world.group(atoms) for atoms in (value.layout.sums, value.layout.maxima))
            one = values[value.name]  # parts of a single number are still apart
            one = sums.all_reduce(one.clone()) if sums else one
            found.append(maxima.all_reduce(one.clone(), largest=True) if maxima else one)
        return found

    def backward(
        self, kept: Values, tensors: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor | None]
    ) -> list[Any]:
        """Run the backward pass from the gradients of results to those of parameters and inputs."""
        program, block = self.program, self.traced.block
        values = kept  # so that nothing else holds what is dropped on the way
        values.update(self._parameters(tensors))
        for name, gradient in zip(block.gives, upstream, strict=True):
            if f"d.{name}" in block.tensors:
                layout = program.program.results[name].layout
                zero = torch.zeros(program.place.shape(layout), dtype=tensors[0].dtype, device=tensors[0].device)
                values[f"d.{name}"] = zero if gradient is None else gradient
        with self._casts_of_forward():
            run_steps(self.passes[True].backward, values)
        found: list[Any] = []
        for weight, parameter in zip(program.weights.values(), tensors, strict=False):
            if weight.made:
                gradient = values[weight.gradient].reshape(weight.local_shape)
                found.append(_like(parameter, gradient.to(parameter.dtype), weight.placements))
            else:
                found.append(None)
        for name in block.takes:
            value = program.program.results[block.given_back(name)]
            whole = self._as_torch(values[value.name], value.layout, self.traced.dims[name])
            found.append(whole.full_tensor() if isinstance(whole, DTensor) else whole)
        return found

    def _casts_of_forward(self) -> AbstractContextManager[Any]:
        """Let backward cast as forward did, wherever it is called."""
        device, formats = self.device_mesh.device_type, self.exported.call.autocast
        if formats is None and not torch.is_autocast_enabled(device):
            return nullcontext()  # which takes a tenth of the time
        return torch.autocast(device, dtype=formats, enabled=formats is not None)

    def _parameters(self, tensors: Sequence[torch.Tensor]) -> Values:
        found: Values = {}
        for weight, parameter in zip(self.program.weights.values(), tensors, strict=False):
            if not isinstance(parameter, DTensor):
                message = "was replaced by a plain tensor; change the numbers of the parameter instead"
                raise InputError.of(weight.path, message)
            local = _laid(parameter, weight.placements)._local_tensor  # pyright: ignore[reportPrivateUsage]
            found[weight.start] = local.detach().view(weight.shape)
        return found

    def _part_of(self, name: str, value: Value, given: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of an input as the program takes it; of random numbers the key is given."""
        dims = [dim for position in self.traced.dims[value.tensor] for dim in position]
        sizes, laid = [self.traced.sizes[dim] for dim in dims], dims_of(value.layout)
        bounds, order = self.program.place.bounds(value.layout), [dims.index(dim) for dim in laid]
        if name in self.random:
            own = [bounds[laid.index(dim)] for dim in dims]
            return self.random[name].part(given, sizes, own).permute(order)
        found = given.reshape(sizes).permute(order)
        for axis, (start, stop) in enumerate(bounds):
            found = found.narrow(axis, start, stop - start)
        return found


class _ShardedCall(torch.autograd.Function):
    """Forward and backward of a sharded program as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, runner: RankRunner, inputs: Mapping[str, torch.Tensor], *tensors: torch.Tensor) -> Any:  # pyright: ignore
        ctx.runner, ctx.tensors, ctx.kept = runner, tensors, Values()
        found = runner.forward(inputs, tensors, ctx.kept)
        gives = runner.traced.block.gives
        ctx.mark_non_differentiable(*(one for name, one in zip(gives, found, strict=True) if name not in runner.moved))
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.kept is None:
            raise RuntimeError("a sharded module has run backward for this result already; call it again")
        if torch.is_grad_enabled():
            raise RuntimeError("a sharded module has no gradients of gradients; leave create_graph=True out")
        runner: RankRunner = ctx.runner
        for name, one in zip(runner.traced.block.gives, upstream, strict=True):
            if one is not None and f"d.{name}" not in runner.traced.block.tensors:
                raise RuntimeError(runner.without_gradient(name))
        kept, ctx.kept = ctx.kept, None
        return None, None, *ctx.runner.backward(kept, ctx.tensors, upstream)


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
