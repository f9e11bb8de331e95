"""The passes of a rank as few functions: what torch computes between two collectives is one of them.

Both passes are recorded together, without numbers, so that what torch keeps of a region for its gradients is made by
one function and read by another. Collectives, and functions that the user marks, are called as they are. Functions end
where a layer ends, so that equal layers have equal functions, which are written, and compiled, once.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_autocast_cache

from autoshard.engine.torch.execution import RankStep, StepFunction, Values, dropping, run_steps
from autoshard.engine.torch.recording import Operation, Recording, live_operations
from autoshard.modules.running.functions import FunctionWriter
from autoshard.modules.running.passes import Passes
from autoshard.modules.running.views import with_fewer_views


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCapture:
    """Turns the steps of a rank into functions."""

    writer: FunctionWriter

    def captured(self, passes: Passes, values: Values) -> Passes:
        """Return the passes as functions, for parameters and inputs like these."""
        try:
            return _RecordedPasses(passes, values).written(self.writer)
        except Exception as error:  # torch raises anything while it computes without numbers
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"the module runs step by step, without functions: {reason}", stacklevel=2)
            return passes


@dataclass(slots=True, kw_only=True, eq=False)
class _RecordedPart:
    """The operations of one function, or a step that is called as it is, with the tensors that it reads and makes."""

    pass_: str
    layer: str
    step: RankStep | None = None
    operations: list[Operation] = field(default_factory=list[Operation])
    reads: Sequence[torch.Tensor] = ()
    writes: Sequence[torch.Tensor] = ()


class _RecordedPasses:
    """The operations of both passes, in parts that become functions."""

    def __init__(self, passes: Passes, values: Values) -> None:
        self.steps, self.recording, self.parts = passes, Recording(), list[_RecordedPart]()
        self.outside: dict[str, torch.Tensor] = {}
        with FakeTensorMode(), torch.no_grad(), disable_autocast_cache():
            self.ends = self._recorded({name: self._from_outside(name, value) for name, value in values.items()})
        stand_ins: dict[int, torch.Tensor] = {}
        for part in self.parts:
            part.operations = [*with_fewer_views(part.operations, stand_ins)]
            part.reads = [stand_ins.get(id(tensor), tensor) for tensor in part.reads]
        self.ends = {name: stand_ins.get(id(tensor), tensor) for name, tensor in self.ends.items()}
        read_later = {id(tensor) for tensor in self.ends.values()}
        for part in reversed(self.parts):
            if not part.step:
                results = (result for operation in part.operations for result in operation.results)
                part.writes = [result for result in results if id(result) in read_later]
                part.operations = live_operations(part.operations, read_later)
            read_later.update(map(id, part.reads))
        self.parts = [part for part in self.parts if part.step or part.operations]

    # -- recording -------------------------------------------------------------------------------------

    def _from_outside(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self.outside[name] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        return self.recording.name(self.outside[name])

    def _recorded(self, values: Values) -> dict[str, torch.Tensor]:
        """Run both passes, and return their ends by name."""
        inputs, steps = dict(values), self.steps
        self._run("F", steps.forward, values)
        ends = {name: values[name] for name in steps.results}
        if steps.backward:
            seeds = {name: self._from_outside(name, ends[result]) for name, result in steps.seeds.items()}
            values = inputs | {name: values[name] for name in steps.saved} | seeds
            self._run("B", steps.backward, values)
        return ends | {name: values[name] for name in steps.gradients}

    def _run(self, pass_: str, steps: Sequence[RankStep], values: Values) -> None:
        for step in steps:
            run = partial(self._called if step.stand_in else self._computed, pass_, step)
            run_steps([replace(step, run=run)], values)

    def _called(self, pass_: str, step: RankStep, *reads: torch.Tensor) -> Sequence[torch.Tensor]:
        """Note a step that is called as it is; return how its results look."""
        assert step.stand_in, "it is called as it is"
        results = [*map(self.recording.name, step.stand_in(*reads))]
        self.parts.append(_RecordedPart(pass_=pass_, layer=step.layer, step=step, reads=reads, writes=results))
        return results

    def _computed(self, pass_: str, step: RankStep, *reads: torch.Tensor) -> Sequence[torch.Tensor]:
        """Note the operations of a step in the part of its layer."""
        assert step.run, "nothing comes from outside here"
        with self.recording:
            results = step.run(*reads)
        if self.recording.operations:
            last = self.parts[-1] if self.parts else None
            if last is None or last.step or (last.pass_, last.layer) != (pass_, step.layer):
                self.parts.append(_RecordedPart(pass_=pass_, layer=step.layer))
            self.parts[-1].operations += self.recording.operations
            self.recording.operations.clear()
        return results

    # -- functions -------------------------------------------------------------------------------------

    def written(self, writer: FunctionWriter) -> Passes:
        """Return the passes in functions of operations between what is called as it is."""
        names = {id(tensor): name for name, tensor in self.outside.items()}
        steps: dict[str, list[RankStep]] = {"F": [], "B": []}
        formats: dict[str, dict[str, torch.dtype]] = {"F": {}, "B": {}}  # of what comes from outside
        for part in self.parts:
            if part.step:
                run, reads, writes, empties = _as_expected(part.step), part.reads, part.writes, False
            else:
                function = writer.function(part.operations, part.writes)
                run, reads, writes, empties = function.run, function.reads, function.writes, True
            names |= {id(tensor): f"%{len(names) + number}" for number, tensor in enumerate(writes)}
            inputs, outputs = (tuple(names[id(tensor)] for tensor in tensors) for tensors in (reads, writes))
            steps[part.pass_].append(RankStep(run=run, reads=inputs, writes=outputs, empties=empties))
            formats[part.pass_] |= {name: self.outside[name].dtype for name in inputs if name in self.outside}
        made_forward = {name for step in steps["F"] for name in step.writes} | self.outside.keys() - self.steps.seeds
        saved = frozenset(name for step in steps["B"] for name in step.reads if name in made_forward)
        forward, backward = (
            [_even(formats["F"]), *steps["F"], self._renamed(self.steps.results, names)],
            [_even(formats["B"]), *steps["B"], self._renamed(self.steps.gradients, names)],
        )
        return replace(
            self.steps, saved=saved,
            forward=tuple(dropping(forward, {*self.steps.results, *saved})),
            backward=tuple(dropping(backward, self.steps.gradients)),
        )  # fmt: skip

    def _renamed(self, ends: Sequence[str], names: Mapping[int, str]) -> RankStep:
        reads = tuple(names[id(self.ends[name])] for name in ends)
        return RankStep(run=lambda *values: values, reads=reads, writes=tuple(ends))


def _as_expected(step: RankStep) -> StepFunction:
    """Return a function of a step whose results lie in memory as functions expect it."""
    called = step.run
    assert called, "nothing comes from outside here"

    def run(*values: Any) -> Sequence[Any]:
        return [value.contiguous() if isinstance(value, torch.Tensor) else value for value in called(*values)]

    return run


def _even(dtypes: Mapping[str, torch.dtype]) -> RankStep:
    """Return a step that lays what comes from outside out in memory as it was traced."""
    formats = [*dtypes.values()]

    def run(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        return [
            tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()
            for tensor, dtype in zip(tensors, formats, strict=True)
        ]

    return RankStep(run=run, reads=tuple(dtypes), writes=tuple(dtypes))
