"""A module of torch that runs on all ranks of a mesh: forward and backward of its sharded program in one function."""

import copy
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import TreeSpec

from autoshard.errors import InputError, require
from autoshard.layout.layout import Layout
from autoshard.modules.export import ExportedModule, ModuleCall, flattened
from autoshard.modules.fingerprint import block_hash
from autoshard.modules.region import Positions
from autoshard.modules.running.batches import example_inputs, is_local, local_axes
from autoshard.modules.running.calls import RankInputs
from autoshard.modules.running.capturing import PassCapture
from autoshard.modules.running.functions import FunctionWriter
from autoshard.modules.running.loops import format_of_accelerate, in_fp32, told
from autoshard.modules.running.meshes import cluster_of, device_mesh_of
from autoshard.modules.running.parts import allow_part_calls, refuse_part_calls
from autoshard.modules.running.rank_program import RankProgram, local_shape
from autoshard.modules.running.runner import RankRunner
from autoshard.modules.running.wholes import methods_for_parts, part_like
from autoshard.modules.shard import Inputs, ModuleSharding, shard_module, sharding_of
from autoshard.modules.state.tree import ModuleTree, tree_of
from autoshard.plan.module_plan import ModulePlan, load_module_plan
from autoshard.run.protocol import HOST, EngineMode
from autoshard.spec.cluster import Cluster

_MANY = 8
_MOST_COMPARED = 62  # programs, of which a number of 63 bits says which fit
_TOO_MANY = f"the module was traced for {_MANY} kinds of calls, which takes time and memory; pad inputs to fewer shapes"
_PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp32"}


def shard(
    module: torch.nn.Module,
    inputs: Inputs,
    mesh: DeviceMesh | Mapping[str, int] | str,
    *,
    cluster: Cluster | str = "local",
    plan: ModulePlan | str | Path | None = None,
    compile: bool = False,
    **options: Any,
) -> torch.nn.Module:
    """Shard a module over the ranks of a mesh, in place, and return it.

    Every rank calls this with the same module, example inputs and mesh: one to three axes of any names with their
    sizes, or a DeviceMesh. The module keeps its paths of parameters and its results; its parameters become DTensors.
    It takes the whole batch on every rank, and computes its part; with ``batch="local"`` each rank along the first axis
    brings its part of a batch, and ``batch="local:data.model"`` names other axes. ``cluster`` says on what prices are
    based, other ``options`` are those of ``shard_module``; a ``plan`` that it has saved is executed as it is. With
    ``compile`` what a rank computes between two collectives is compiled at the first call.
    """
    kind = type(module)
    _require_plain(module)
    inputs = example_inputs(inputs)
    device_mesh = device_mesh_of(module, mesh)
    names, count = device_mesh.mesh_dim_names, device_mesh.size()
    assert names, "a mesh without names is refused"
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)
    require((dtype in _PRECISIONS, "module", f"has parameters of {dtype}; known: {', '.join(map(str, _PRECISIONS))}"))
    is_priced = device_mesh.device_type == HOST or cluster != "local" or plan is not None
    require(
        (is_priced, "cluster", "is local, with prices of a CPU; name that of these devices (autoshard list clusters)")
    )
    sizes = dict(zip(names, device_mesh.shape, strict=True))
    axes = local_axes(options.pop("batch"), names) if is_local(options.get("batch")) else ()
    rank_inputs = RankInputs.of(device_mesh, axes)
    if axes and rank_inputs:
        inputs = rank_inputs.examples(module, inputs)
    if axes and plan is None:
        options["batch"] = ".".join(axes)
    if plan is not None:
        module_plan = plan if isinstance(plan, ModulePlan) else load_module_plan(Path(plan))
        written, mesh_text = module_plan.mesh, ",".join(f"{name}={size}" for name, size in sizes.items())
        require((written == mesh_text, "plan", f"is for the mesh {written}, not for {mesh_text}"))
        extra_options = {*options} - {"results"}
        require(*((False, name, "is decided by the plan; leave it out") for name in sorted(extra_options)))
        with _without_numbers(module, type(module), device_mesh.device_type), told(f"traces {kind.__name__}"):
            sharding = sharding_of(module_plan, module, inputs, options.get("results"))
    else:
        telling = told(f"traces {kind.__name__} and finds its layouts")
        with _without_numbers(module, type(module), device_mesh.device_type), telling:
            sharding = shard_module(
                module, inputs, cluster_of(cluster, count), sizes, precision=_PRECISIONS[dtype], **options
            )
        sharding.refuse_unfit()
    return run_on(module, sharding, device_mesh, mode="compiled" if compile else "generated", rank_inputs=rank_inputs)


def _require_plain(module: torch.nn.Module) -> None:
    """Refuse what is no module, or is sharded already."""
    kind = type(module)
    require((issubclass(kind, torch.nn.Module), "module", f"must be a torch.nn.Module, not a {kind.__name__}"))
    require(
        (not isinstance(module, ShardedModule), "module", "is sharded already"),
        (
            "forward" not in vars(module),
            "module",
            "has a forward of its own that hides that of its class; make it a class",
        ),
    )


def run_on(
    module: torch.nn.Module,
    sharding: ModuleSharding,
    device_mesh: DeviceMesh,
    *,
    mode: EngineMode = "generated",
    rank_inputs: RankInputs | None = None,  # without it calls of the ranks are not compared
) -> torch.nn.Module:
    """Let a module run as it was sharded on the ranks of a mesh; rank 0 gives the values of parameters and buffers."""
    _require_alike(sharding)
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)
    device = torch.device(device_mesh.device_type)
    program = RankProgram(sharding, device_mesh.get_rank(), device, dtype)
    writer = FunctionWriter(device=device, compiles=mode == "compiled")
    capture = None if mode == "literal" else PassCapture(writer=writer)
    _place_parameters(module, program, device_mesh)
    kind = type(module)
    module.__class__ = _sharded_class(kind)
    refuse_part_calls(module)
    object.__setattr__(module, "autoshard", ShardedCalls(kind, RankRunner(program, device_mesh, capture), rank_inputs))
    return module


class ShardedModule(torch.nn.Module):
    """A module whose forward pass is that of its sharded program.

    A Trainer of transformers need not count tokens: a loss is that of the whole batch.
    """

    autoshard: "ShardedCalls"
    accepts_loss_kwargs = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the sharded program for the batch."""
        calls = self.autoshard
        if calls.format is None:
            return calls(self, args, kwargs)
        with torch.autocast(calls.first.device_mesh.device_type, dtype=calls.format):
            results = calls(self, args, kwargs)
        return in_fp32(results)

    def extra_repr(self) -> str:
        """Say beside what the class says how the module is sharded."""
        return "\n".join(text for text in (super().extra_repr(), str(self.autoshard.first.sharding)) if text)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:  # pyright: ignore
        """Load whole tensors too, as a plain module saves them: each rank takes its part."""
        for name, parameter in self.named_parameters(remove_duplicate=False):
            whole = state_dict.get(prefix + name)
            if whole is not None:
                state_dict[prefix + name] = part_like(parameter, whole)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # pyright: ignore[reportPrivateUsage]

    def __reduce_ex__(self, protocol: Any) -> Any:
        message = "each rank has parts of it, so it is not pickled; save its state (torch.distributed.checkpoint)"
        raise InputError.of("module", message)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedModule":
        reduced: Any = super().__reduce_ex__(4)
        make, arguments, state, *_ = reduced
        memo[id(self)] = twin = make(*arguments)
        twin.__setstate__(copy.deepcopy(state, memo))
        refuse_part_calls(twin)
        return twin

    def __copy__(self) -> "ShardedModule":
        reduced: Any = super().__reduce_ex__(4)
        make, arguments, state, *_ = reduced
        twin = make(*arguments)
        twin.__setstate__({**state})
        return twin

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Let accelerate wrap it in nothing, and compute as accelerate was asked to."""
        self.autoshard.format = format_of_accelerate()
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, _: bool) -> None: ...


def _sharded_class(kind: type[torch.nn.Module]) -> type[ShardedModule]:
    """Return the class of sharded modules of a kind, whose forward has the kind's arguments for those who ask."""

    # torch.compile around it would compile what prepares a call, and find nothing else.
    @wraps(kind.forward)
    @torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]
    def forward(self: ShardedModule, *args: Any, **kwargs: Any) -> Any:
        return ShardedModule.forward(self, *args, **kwargs)

    attributes = {"__module__": kind.__module__, "forward": forward, **methods_for_parts(kind)}
    return type(f"Sharded{kind.__name__}", (ShardedModule, kind), attributes)


class ShardedCalls:
    """The programs of a module: for calls that differ in shapes, modes or formats it is traced again."""

    def __init__(self, kind: type[torch.nn.Module], first: RankRunner, rank_inputs: RankInputs | None) -> None:
        self.kind, self.first, self.runners, self.rank_inputs = kind, first, [first], rank_inputs
        self.format: torch.dtype | None = None  # of autocast
        self.signature = first.exported.signature
        self.trees: WeakKeyDictionary[torch.nn.Module, ModuleTree] = WeakKeyDictionary()  # of the module and its copies

    def __deepcopy__(self, _: Any) -> "ShardedCalls":
        """Let copies of the module, such as averages of its weights, share its programs."""
        return self

    def __call__(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the program for a call like this."""
        values, layout = flattened(self.signature, args, kwargs)
        flat: list[Any] = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
        modules, rows = tree_of(module, self.trees), None
        if self.rank_inputs:
            fits = [runner.exported.state.difference(modules) is None for runner in self.runners[:_MOST_COMPARED]]
            called, states = (self.signature, layout, flat), sum(fit << number for number, fit in enumerate(fits))
            now = ModuleCall.of(modules, layout, ())
            setting = now.modes, now.trained, now.autocast, torch.is_grad_enabled()
            flat, rows = self.rank_inputs.agreed(called, setting, states)
        call = ModuleCall.of(modules, layout, flat)
        changed = ""
        for runner in [candidate for candidate in self.runners if candidate.exported.call.serves(call)]:
            changed = runner.exported.state.difference(modules)
            if changed is None:
                break
        else:
            runner = self._added(module, layout, flat, changed or "")
        results = runner(module, flat, rows)
        runner.exported.state.note(module)
        return results

    def _added(self, module: torch.nn.Module, layout: TreeSpec, flat: Sequence[Any], changed: str) -> RankRunner:
        """Trace the module again; its parameters stay where they are."""
        telling = told(f"traces {self.kind.__name__} for another kind of call")
        with _without_numbers(module, self.kind, self.first.device_mesh.device_type), telling:
            exported = ExportedModule.called(module, self.signature, layout, flat)
        sharding, first = self.first.sharding.again(exported), self.first.program
        _require_alike(sharding)
        formats = first.context.formats
        program = RankProgram(
            sharding, first.place.rank, formats.device, torch.float64 if formats.exact else torch.float32,
            world=first.context.world,
        )  # fmt: skip
        self.runners.append(RankRunner(program, self.first.device_mesh, self.first.capture))
        if len(self.runners) == _MANY:
            warnings.warn(_TOO_MANY + (f"; {changed} changes: give it as an input" if changed else ""), stacklevel=3)
        return self.runners[-1]


@contextmanager
def _without_numbers(module: torch.nn.Module, kind: type[torch.nn.Module], device: str) -> Iterator[None]:
    """Let a module be traced: as its own class, with whole parameters that have no numbers.

    What lies on the meta device is traced as if it lay on ``device``.
    """
    sharded_class, mode, fakes = type(module), FakeTensorMode(allow_non_fake_inputs=True), dict[int, torch.Tensor]()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            where = torch.device(device) if tensor.is_meta else tensor.device
            with mode:
                whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                fakes[id(tensor)] = (
                    torch.nn.Parameter(whole, requires_grad=tensor.requires_grad) if is_parameter else whole
                )
        return fakes[id(tensor)]

    spaces: list[dict[str, Any]] = [
        space
        for submodule in module.modules()
        for space in (submodule._parameters, submodule._buffers)  # pyright: ignore[reportPrivateUsage]
    ]
    originals = [{**space} for space in spaces]
    try:
        allow_part_calls(module)
        module.__class__ = kind
        for space in spaces:
            for name, tensor in space.items():
                if isinstance(tensor, torch.nn.Parameter) or (tensor is not None and tensor.is_meta):
                    space[name] = fake(tensor)
        yield
    finally:
        for space, named in zip(spaces, originals, strict=True):
            space.update(named)
        module.__class__ = sharded_class
        if issubclass(sharded_class, ShardedModule):
            refuse_part_calls(module)


def _place_parameters(module: torch.nn.Module, program: RankProgram, device_mesh: DeviceMesh) -> None:
    """Replace every parameter by its part on this rank; those that the program does not read stay whole."""
    weights = {weight.path: weight for weight in program.weights.values()}
    placed: dict[int, torch.nn.Parameter] = {}
    for buffer in module.buffers():
        if not buffer.is_meta:
            buffer.data = _of_rank_0(buffer)
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        if id(parameter) not in placed:
            weight, whole = weights.get(path), parameter.detach()
            if not whole.is_meta:
                whole = whole.copy_(_of_rank_0(whole))
            local, where = whole, tuple(Replicate() for _ in device_mesh.shape)
            if weight:
                local, where = _cut(whole, weight.rest, weight.positions, program), weight.placements
            tensor = DTensor.from_local(
                local.clone(), device_mesh, where, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            placed[id(parameter)] = _with_hooks_of(
                parameter, torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            )
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, placed[id(parameter)])


def _of_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Return what rank 0 has of a tensor, side by side in memory, whatever its format."""
    packed = tensor.detach().contiguous()
    dist.broadcast(packed.reshape(-1).view(torch.uint8), 0)
    return packed


def _with_hooks_of(old: torch.nn.Parameter, new: torch.nn.Parameter) -> torch.nn.Parameter:
    """Let a parameter call the hooks of the one that it replaces; they are given gradients as DTensors."""
    for hook in (old._backward_hooks or {}).values():  # pyright: ignore
        new.register_hook(hook)  # pyright: ignore
    for hook in (old._post_accumulate_grad_hooks or {}).values():  # pyright: ignore
        new.register_post_accumulate_grad_hook(hook)  # pyright: ignore
    return new


def _cut(whole: torch.Tensor, layout: Layout, positions: Positions, program: RankProgram) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    sizes = program.sharding.traced.sizes
    part = whole.reshape([sizes[dim] for position in positions for dim in position])
    for axis, (start, stop) in enumerate(program.place.bounds(layout)):
        part = part.narrow(axis, start, stop - start)
    return part.reshape(local_shape(program.place, layout, positions))


def _require_alike(sharding: ModuleSharding) -> None:
    """Refuse to run where ranks have sharded differently: they would wait for each other."""
    layouts = sharding.sharding
    lines = [*layouts.table.items(), *layouts.rests.items()]
    signature = block_hash(sharding.traced), hashlib.sha256(repr(sorted(lines)).encode()).hexdigest()
    signatures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(signatures, signature)
    require(
        (
            len(set(signatures)) == 1,
            "module",
            "was sharded differently on some ranks; give all the same module and inputs",
        )
    )
