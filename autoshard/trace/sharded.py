"""A module of torch that runs on all ranks of a mesh: forward and backward of its sharded program in one function."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

from autoshard.engine.base import HOST
from autoshard.engine.placement import dims_of
from autoshard.errors import InputError, require
from autoshard.layout.layout import Layout
from autoshard.layout.program import Value
from autoshard.plan.module_plan import ModulePlan, load_module_plan
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.trace.fingerprint import fingerprint
from autoshard.trace.placing import placeable, placements
from autoshard.trace.region import Positions
from autoshard.trace.running import RankProgram, Values, local_shape, run_steps
from autoshard.trace.shard import Inputs, ModuleSharding, shard_module, sharding_of, sizes_of

_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp32"}


def shard(
    module: torch.nn.Module,
    inputs: Inputs,
    mesh: DeviceMesh | Mapping[str, int] | str,
    *,
    cluster: Cluster | str = "local",
    plan: ModulePlan | str | Path | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Shard a module over the ranks of a mesh, in place, and return it.

    Every rank calls this with the same module, example inputs and mesh: one to three axes of any names with their
    sizes, or a DeviceMesh. The module keeps its paths of parameters and its results; its parameters become DTensors.
    It takes the whole batch on every rank, and computes its part. ``cluster`` says on what prices are based, other
    ``options`` are those of ``shard_module``; a ``plan`` that it has saved is executed as it is.
    """
    device_mesh = _device_mesh(module, mesh)
    names, count = device_mesh.mesh_dim_names, device_mesh.size()
    assert names, "a mesh without names is refused"
    dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    require((dtype in _PRECISIONS, "module", f"has parameters of {dtype}; known: {', '.join(map(str, _PRECISIONS))}"))
    is_priced = device_mesh.device_type == HOST or cluster != "local" or plan is not None
    require(
        (is_priced, "cluster", "is local, with prices of a CPU; name that of these devices (autoshard list clusters)")
    )
    sizes = dict(zip(names, device_mesh.shape, strict=True))
    if plan is not None:
        known = plan if isinstance(plan, ModulePlan) else load_module_plan(Path(plan))
        written, own = known.mesh, ",".join(f"{name}={size}" for name, size in sizes.items())
        require((written == own, "plan", f"is for the mesh {written}, not for {own}"))
        left = {*options} - {"results"}
        require(*((False, name, "is decided by the plan; leave it out") for name in sorted(left)))
        return run_on(module, sharding_of(known, module, inputs, options.get("results")), device_mesh)
    sharding = shard_module(
        module, inputs, _cluster(cluster, count), sizes,
        precision=_PRECISIONS[dtype], **options,
    )  # fmt: skip
    return run_on(module, sharding, device_mesh)


def run_on(module: torch.nn.Module, sharding: ModuleSharding, device_mesh: DeviceMesh) -> torch.nn.Module:
    """Let a module run as it was sharded on the ranks of a mesh; rank 0 gives the values of parameters and buffers."""
    _require_alike(sharding)
    dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    program = RankProgram(sharding, device_mesh.get_rank(), torch.device(device_mesh.device_type), dtype)
    _place_parameters(module, program, device_mesh)
    runner = _Runner(module, program, device_mesh)
    kind = type(module)
    module.__class__ = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"__module__": kind.__module__})
    object.__setattr__(module, "autoshard", runner)
    return module


class ShardedModule(torch.nn.Module):
    """A module whose forward pass is that of its sharded program."""

    autoshard: "_Runner"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded program for the whole batch."""
        return self.autoshard(self, args, kwargs)


class _Runner:
    """Calls the program of a rank with parameters and inputs, and makes what the module returns."""

    def __init__(self, module: torch.nn.Module, program: RankProgram, device_mesh: DeviceMesh) -> None:
        sharding = program.sharding
        self.program, self.sharding, self.device_mesh = program, sharding, device_mesh
        captured = sharding.captured
        self.exported, self.traced = captured.exported, sharding.traced
        apart = [one.otherwise for one in captured.program.results if one.read is None]
        nodes = [*captured.inputs.values(), *(one for one in apart if isinstance(one, torch.fx.Node))]
        self.nodes = {one.name: one for one in nodes if one.name not in captured.exported.paths}
        self.part = self.exported.part([*self.nodes.values()])
        self.results = {one.name: one for one in captured.program.results}
        for place, (tensor, positions) in self.traced.results.items():
            layout = program.program.results[tensor].layout
            same = placeable(layout, positions, self.traced.sizes, program.atoms) == layout
            require((same, f"results.{place}", "is cut as DTensor cannot say; choose another batch axis"))

    def __call__(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        call = "train" if self.exported.training else "eval"
        require((module.training == self.exported.training, "module", f"was traced after .{call}(); call .{call}()"))
        arguments = self.exported.flat(*tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs)))
        buffers = dict(module.named_buffers())
        nodes = dict(zip(self.nodes, self.exported.values(self.part, arguments, buffers), strict=True))
        tensors = [module.get_parameter(one.path) for one in self.program.weights.values()]
        tensors += [arguments[name] for name in self.traced.block.takes]
        inputs = {name: nodes[name] for name in self.sharding.captured.inputs}
        if torch.is_grad_enabled():
            made: Sequence[Any] = _ShardedCall.apply(self, inputs, *tensors)  # pyright: ignore[reportUnknownMemberType]
        else:
            made = self.forward(inputs, tensors, None)
        return self._returned(module, dict(zip(self.traced.block.gives, made, strict=True)), nodes, buffers)

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
                one = module.get_parameter(path) if path else nodes[one.name]
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
                values[value.name] = self._part_of(value, tensor.detach())
        run_steps(program.forward_only if kept is None else program.forward, values)
        if kept is not None:
            kept.update((name, values[name]) for name in program.kept)
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
        values = {**kept, **self._parameters(tensors)}
        for name, gradient in zip(block.gives, upstream, strict=True):
            if f"d.{name}" in block.tensors:
                layout = program.program.results[name].layout
                zero = torch.zeros(program.place.shape(layout), dtype=tensors[0].dtype, device=tensors[0].device)
                values[f"d.{name}"] = zero if gradient is None else gradient
        run_steps(program.backward, values)
        found: list[Any] = []
        for weight, parameter in zip(program.weights.values(), tensors, strict=False):
            if weight.made:
                shape = local_shape(program.place, weight.rest, weight.positions)
                found.append(_like(parameter, values[weight.gradient].reshape(shape).to(parameter.dtype)))
            else:
                found.append(None)
        for name in block.takes:
            value = program.program.results[block.given_back(name)]
            whole = self._as_torch(values[value.name], value.layout, self.traced.dims[name])
            found.append(whole.full_tensor() if isinstance(whole, DTensor) else whole)
        return found

    def _parameters(self, tensors: Sequence[torch.Tensor]) -> Values:
        found: Values = {}
        for weight, parameter in zip(self.program.weights.values(), tensors, strict=False):
            assert isinstance(parameter, DTensor), f"{weight.path} is no DTensor any more"
            local = cast(DTensor, parameter.detach()).to_local()
            found[weight.start] = local.reshape(self.program.place.shape(weight.rest))
        return found

    def _part_of(self, value: Value, whole: torch.Tensor) -> torch.Tensor:
        """Return a rank's part of an input as the program takes it."""
        dims = [dim for position in self.traced.dims[value.tensor] for dim in position]
        laid = whole.reshape([self.traced.sizes[dim] for dim in dims])
        laid = laid.permute([dims.index(dim) for dim in dims_of(value.layout)])
        for axis, (start, stop) in enumerate(self.program.place.bounds(value.layout)):
            laid = laid.narrow(axis, start, stop - start)
        return laid


class _ShardedCall(torch.autograd.Function):
    """Forward and backward of a sharded program as one operation of autograd."""

    @staticmethod
    def forward(ctx: Any, runner: _Runner, inputs: Mapping[str, torch.Tensor], *tensors: torch.Tensor) -> Any:  # pyright: ignore
        ctx.runner, ctx.tensors, ctx.kept = runner, tensors, Values()
        found = runner.forward(inputs, tensors, ctx.kept)
        block = runner.traced.block
        constant = [one for name, one in zip(block.gives, found, strict=True) if f"d.{name}" not in block.tensors]
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.kept is None:
            raise RuntimeError("a sharded module has run backward for this result already; call it again")
        kept, ctx.kept = ctx.kept, None
        return None, None, *ctx.runner.backward(kept, ctx.tensors, upstream)


def _like(parameter: torch.Tensor, local: torch.Tensor) -> DTensor:
    assert isinstance(parameter, DTensor), "parameters of a sharded module are DTensors"
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def _place_parameters(module: torch.nn.Module, program: RankProgram, device_mesh: DeviceMesh) -> None:
    """Replace every parameter by its part on this rank; those that the program does not read stay whole."""
    weights = {one.path: one for one in program.weights.values()}
    placed: dict[int, torch.nn.Parameter] = {}
    buffers = [one for one in module.buffers() if not one.is_meta]
    for one in buffers:
        dist.broadcast(one.detach(), 0)
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in placed:
            weight, whole = weights.get(path), parameter.detach()
            if not whole.is_meta:
                dist.broadcast(whole, 0)
            local, where = whole, tuple(Replicate() for _ in device_mesh.shape)
            if weight:
                local, where = _cut(whole, weight.rest, weight.positions, program), weight.placements
            tensor = DTensor.from_local(
                local.clone(), device_mesh, where, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            placed[id(parameter)] = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, placed[id(parameter)])


def _cut(whole: torch.Tensor, layout: Layout, positions: Positions, program: RankProgram) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    sizes = program.sharding.traced.sizes
    found = whole.reshape([sizes[dim] for position in positions for dim in position])
    for axis, (start, stop) in enumerate(program.place.bounds(layout)):
        found = found.narrow(axis, start, stop - start)
    return found.reshape(local_shape(program.place, layout, positions))


def _device_mesh(module: torch.nn.Module, mesh: DeviceMesh | Mapping[str, int] | str) -> DeviceMesh:
    """Return the mesh of devices; axes with sizes are laid on the ranks that torchrun has started."""
    if isinstance(mesh, DeviceMesh):
        require((mesh.mesh_dim_names is not None, "mesh", "has no names of its axes; give mesh_dim_names"))
        in_order = mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
        require((in_order, "mesh", "must have all ranks in their order"))
        return mesh
    sizes, ranks = sizes_of(mesh), dist.get_world_size() if dist.is_initialized() else None
    device = next((one.device.type for one in module.parameters()), "cpu")
    try:
        found = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    except (ValueError, RuntimeError) as error:
        count = math.prod(sizes.values())
        remedy = f"start as many: torchrun --nproc-per-node {count} SCRIPT"
        raise InputError.of("mesh", f"{count} ranks do not run here ({ranks or 'none'} do); {remedy}") from error
    return found


def _cluster(cluster: Cluster | str, count: int) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster == "local":
        return load_cluster("local", ranks=count)
    node = load_cluster(cluster).num_ranks
    require((count % node == 0, "cluster", f"{count} ranks do not fill nodes of {cluster}, which have {node}"))
    return load_cluster(cluster, count // node)


def _require_alike(sharding: ModuleSharding) -> None:
    """Refuse to run where ranks have sharded differently: they would wait for each other."""
    lines = [*sharding.sharding.table.items(), *sharding.sharding.rests.items()]
    own = fingerprint(sharding.traced), hashlib.sha256(repr(sorted(lines)).encode()).hexdigest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    require(
        (len(set(found)) == 1, "module", "was sharded differently on some ranks; give all the same module and inputs")
    )
