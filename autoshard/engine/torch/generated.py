"""A block as plain functions, one for each pass, made from its program by recording the interpreter's own kernels.

No kernel is written a second time: the functions repeat the calls of torch that the interpreter's kernels made, on
tensors with the shapes of this rank and no numbers. Where a call cannot be recorded (a collective, a ring of keys, an
operation that depends on a batch's documents, a user's kernel) they call the same function as the interpreter.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo  # which the first operation on shapes imports: once, before ranks are forked

from autoshard.engine.observing import Observation
from autoshard.engine.programs import BlockProgram
from autoshard.engine.routing import CountRows
from autoshard.engine.torch.block import LiteralRun
from autoshard.engine.torch.execution import (
    ANY_COUNT,
    BY_BATCH,
    FewRows,
    InputSource,
    RankStep,
    StepFunction,
    Values,
    fits,
    flat_rows,
)
from autoshard.engine.torch.formats import NOWHERE
from autoshard.engine.torch.kernels import Rotations
from autoshard.engine.torch.recording import Operation, Recording, live_operations
from autoshard.engine.torch.steps import NUMBERS, RankContext
from autoshard.engine.torch.writing import NAMES, PassText, Statement, Step, Variables, module, piece, statements
from autoshard.layout.program import Communicate, Compute, CountOnce, Given, Instruction, Value
from autoshard.schedule.builders import ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One pass of a block as a function."""

    run: Callable[..., Any]
    calls: tuple[StepFunction, ...]
    constants: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedRun:
    """Executes a block's functions."""

    parts: BlockProgram
    file_name: str
    text: str  # of that file
    functions: Mapping[str, Function]  # by kind of action

    def forward(self, source: InputSource) -> tuple[torch.Tensor, Values]:
        """Run the forward pass; return the block's output, and all values that backward reads."""
        function = self.functions["F"]
        return function.run(source, function.calls, function.constants)

    def backward(self, kind: ActionKind, source: InputSource, values: Values) -> torch.Tensor | None:
        """Run B, or a half of it (I, W); return the gradient of the block's input."""
        function = self.functions[kind]
        return function.run(source, function.calls, function.constants, values)


Tensors = dict[str, torch.Tensor]
# Takes a piece of a function, which empties its list of inputs, and tensors that look like these inputs.
Compiler = Callable[[Callable[..., Any], Sequence[torch.Tensor]], Callable[..., Any]]
_BEFORE: Mapping[str, str] = {"F": "", "B": "F", "I": "F", "W": "I"}  # the pass whose values a pass reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Makes functions of a rank's programs; a constant of several functions lies on the device once."""

    context: RankContext
    kinds: Sequence[str]  # of the rank's actions: F, and B or I and W, or all
    compiler: Compiler | None = None
    recording: Recording = field(default_factory=Recording)
    memories: dict[int, torch.Tensor] = field(default_factory=dict)
    rotations: Rotations = field(default_factory=Rotations)

    def generate(self, parts: BlockProgram, names: Sequence[str]) -> GeneratedRun:
        """Record all passes of the program of these blocks, write them down, and read what was written."""
        context = replace(self.context, joins=self.compiler is not None)
        silent = replace(context, world=self.context.world.silent(), rotations=self.rotations)
        talking, rehearsed = LiteralRun.of(context, parts), LiteralRun.of(silent, parts)
        passes: dict[str, _RecordedPass] = {}
        for kind in self.kinds:
            before = passes[_BEFORE[kind]].left if _BEFORE[kind] else {}
            passes[kind] = _RecordedPass(kind, rehearsed, self, dict(before))
            self.rotations.forget(self.recording.variables)  # which belong to this pass
        written = {kind: recorded.written() for kind, recorded in passes.items()}
        texts, examples = list[str](), dict[str, Sequence[torch.Tensor]]()
        for kind, pass_text in written.items():
            text, pieces = pass_text.in_pieces() if self.compiler else (pass_text.whole(), {})
            tensors, by_rows = passes[kind].variables.tensors, passes[kind].functions
            texts += [*(row_text for row_text, _ in by_rows.values()), text]
            examples |= {name: row_inputs for name, (_, row_inputs) in by_rows.items()}
            examples |= {name: [tensors[variable] for variable in reads] for name, reads in pieces.items()}
        whole, space = module(names, self.context.formats.device, texts), dict[str, Any]()
        file_name = names[0].replace(".", "_")
        exec(compile(whole, f"generated/{file_name}.py", "exec"), space)
        if self.compiler:
            space |= {name: self.compiler(space[name], inputs) for name, inputs in examples.items()}
        functions = {
            kind: Function(
                run=space[pass_text.name],
                calls=tuple(_called(step) for step in talking.steps[kind] if step.run and not step.is_local),
                constants=tuple(self._placed(passes[kind].variables.constants[name]) for name in pass_text.constants),
            )
            for kind, pass_text in written.items()
        }
        return GeneratedRun(parts=parts, file_name=file_name, text=whole, functions=functions)

    def _placed(self, constant: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return a constant on the device of its operations: one copy for all views of the same memory."""
        tensor, numbers = constant
        if not tensor.is_meta:
            return numbers
        key = numbers.untyped_storage().data_ptr()
        if key not in self.memories:
            flat = numbers.new_empty(0).set_(numbers.untyped_storage())
            self.memories[key] = flat.to(self.context.formats.device)
        return self.memories[key].as_strided(numbers.shape, numbers.stride(), numbers.storage_offset())

    def example(self, parts: BlockProgram, entry: Given) -> torch.Tensor:
        """Return a tensor without numbers for a value that the block takes from outside."""
        context, layout, name = self.context, entry.value.layout, entry.value.tensor
        if name in BY_BATCH:
            return torch.zeros(context.mesh_rank.shape(layout), dtype=torch.int64)
        return context.numbers(name, layout) if name in NUMBERS else self.empty(parts, entry.value)

    def empty(self, parts: BlockProgram, value: Value) -> torch.Tensor:
        """Return a contiguous tensor with the shape that the table says."""
        dtype = self.context.formats.of(parts.block.tensors[value.tensor].dtype)
        return torch.empty(self.context.mesh_rank.shape(value.layout), dtype=dtype, device=NOWHERE)


def _called(step: RankStep) -> StepFunction:
    """Return a function to call; its results are contiguous, whatever strides the numbers of a batch gave them."""
    run = step.run
    assert run, "a step that takes a tensor from outside is not called"
    if not isinstance(step.entry, Compute):
        return run
    return lambda *inputs: tuple(result.contiguous() for result in run(*inputs))


class _RecordedSteps:
    """Steps that were rehearsed on shapes, each with its inputs, its results and its operations."""

    def __init__(self, recording: Recording, name: str) -> None:
        """Start without steps; they are written as a function of this name."""
        self.name, self.variables = name, Variables()
        self.functions: dict[str, tuple[str, Sequence[torch.Tensor]]] = {}  # of a few rows: text, inputs
        self._recording = recording
        self._steps: list[tuple[RankStep, list[torch.Tensor], list[Operation]]] = []

    def record(self, step: RankStep, values: Tensors) -> None:
        """Run a local step, and record its operations with its inputs and results."""
        self._recording.operations.clear()
        reads = [values[name] for name in step.reads]
        assert step.run, "an operation runs"
        with self._recording:
            results = step.run(*reads)
        self.note(step, values, reads, results)

    def note(
        self, step: RankStep, values: Tensors, reads: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """Note a step with its inputs and results; name the results, and drop the values that the step drops."""
        for name, tensor, shape in zip(step.writes, results, step.shapes, strict=True):
            assert fits(tensor, shape), f"{name} is {tuple(tensor.shape)}, not {shape}"
            values[name] = tensor
            if self._is_variable(tensor):
                self.variables.call(tensor, name)
        self._steps.append((step, [*reads, *results], list(self._recording.operations)))
        for name in step.drops:
            del values[name]

    def _is_variable(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._recording.variables

    def written_steps(self, alive: set[int]) -> tuple[Step, ...]:
        """Return the steps as statements, without operations whose results nobody reads.

        Results are read by later steps, or are ``alive``: so the steps are searched backward, and then named forward.
        """
        live: list[tuple[RankStep, Sequence[torch.Tensor], list[Operation]]] = []
        for step, tensors, operations in reversed(self._steps):
            if step.is_local and not step.few:
                live.append((step, tensors, live_operations(operations, alive)))
            elif not isinstance(step.entry, Given) or id(tensors[0]) in alive:
                alive.update(map(id, tensors))
                live.append((step, tensors, []))
        live = [
            (step, tensors, [operation for operation in operations if not self._shares_name(operation)])
            for step, tensors, operations in reversed(live)
        ]
        reads = [tensor for _, _, operations in live for operation in operations for tensor in operation.reads]
        self._name_constants(reads)
        read_once = {tensor for tensor, count in Counter(map(id, reads)).items() if count == 1}
        read_once -= self.variables.names.keys()  # values of the table have statements of their own
        steps, num_calls = list[Step](), 0
        for step, tensors, operations in live:
            if isinstance(step.entry, Given):
                lines = [self._from_source(step.reads, tensors[0])] if self._is_variable(tensors[0]) else []
            elif step.few:
                lines = self._by_rows(step, step.few, tensors)
            elif step.is_local:
                lines = [*statements(operations, self.variables, read_once)]
            else:
                count = len(step.reads)
                lines = [self._call(num_calls, tensors[:count], tensors[count:])]
                num_calls += 1
            steps.append(Step(
                comment=step.about or _comment(step.entry), statements=tuple(lines),
                takes=step.run is None, compiles=step.is_local and not (step.adds or step.few),
            ))  # fmt: skip
        return tuple(steps)

    def _from_source(self, names: Sequence[str], tensor: torch.Tensor) -> Statement:
        variable = self.variables.of(tensor)
        return Statement(text=f"{variable} = source({', '.join(map(repr, names))})", writes=(variable,))

    def _by_rows(self, step: RankStep, few: FewRows, tensors: Sequence[torch.Tensor]) -> list[Statement]:
        """Write a function of a few rows; return the statements that call it for all rows."""
        inner = _RecordedSteps(self._recording, f"{self.name}_{len(self.functions) + 1}")
        rows = [self._recording.name(flat_rows(tensor).narrow(1, 0, few.rows)) for tensor in tensors]
        values = dict(zip(few.reads, rows, strict=True))
        for name, tensor in values.items():
            inner.variables.call(tensor, name)
        whole = {
            inner.variables.of(part): self.variables.of(tensor) for part, tensor in zip(rows, tensors, strict=True)
        }
        for row_step in few.steps:
            inner.record(row_step, values)
        text, reads, _ = piece(inner.name, inner.written_steps(set()), set())
        assert not inner.variables.constants, "what follows from the plan alone is as long as all rows"
        self.functions[inner.name] = text, [inner.variables.tensors[name] for name in reads]
        results = {self.variables.of(tensor): tensor for tensor in tensors[len(step.reads) :]}
        lines = [
            Statement(
                text=f"{name} = torch.empty({[*result.shape]}, dtype={result.dtype}, device=device)", writes=(name,)
            )
            for name, result in results.items()
        ]
        arguments = tuple(whole[name] for name in reads)
        call = f"by_rows({inner.name}, [{', '.join(arguments)}], {few.rows})"
        return [*lines, Statement(text=call, reads=arguments)]

    def _call(self, number: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Statement:
        self._name_constants(reads)
        arguments, targets = (tuple(map(self.variables.of, tensors)) for tensors in (reads, writes))
        text = f"{', '.join(targets)}, = calls[{number}]({', '.join(arguments)})"
        return Statement(text=text, reads=arguments, writes=targets)

    def _shares_name(self, operation: Operation) -> bool:
        """Give the result of an operation that copies nothing (detach, alias) its input's name.

        Return whether the operation need not be written: both tensors have one name.
        """
        names = self.variables.names
        if operation.is_same and self._is_variable(operation.args[0]):
            before, after = id(operation.args[0]), id(operation.results[0])
            if before not in names and after in names:
                names[before] = names[after]
            names.setdefault(after, self.variables.of(operation.args[0]))
            return names[before] == names[after]
        return False

    def _name_constants(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if not self._is_variable(tensor):
                self.variables.constant(tensor, self._recording.number(tensor))


class _RecordedPass(_RecordedSteps):
    """A pass rehearsed on shapes, and the values left at the end."""

    def __init__(self, kind: str, rehearsed: LiteralRun, generator: Generator, values: Tensors) -> None:
        """Run all steps on the values that an earlier pass left."""
        super().__init__(generator.recording, NAMES[kind])
        self.kind, self.values = kind, values
        self._run, self._before = rehearsed, dict(values)
        for value, tensor in values.items():
            if self._is_variable(tensor):
                self.variables.call(tensor, value)
        for step in rehearsed.steps[kind]:
            self._step(generator, step)
        name = rehearsed.handed_on if kind == "F" else rehearsed.handed_back[kind]
        self.result = values[name] if name else None
        if kind == "F" and not rehearsed.hands_on_what_it_keeps:
            del values[rehearsed.handed_on]
        if kind == "I":
            self.values = {value: tensor for value, tensor in values.items() if value in rehearsed.waiting}

    @property
    def left(self) -> Tensors:
        """The values for the next pass; what is noted for reports goes elsewhere."""
        return {value: tensor for value, tensor in self.values.items() if value not in self._run.noted}

    def _step(self, generator: Generator, step: RankStep) -> None:
        if step.run and step.is_local and not step.few:
            self.record(step, self.values)
            return
        recording, values = self._recording, self.values
        recording.operations.clear()
        reads = [] if step.run is None else [values[name] for name in step.reads]
        if isinstance(step.entry, Given):
            tensor = generator.example(self._run.parts, step.entry)
            if len(step.reads) > 1:
                tensor = tensor.new_empty(step.shapes[0])
            varies = tensor.is_meta or step.entry.value.tensor in BY_BATCH
            results = (recording.name(tensor) if varies else tensor,)
        elif step.few:
            results = tuple(map(recording.name, step.few.empty(step.shapes, NOWHERE)))
        elif isinstance(step.entry, Communicate) and step.entry.writes.tensor in NUMBERS:
            # All ranks have them already; they are sent, and stay in memory, because the table says so.
            results = (recording.name(generator.context.numbers(step.entry.writes.tensor, step.entry.writes.layout)),)
        elif isinstance(step.entry, Compute) and not step.counted:
            results = tuple(recording.name(generator.empty(self._run.parts, value)) for value in step.entry.writes)
        else:
            results = tuple(map(recording.name, _called(step)(*reads)))
            for result, shape in zip(results, step.shapes, strict=True):
                if ANY_COUNT in shape:
                    torch._dynamo.mark_dynamic(result, shape.index(ANY_COUNT))
        self.note(step, values, reads, results)

    def written(self) -> PassText:
        """Return the text of the pass, without operations whose results nobody reads."""
        after, before = (
            {value: self.variables.of(tensor) for value, tensor in values.items() if self._is_variable(tensor)}
            for values in (self.values, self._before)
        )
        alive = {id(tensor) for tensor in (*self.values.values(), *([] if self.result is None else [self.result]))}
        steps = self.written_steps(alive)
        return PassText(
            pass_=self.kind, steps=steps, reads=before, stays=frozenset(after if self.kind == "I" else ()),
            writes={
                value: name for value, name in after.items() if value not in before and self.kind in ("F", "I")
            },
            result="None" if self.result is None else self.variables.of(self.result),
            constants=tuple(self.variables.constants),
        )  # fmt: skip


def _comment(entry: Instruction | CountRows | Observation | None) -> str:
    """Name an instruction as the table does."""
    match entry:
        case None:
            return ""
        case Given(value=value):
            return f"{value.tensor} {value.layout}"
        case Compute(op=op, writes=writes):
            return f"{op.name}: {op.kind.label} -> {', '.join(str(value.layout) for value in writes)}"
        case Communicate(entry=name, pass_=pass_, collective=collective):
            return f"{name}: {pass_} {collective}"
        case CountRows(reads=reads):
            return f"{reads.name}: rows of each expert"
        case Observation(noted=noted, reads=reads):
            return f"{reads[-1].name}: {noted}, for reports"
        case CountOnce(atoms=atoms, writes=writes):
            return f"{writes.name}: counted once over {'.'.join(atoms)}"
        case _:
            return f"{entry.writes.name}: the sum of {', '.join(value.name for value in entry.reads)}"
