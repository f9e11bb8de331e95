"""Run one rank of the nxd engine, or lower a step of one of many, with the real torch_xla and NxD on a CPU.

``record.py`` starts it for every rank: ``on_xla.py FOLDER run|lower RANK``. In the folder are ``plan.json`` and
``given.npz``; it leaves ``RANK.json`` there, and of a lowered rank ``RANK.hlo``. A lowered rank traces its whole step
into one graph that is never executed: where the engine would cut and run a graph, only the cut is noted.
"""

# pyright: basic, reportMissingImports=false
import functools
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_env_vars
import torch_xla.core.xla_model
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.xla_backend
import torch_xla.runtime

from autoshard.plan.codec import load
from autoshard.run.protocol import StepReport
from tests.neuron import standins

LEARNING_RATE = 1e-2
SENDS = ("_xla_all_gather", "_xla_all_reduce", "_xla_reduce_scatter")


def given_steps(given: Any) -> list[list[dict[str, np.ndarray]]]:
    """Return the micro-batches of every step."""
    steps: dict[int, dict[int, dict[str, np.ndarray]]] = {}
    for key in given.files:
        if key.startswith("step/"):
            _, step, batch, name = key.split("/")
            steps.setdefault(int(step), {}).setdefault(int(batch), {})[name] = given[key]
    return [[batches[batch] for batch in sorted(batches)] for _, batches in sorted(steps.items())]


def begin(folder: Path, rank: int, num_ranks: int, tp: int) -> None:
    """Be this rank of a world whose other ranks may not exist for XLA: torch_xla would count its own devices."""
    torch_xla.device()
    # Of torch_xla until 2.1: over how many hosts ranks are spread. NxD still asks for it.
    torch_xla.core.xla_env_vars.HOST_WORLD_SIZE = "AUTOSHARD_HOSTS"
    os.environ |= {"AUTOSHARD_HOSTS": "1", "LOCAL_WORLD_SIZE": str(tp)}
    model, runtime = torch_xla.core.xla_model, torch_xla.runtime
    for name in ("global_ordinal", "local_ordinal"):
        setattr(runtime, name, lambda: rank)
    for name in ("world_size", "global_device_count", "local_process_count"):
        setattr(runtime, name, lambda: num_ranks)
    model.get_ordinal, model.rendezvous = lambda *_: rank, lambda *_, **__: []
    dist.init_process_group("xla", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks)
    standins.install_beside_xla()


def engine_of(folder: Path, given: Any) -> Any:
    """Build the engine of this rank."""
    from neuronx_distributed.parallel_layers import parallel_state

    from autoshard.engine.nxd.engine import NxdEngine

    # Else NxD runs a first sum over all ranks, to wake up their connections.
    begun = functools.partial(parallel_state.initialize_model_parallel, skip_collective_init=True)
    parallel_state.initialize_model_parallel = begun
    return NxdEngine(load(folder / "plan.json"), lambda name: given[f"weight/{name}"])


def place() -> str:
    """Return which function of the engine is at work, in a pipeline which of NxD's."""
    for frame in reversed(traceback.extract_stack()):
        if "/nxd/engine.py" in frame.filename or frame.filename.endswith("/pipeline/model.py"):
            return frame.name
    return "elsewhere"


def counted(name: str) -> int:
    return metrics.counter_value(name) or 0


def read_by_host() -> int:
    """Return how often tensors went from the device to the host."""
    data = metrics.metric_data("TransferFromDeviceTime")
    return data[0] if data else 0


def run(engine: Any, steps: Any) -> dict[str, Any]:
    """Run steps; note graphs by the place where they are cut, and what the host reads."""
    found: list[dict[str, Any]] = []
    cut, report, graphs, read = torch_xla._XLAC._xla_step_marker, engine._report, {}, [0]

    def cutting(*args: Any, **named: Any) -> Any:
        before = [counted(name) for name in ("UncachedCompile", "CachedCompile")]
        made = cut(*args, **named)
        after = [counted(name) for name in ("UncachedCompile", "CachedCompile")]
        noted = graphs.setdefault(place(), [0, 0])
        noted[:] = [old + now - then for old, then, now in zip(noted, before, after, strict=True)]
        return made

    def reporting(losses: Any) -> StepReport:
        before = read_by_host()
        made = report(losses)
        read[0] += read_by_host() - before
        return made

    torch_xla._XLAC._xla_step_marker, engine._report = cutting, reporting
    for number, step in enumerate(steps):
        graphs.clear()
        read[0], first, compiled = 0, read_by_host(), counted("UncachedCompile")
        made = engine.step(step, LEARNING_RATE * (1 + number), lambda _: True)  # a rate must not be part of a graph
        torch_xla.core.xla_model.wait_device_ops()
        found.append(
            {
                "loss": made.loss,
                "norm": made.norm,
                "graphs": {name: {"compiled": one[0], "again": one[1]} for name, one in graphs.items() if sum(one)},
                "compiled": counted("UncachedCompile") - compiled,
                "read": {"_report": read[0], "elsewhere": read_by_host() - first - read[0]},
            }
        )
    fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
    return {"steps": found, "fallbacks": [name for name in fallbacks if name != "aten::_local_scalar_dense"]}


class Noted:
    """What a rank asks torch_xla for while nothing runs: collectives, cuts of graphs, and what others read."""

    def __init__(self) -> None:
        self.calls: list[str] = []  # in order
        self.kept: list[torch.Tensor] = []

    def forget(self, call: Any) -> Any:
        """Forget what a call makes: of the search for shapes NxD runs nothing."""

        def wrapped(*args: Any) -> None:
            call(*args)
            self.calls.clear()
            self.kept.clear()

        return wrapped

    def keep(self, call: Any) -> Any:
        """Keep results: what is sent only another rank reads."""

        def wrapped(*args: Any, **named: Any) -> Any:
            self.kept.append(call(*args, **named))
            return self.kept[-1]

        return wrapped

    def note(self, name: str, call: Any) -> Any:
        """Note which tensors go over which groups."""

        def wrapped(*args: Any) -> Any:
            flat = [one for arg in args for one in (arg if isinstance(arg, list) else [arg])]
            tensors = [[str(one.dtype), list(one.shape)] for one in flat if isinstance(one, torch.Tensor)]
            groups = next(one for one in args if isinstance(one, list) and one and isinstance(one[0], list))
            how = next((one for one in args if isinstance(one, str)), "")
            self.calls.append(json.dumps([name, how, tensors, groups, place()]))
            return call(*args)

        return wrapped

    def cut(self, *_: Any, **__: Any) -> None:
        """Note where a graph would end."""
        self.calls.append(json.dumps(["cut", "", [], [], place()]))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Be the host that reads a tensor."""
        if tensor.device.type != "xla":
            return tensor
        self.kept.append(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def install_in_nxd(self) -> None:
        """Note what goes between stages; before a model is made, which takes these functions along."""
        from neuronx_distributed.pipeline import model as pipeline

        for name in ("send", "recv_from"):
            setattr(pipeline, name, self.keep(getattr(pipeline, name)))
        search = "_prepare_inputs_and_infer_shape"
        setattr(pipeline.NxDPPModel, search, self.forget(getattr(pipeline.NxDPPModel, search)))


def lower(engine: Any, steps: Any, noted: Noted) -> str:
    """Trace a step, and return the text of its graph."""
    extension = torch_xla._XLAC
    for name in dir(extension):
        if name.startswith(SENDS):
            setattr(extension, name, noted.note(name, getattr(extension, name)))
    empty = torch.zeros

    def zeros(*sizes: Any, device: Any = None, **named: Any) -> torch.Tensor:
        return empty(*sizes, **named).to(device)  # who receives gathers zeros: in one graph, equal ones would be one

    def reporting(losses: Any) -> StepReport:
        norm = (engine.optimizer.optimizer if engine.plan.zero else engine.optimizer).grad_norm
        noted.kept.extend(one for one in (losses[0], norm) if one.device.type == "xla")
        return StepReport(loss=0.0, norm=0.0)

    extension._xla_step_marker, torch.Tensor.cpu = noted.cut, lambda self, *_, **__: noted.read(self)
    torch.zeros, engine._report = zeros, reporting
    engine.step(steps[0], LEARNING_RATE, lambda _: True)
    states = [one for state in engine.state.stepping.state.values() for one in state.values()]
    updated = [tensor for one in engine.state.optimized for tensor in (one.parameter, one.updated)]
    return extension._get_xla_tensors_hlo([one for one in (*noted.kept, *updated, *states) if one.device.type == "xla"])


def main(folder: Path, what: str, rank: int) -> None:
    given, plan = np.load(folder / "given.npz"), load(folder / "plan.json")
    begin(folder, rank, plan.mesh.num_ranks, plan.mesh.size("tp"))
    noted = Noted()
    if what == "lower":
        noted.install_in_nxd()
    engine, steps = engine_of(folder, given), given_steps(given)
    if what == "run":
        found: dict[str, Any] = run(engine, steps)
    else:
        (folder / f"{rank}.hlo").write_text(lower(engine, steps, noted), encoding="utf-8")
        found = {"calls": noted.calls}
    from neuronx_distributed._version import __version__

    found["versions"] = {"torch_xla": torch_xla.__version__, "torch": torch.__version__, "nxd": __version__}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier(group=engine._hosts)  # who leaves first would take the file of the world's store along
    sys.stdout.flush()
    os._exit(0)  # what was traced and never run would be run now


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
