"""One rank's stages: its blocks, what it keeps between the actions of a step, and what it hands to other ranks."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from autoshard.engine.observing import notes_of
from autoshard.engine.programs import BlockProgram, MadeInputs, PlanPrograms
from autoshard.engine.routing import is_counted
from autoshard.engine.torch.block import BlockRun, LiteralRun
from autoshard.engine.torch.execution import BY_BATCH, InputSource, Values
from autoshard.engine.torch.formats import memory_of, own
from autoshard.engine.torch.generated import Generator
from autoshard.engine.torch.joint import side_by_side
from autoshard.engine.torch.offloading import HostMemory, offloaded_blocks
from autoshard.engine.torch.states.scaling import gradient_scale
from autoshard.engine.torch.states.store import OpenedWeights, Store
from autoshard.engine.torch.steps import NUMBERS, RankContext
from autoshard.engine.torch.world import Arrival
from autoshard.graph.kinds.dropout import DROPOUT_KEYS, dropout_keys
from autoshard.graph.router import router_losses
from autoshard.layout.layout import Layout
from autoshard.layout.program import Given
from autoshard.plan.plan import Plan
from autoshard.run.protocol import Batch, EngineMode
from autoshard.schedule.builders import Action


def _runs_of(
    blocks: Mapping[str, BlockProgram], context: RankContext, mode: EngineMode, kinds: Collection[str]
) -> Mapping[str, BlockRun]:
    """Return the executor of each of a rank's blocks, by name; equal layers share an executor."""
    compiler = None
    if mode == "compiled":
        from autoshard.engine.torch.compiled import compiler_of  # which takes a second

        compiler = compiler_of(context.formats.device)
    generator = Generator(context=context, kinds=[kind for kind in "FBIW" if kind in kinds], compiler=compiler)
    names_of: dict[int, list[str]] = {}  # equal layers have one program
    for name, parts in blocks.items():
        names_of.setdefault(id(parts), []).append(name)
    runs: dict[str, BlockRun] = {}
    for names in names_of.values():
        parts = blocks[names[0]]
        run = LiteralRun.of(context, parts) if mode == "literal" else generator.generate(parts, names)
        runs |= dict.fromkeys(names, run)
    return {name: runs[name] for name in blocks}


def _places(name: str, parts: BlockProgram) -> Iterator[tuple[str, tuple[str, str, Layout]]]:
    """Yield every value that a block takes from outside, with its role, its name among the weights, and its layout."""
    for entry in parts.program.instructions:
        if isinstance(entry, Given):
            tensor = entry.value.tensor
            weight = tensor.removesuffix(".grad")
            role = "passed" if tensor in (parts.block.carry_in, f"d.{parts.handed_on}") else "sum"
            if tensor.removeprefix("d.") in parts.reported:
                role = "constant"
            elif weight == tensor and role != "passed":
                role = "parameter" if parts.block.tensors[tensor].role == "parameter" else "input"
            yield entry.value.name, (role, f"{name}.{weight}", entry.value.layout)


class RankPipeline:
    """One rank's stages, each with its blocks by name in order, and what it keeps between the actions of a step."""

    def __init__(self, plan: Plan, programs: PlanPrograms, context: RankContext, mode: EngineMode, seed: int) -> None:
        """Take the stages that the schedule places on this rank; random numbers follow from a ``seed``."""
        self.plan, self.context, self.seed = plan, context, seed
        self.last_stage = len(plan.stages) - 1
        place = context.mesh_rank.coordinate("pp")
        here = [stage for stage in range(len(plan.stages)) if plan.schedule.place_of(stage)[0] == place]
        self._actions = tuple(plan.schedule.action_lists()[place])
        kinds = {action.kind for action in self._actions}
        blocks = {name: parts for stage in here for name, parts in programs.stages[stage].items()}
        self.blocks = _runs_of(blocks, context, mode, kinds)
        self.stages = {stage: {name: self.blocks[name] for name in programs.stages[stage]} for stage in here}
        # By kind of action the weights to whose gradients a block adds.
        self._adds = {
            (kind, name): tuple(
                f"{name}.{result.removesuffix('.sum')}"
                for result in run.parts.results(kind)
                if result != run.parts.handed_back
            )
            for name, run in self.blocks.items()
            for kind in kinds
        }
        # The number of the action after which the gradient of a weight is complete.
        self._complete_at = {
            weight: number
            for number, action in enumerate(self._actions)
            if action.kind != "F"
            for name in self.stages[action.stage]
            for weight in self._adds[action.kind, name]
        }
        self._following = self._blocks_that_read()
        self._offloaded = offloaded_blocks(plan, self.stages)
        self.host = HostMemory(context.formats.device, context.formats.staging)
        self._places = {name: dict(_places(name, run.parts)) for name, run in self.blocks.items()}
        # By way (back or not), stage and micro-batch the number of the action in its rank's list.
        self._turns = {
            (action.kind != "F", action.stage, action.micro_batch): number
            for actions in plan.schedule.action_lists()
            for number, action in enumerate(actions)
            if action.kind != "W"  # which hands nothing on
        }
        if context.world.channels:
            context.world.connect(self._links(), context.formats.device)
        self._batches: Sequence[Batch] = ()
        self.scale = 1.0  # of the gradients that this step adds to their sums
        self._made_inputs = programs.inputs
        self._inputs: dict[tuple[str, str, int, Layout], torch.Tensor] = {}
        self._values: dict[tuple[str, int], Values] = {}  # of blocks that wait for their backward pass
        self._losses: dict[int, torch.Tensor] = {}  # read at the end: no device is waited for meanwhile
        self._axes = frozenset(atom for atom, _ in plan.mesh.axes if atom != "pp")
        sizes = context.mesh_rank.sizes
        self._notes = {
            name: tuple(notes_of(run.parts, sizes, packed=context.packed)) for name, run in self.blocks.items()
        }
        self.noted: dict[tuple[str, str], torch.Tensor] = {}  # of this step, by block and what is noted
        self._router_losses, self._constants = router_losses(plan.workload), dict[str, torch.Tensor]()
        self._handed_over: dict[int, torch.Tensor] = {}  # by tag: messages between two stages of this rank
        self._expected: dict[int, Arrival] = {}  # by tag: messages of other ranks that are on their way

    def rank_of(self, stage: int) -> int:
        """Return the rank that runs a stage for the same part of the batch as this one."""
        return self.plan.mesh.group_of(self.context.mesh_rank.rank, "pp")[self.plan.schedule.place_of(stage)[0]]

    def tag(self, number: int, micro_batch: int, *, back: bool) -> int:
        """Return the number of a message of a stage (beyond the last: of tied weights); backward messages are odd."""
        return 2 * (number * self.plan.schedule.num_micro_batches + micro_batch) + back

    def run(
        self, store: Store, micro_batches: Sequence[Batch], *, counts: bool
    ) -> tuple[Mapping[int, torch.Tensor], int]:
        """Run the actions of this rank, which add to the sums of gradients.

        A micro-batch holds whole arrays, of which the rank takes its part. Return the losses by micro-batch, on ranks
        that count them, and the most bytes kept for backward if ``counts``.
        """
        world, most_bytes, self._batches = self.context.world, 0, micro_batches
        self.scale = gradient_scale(self.plan.workload.precision, micro_batches)
        self.noted.clear()
        named = record_function if torch.autograd.profiler._is_profiler_enabled else nullcontext
        for number, action in enumerate(self._actions):
            world.activity.act(f"{action} (stage {action.stage}, micro-batch {action.micro_batch})")
            for near in self._actions[number : number + 2]:  # the next one's message travels meanwhile
                self._expect(near)
            with named(str(action)):  # as in the predicted trace
                if action.kind == "F":
                    self._forward(store, number)
                else:
                    self._backward(store, number)
            if counts:
                most_bytes = max(most_bytes, self._saved_bytes(store))
        store.take_back()
        self.host.settle()
        world.finish_sending()
        losses, self._losses, self._batches = self._losses, {}, ()
        self._inputs.clear()
        return losses, most_bytes

    def evaluate(self, store: Store, micro_batches: Sequence[Batch]) -> Mapping[int, torch.Tensor]:
        """Run the forward passes of this rank alone; return the losses by micro-batch, on ranks that count them.

        Messages keep the order that they have in a step, and nothing is kept for backward.
        """
        world, self._batches = self.context.world, micro_batches
        turns = [number for number, action in enumerate(self._actions) if action.kind == "F"]
        for place, number in enumerate(turns):
            action = self._actions[number]
            world.activity.act(f"evaluation: {action} (stage {action.stage}, micro-batch {action.micro_batch})")
            for near in turns[place : place + 2]:
                self._expect(self._actions[near])
            self._forward(store, number, evaluates=True)
        world.finish_sending()
        losses, self._losses, self._batches = self._losses, {}, ()
        self._inputs.clear()
        self.noted.clear()
        return losses

    def _saved_bytes(self, store: Store) -> int:
        """Count the bytes kept for backward, each memory once, without weights, batch, and a few counts."""
        present = self._present(store)
        waiting = (
            tensor for values in self._values.values() for name, tensor in values.items() if not is_counted(name)
        )
        saved = {memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in waiting}
        return sum(size for memory, size in saved.items() if memory not in present)

    def _present(self, store: Store) -> set[StorageWeakRef]:
        """Return the memories that are there whatever blocks keep: of weights, their sums, and the batch."""
        resting = (tensor for flat in store.flats for tensor in (flat.values, flat.sums))
        return {memory_of(tensor) for tensor in (*resting, *self._inputs.values(), self.context.positions)}

    def _links(self) -> set[tuple[bool, int, int]]:
        """Return the links of this pipeline over which a step sends: backward or not, sender, receiver."""
        ends = {
            (action.kind != "F", self.rank_of(message[0]), self.rank_of(action.stage))
            for actions in self.plan.schedule.action_lists()
            for action in actions
            if (message := self._message(action))
        }
        return {(back, start, stop) for back, start, stop in ends if start != stop}

    def _blocks_that_read(self) -> Mapping[tuple[int, str], tuple[int, str] | None]:
        """Return for every action's number and block those at which weights are read next; None at the end."""
        order = [
            (number, name)
            for number, action in enumerate(self._actions)
            if action.kind != "W"
            for name in (list if action.kind == "F" else reversed)(list(self.stages[action.stage]))
        ]
        return dict(zip(order, [*order[1:], None], strict=True))

    def _begin_next(self, turn: int, name: str) -> str | None:
        """Fetch what the next block of a backward action has in host memory; return the name of the next block."""
        if (following := self._following.get((turn, name))) is None:
            return None
        number, next_name = following
        if self._actions[number].kind != "F":
            self.host.fetch((next_name, self._actions[number].micro_batch))
        return next_name

    def _forward(self, store: Store, turn: int, *, evaluates: bool = False) -> None:
        """Run a forward action; if it evaluates, nothing is kept for backward, and no block's weights arrive ahead."""
        stage, number = self._actions[turn].stage, self._actions[turn].micro_batch
        hidden = self._receive(self._actions[turn]) if stage else None
        run = None
        for name, run in self.stages[stage].items():
            opened = store.opened(name, reads=True, following=None if evaluates else self._begin_next(turn, name))
            output, values = run.forward(self._source(name, run, number, hidden, opened))
            self._note(name, values)
            if name in self._offloaded and not evaluates:
                self.host.put((name, number), values, self._present(store))
            elif not evaluates:
                self._values[name, number] = values
            del values
            hidden = output.contiguous()  # blocks expect nothing else
        assert hidden is not None and run, "a stage has blocks"
        if stage < self.last_stage:
            self._send(hidden, stage, stage + 1, number, back=False)
            return
        pending = run.parts.program.results[run.parts.handed_on].layout.sums
        replicated = [atom for atom, _ in self.plan.mesh.axes if atom not in ("pp", *pending)]
        if self.context.mesh_rank.is_first(replicated):  # its replicas do not count their part of the loss
            self._losses[number] = hidden

    def _backward(self, store: Store, turn: int) -> None:
        """Run B, or one half: I, which keeps the values for W, or W, which receives and sends nothing."""
        action, formats = self._actions[turn], self.context.formats
        kind, stage, number = action.kind, action.stage, action.micro_batch
        upstream = None
        if kind != "W" and stage < self.last_stage:
            upstream = self._receive(action)
        elif kind != "W":
            upstream = torch.full((), self.scale, dtype=formats.of("fp32"), device=formats.device)
        for name, run in reversed(list(self.stages[stage].items())):
            adds = self._adds[kind, name]
            opened = store.opened(name, reads=kind != "W", adds=adds, following=self._begin_next(turn, name))
            source = self._source(name, run, number, upstream, opened)
            if name in self._offloaded and kind != "W":
                self._values[name, number] = self.host.take((name, number))
            values = self._values[name, number] if kind == "I" else self._values.pop((name, number))
            gradient = run.backward(kind, source, values)
            store.close(opened, [weight for weight in adds if self._complete_at[weight] == turn])
            if gradient is not None:
                upstream = gradient.contiguous()
        if stage and kind != "W":
            assert upstream is not None, "every stage but the first hands a gradient back"
            self._send(upstream, stage, stage - 1, number, back=True)

    def _source(
        self, name: str, run: BlockRun, number: int, passed: torch.Tensor | None, opened: OpenedWeights
    ) -> InputSource:
        """Return the source of a block's weights, sums of gradients, part of the batch, and neighbour's tensor."""
        places = self._places[name]

        # Not by recursion: a function that names itself is a cycle, which would hold its tensors until Python looks.
        def source(first: str, *more: str) -> torch.Tensor:
            return side_by_side([tensor(first), *map(tensor, more)]) if more else tensor(first)

        def tensor(name_in_block: str) -> torch.Tensor:
            role, weight, layout = places[name_in_block]
            if role == "parameter":
                return opened.weights[weight]
            if role == "sum":
                return opened.sums[weight]
            if role == "constant":
                return self._constant(name_in_block)
            if role == "input":
                return self._input(name, run, weight.removeprefix(f"{name}."), layout, number)
            assert passed is not None, f"{name_in_block} is passed on by a neighbour"
            return passed

        return source

    def _input(self, name: str, run: BlockRun, tensor: str, layout: Layout, number: int) -> torch.Tensor:
        """Return this rank's part of an input of a block, which is cut once in a step."""
        maker = self._maker(name, tensor)
        turn = maker.turn(name, tensor, number) if maker else number
        if turn is None:
            return self._cut_input(name, run, tensor, layout, number)
        key = (tensor, name if maker or tensor == DROPOUT_KEYS else "", turn, layout)
        if key not in self._inputs:
            self._inputs[key] = self._cut_input(name, run, tensor, layout, number)
        return self._inputs[key]

    def _maker(self, name: str, tensor: str) -> MadeInputs | None:
        """Return what makes an input of a block of the batch; None where the batch itself or the plan brings it."""
        inputs = self._made_inputs
        return inputs if inputs is not None and inputs.has(name, tensor) else None

    def _constant(self, gradient: str) -> torch.Tensor:
        """Return the gradient of a loss of routers, which every layer adds to its own: its weight in the step's."""
        if gradient not in self._constants:
            loss = self._router_losses[gradient.removeprefix("d.")]
            sizes, formats = self.context.mesh_rank.sizes, self.context.formats
            weight = loss.coefficient * loss.weight(sizes, self.plan.schedule.num_micro_batches)
            self._constants[gradient] = torch.full((), weight, dtype=formats.of("fp32"), device=formats.device)
        constant = self._constants[gradient]
        return constant if self.scale == 1.0 else constant * self.scale

    def _note(self, name: str, values: Values) -> None:
        """Take what a block noted out of its values, and add it to what it noted before in this step."""
        for note in self._notes[name]:
            numbers, key = values.pop(note.value).view(-1), (name, note.noted)
            if self.context.mesh_rank.is_first(self._axes - note.atoms):  # its replicas have the same tokens
                self.noted[key] = self.noted[key] + numbers if key in self.noted else numbers

    def _cut_input(self, name: str, run: BlockRun, tensor: str, layout: Layout, number: int) -> torch.Tensor:
        """Cut this rank's part out of what a micro-batch brings; positions are the plan's, dropout keys the block's."""
        context, batch = self.context, self._batches[number]
        if tensor in NUMBERS:
            return context.numbers(tensor, layout)
        if maker := self._maker(name, tensor):
            return maker.part((name, tensor), batch, context.mesh_rank.bounds(layout), context.formats.device)
        bounds = [slice(*ends) for ends in context.mesh_rank.bounds(layout)]
        if tensor == DROPOUT_KEYS:
            return context.formats.tensor(dropout_keys(self.seed, batch["samples"][bounds[0]], name), "int64")
        part = batch[tensor][bounds[0]][:, context.positions.numpy()[bounds[1]]]
        return own(part) if tensor in BY_BATCH else context.formats.tensor(part, run.parts.block.tensors[tensor].dtype)

    def _send(self, tensor: torch.Tensor, stage: int, to_stage: int, number: int, *, back: bool) -> None:
        rank, tag = self.rank_of(to_stage), self.tag(stage, number, back=back)
        if rank == self.context.mesh_rank.rank:
            self._handed_over[tag] = tensor
        else:
            self.context.world.send(tensor, rank, tag, self._turns[back, to_stage, number])

    def _message(self, action: Action) -> tuple[int, int] | None:
        """Return the stage that sends the input of an action, and the tag of the message; None if no stage does."""
        back = action.kind != "F"
        stage = action.stage + 1 if back else action.stage - 1
        if action.kind == "W" or not 0 <= stage <= self.last_stage:
            return None
        return stage, self.tag(stage, action.micro_batch, back=back)

    def _expect(self, action: Action) -> None:
        """Begin to receive the input of an action from another rank: a hidden state, or its gradient."""
        message = self._message(action)
        if message is None or message[1] in self._expected:
            return
        (stage, tag), back = message, action.kind != "F"
        rank = self.rank_of(stage)
        if rank == self.context.mesh_rank.rank:
            return
        parts = list(self.stages[action.stage].values())[-1 if back else 0].parts
        tensor = f"d.{parts.handed_on}" if back else parts.block.carry_in
        assert tensor, "the first stage takes nothing"
        formats, shape = self.context.formats, self.context.mesh_rank.shape(parts.input_value(tensor).layout)
        memory = torch.empty(shape, dtype=formats.of(parts.block.tensors[tensor].dtype), device=formats.device)
        turn = self._turns[back, stage, action.micro_batch]
        self._expected[tag] = self.context.world.begin_receiving(memory, rank, tag, turn)

    def _receive(self, action: Action) -> torch.Tensor:
        """Return the hidden state that an action takes, or its gradient."""
        message = self._message(action)
        assert message, f"{action} takes nothing"
        tag = message[1]
        return self._expected.pop(tag)() if tag in self._expected else self._handed_over.pop(tag)
