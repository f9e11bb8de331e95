"""Run a module on one process and on four, in processes of their own, and compare numbers, gradients and training."""

import copy
import multiprocessing
import pickle
import random
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map

from autoshard.errors import InputError
from autoshard.modules.nodes import place_in_tree
from autoshard.modules.running.meshes import cluster_of, device_mesh_of
from autoshard.modules.running.optimizer import sharded_optimizer
from autoshard.modules.shard import ModuleSharding, shard_module
from autoshard.modules.sharded import run_on
from benchmarks.foreign_modules.registry import ForeignModule
from tests.modules.comparing import cut_at_random

MESH = {"dp": 2, "tp": 2}
NUM_RANKS = 4
STEPS = 10
MOST_CPU_S = 300  # of one process
FP64, MIXED, FP32 = "FP64", "FP64 with parts in FP32", "FP32"
BARS = {FP64: 1e-9, MIXED: 1e-5, FP32: 1e-3}  # of relative differences
_SMALL = 1e-3  # of the largest gradient: below, a gradient is held against this share of it
_RATE = 1e-3
_NOISE = 0.02  # added to all parameters, because those that begin as zero hide what follows them
_TIMEOUT = timedelta(minutes=10)

EQUAL, WRONG, REFUSED, FAILED = "equal", "wrong", "refused", "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a module: the largest relative differences from one process, or why there are none."""

    kind: str
    words: str = ""
    format: str = FP64
    results: float = 0.0
    gradients: float = 0.0
    losses: float = 0.0
    kept_whole: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Results and gradients of a module, and its losses while AdamW trains it."""

    results: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    losses: Sequence[float]


def compared(foreign: ForeignModule) -> Outcome:
    """Make, trace, solve and run a module in a process of its own, and in four that are forks of it."""
    return _in_process(_compared, foreign)


def _in_process(body: Callable[..., Any], *args: Any) -> Any:
    return _answers([_started(body, *args)])[0]


def _started(body: Callable[..., Any], *args: Any) -> tuple[Any, Connection]:
    """Start a fork: packages are imported once."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_answering, args=(there, body, *args))
    process.start()
    there.close()
    return process, here


def _answering(there: Connection, body: Callable[..., Any], *args: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    torch.set_num_threads(1)
    try:
        there.send_bytes(pickle.dumps(body(*args)))
    except InputError as error:
        there.send_bytes(pickle.dumps(Outcome(kind=REFUSED, words=_without_folders(str(error)))))
    except BaseException:
        there.send_bytes(pickle.dumps(Outcome(kind=FAILED, words=_without_folders(traceback.format_exc()))))


def _answers(started: Sequence[tuple[Any, Connection]]) -> list[Any]:
    """Return what all processes answer; after a failure the others are ended, because they may wait for it."""
    answers = list[Any]()
    for process, here in started:
        try:
            answers.append(pickle.loads(here.recv_bytes()))
        except EOFError:
            words = f"a process ended without an answer; each has {MOST_CPU_S} CPU seconds"
            answers.append(Outcome(kind=FAILED, words=words))
        if isinstance(answers[-1], Outcome) and answers[-1].kind == FAILED:
            for other, _ in started:
                other.terminate()
        process.join()
    return answers


def _without_folders(text: str) -> str:
    """Leave out where packages lie on this machine."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        text = text.replace(f"{Path(folder)}/", "")
    return text


def _compared(foreign: ForeignModule) -> Outcome:
    module, inputs = prepared(foreign)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    expected = passes(module, inputs, torch.optim.AdamW(module.parameters(), lr=_RATE), STEPS)
    module.load_state_dict(state)
    module.zero_grad()
    solved = shard_module(
        module, inputs, cluster_of("local", NUM_RANKS), MESH, results=places(module, inputs), precision="fp32"
    )
    shardings = [solved, cut_at_random(solved, random.Random(0))]
    with tempfile.TemporaryDirectory() as folder:
        where = f"file://{folder}/store"
        ranks = [_started(_on_rank, rank, where, module, inputs, shardings) for rank in range(NUM_RANKS)]
        answers = _answers(ranks)
    if refused := next((answer for answer in answers if isinstance(answer, Outcome)), None):
        return refused
    far = [differences(expected, found) for answer in answers for found in answer]
    results, gradients, losses = (max(column) for column in zip(*far, strict=True))
    format = FP32 if foreign.dtype == torch.float32 else MIXED if has_single_numbers(solved) else FP64
    is_equal = max(results, gradients, losses) <= BARS[format]
    return Outcome(
        kind=EQUAL if is_equal else WRONG, format=format, results=results, gradients=gradients, losses=losses,
        kept_whole=len(solved.kept_whole),
    )  # fmt: skip


def prepared(foreign: ForeignModule) -> tuple[torch.nn.Module, Any]:
    """Make a module and its inputs in the format in which it is tried."""
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    module = foreign.make().train(foreign.training)
    module = module.double() if foreign.dtype == torch.float64 else module.float()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(_NOISE * torch.randn_like(parameter))

    def in_format(value: Any) -> Any:
        return value.to(foreign.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return module, tree_map(in_format, foreign.inputs())


def places(module: torch.nn.Module, inputs: Any) -> list[str]:
    """Name all results: without a choice gradients would begin at a loss alone."""
    returned = _returned(module, inputs)
    tensors = [path for path, value in tree_flatten_with_path(returned)[0] if isinstance(value, torch.Tensor)]
    return [place_in_tree(path) or "result" for path in tensors]


def has_single_numbers(sharding: ModuleSharding) -> bool:
    """Whether a module in FP64 computes something that depends on a parameter in FP32."""
    program = sharding.captured.exported.program
    depends = {*program.graph_signature.inputs_to_parameters}
    for node in program.graph.nodes:
        if any(read.name in depends for read in node.all_input_nodes):
            depends.add(node.name)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                return True
    return False


def _on_rank(
    rank: int, where: str, module: torch.nn.Module, inputs: Any, shardings: Sequence[ModuleSharding]
) -> list[Passes]:
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=NUM_RANKS, timeout=_TIMEOUT)
    found = list[Passes]()
    for sharding in shardings:
        is_solved = sharding is shardings[0]  # and runs as users run it; the other one step by step, since it runs once
        devices, mode = device_mesh_of(module, MESH), "generated" if is_solved else "literal"
        sharded = run_on(copy.deepcopy(module), sharding, devices, mode=mode)
        optimizer = sharded_optimizer(torch.optim.AdamW, sharded.parameters(), lr=_RATE)
        found.append(passes(sharded, inputs, optimizer, STEPS if is_solved else 0))
    dist.destroy_process_group()
    return found


def passes(module: torch.nn.Module, inputs: Any, optimizer: Any, steps: int) -> Passes:
    """Run a module forward and backward, then train it for some steps."""
    results, losses = _called(module, inputs), list[float]()
    loss_of(results).backward()  # pyright: ignore[reportUnknownMemberType]
    gradients = [_gradient(parameter) for parameter in module.parameters()]
    for _ in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        loss = loss_of(_called(module, inputs))
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.item())
    return Passes(results=[result.detach() for result in results], gradients=gradients, losses=losses)


def _called(module: torch.nn.Module, inputs: Any) -> list[torch.Tensor]:
    return [result for result in tree_flatten(_returned(module, inputs))[0] if isinstance(result, torch.Tensor)]


def _returned(module: torch.nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def loss_of(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a loss that reads every number of all results, each in another way."""
    numbers, losses = torch.Generator().manual_seed(1), list[torch.Tensor]()
    for result in results:
        if result.requires_grad:
            wanted = torch.randn(result.shape, dtype=torch.float64, generator=numbers).to(result.dtype)
            losses.append((result - wanted).square().mean())
    return torch.stack(losses).sum()


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient: Any = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape)
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()


def differences(expected: Passes, answer: Passes) -> tuple[float, float, float]:
    """Return the largest relative differences of results, of gradients, and of losses."""
    results = [_far(one, other) / (_largest(one) or 1.0) for one, other in _pairs(expected.results, answer.results)]
    floor = _SMALL * max(map(_largest, expected.gradients), default=0.0)
    gradients = [
        _far(one, other) / (max(_largest(one), floor) or 1.0)
        for one, other in _pairs(expected.gradients, answer.gradients)
    ]
    losses = [abs(one - other) / (abs(one) or 1.0) for one, other in zip(expected.losses, answer.losses, strict=False)]
    return max(results, default=0.0), max(gradients, default=0.0), max(losses, default=0.0)


def _pairs(ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(one.double(), other.double()) for one, other in zip(ours, others, strict=True)]


def _far(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape, f"{tuple(other.shape)} in place of {tuple(one.shape)}"
    return _largest(one - other)


def _largest(tensor: torch.Tensor) -> float:
    found = float(tensor.abs().max()) if tensor.numel() else 0.0
    return found if found == found else float("inf")
