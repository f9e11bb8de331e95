"""What runs inside a pass of a pipeline stage: its blocks in order, and in each its kernels and Collectives, as priced.

Inside a block operations stand as forward runs them, and those of backward the other way round; what is computed again
stands before the backward that needs it. The times of a pass add up to what the timeline says of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from autoshard.cost.built_in import calibration_of
from autoshard.cost.collective import Number
from autoshard.cost.compute import kernel_time
from autoshard.cost.predict import question_of
from autoshard.cost.setting import IN_PIECES, BlockWork, Question, Setting, block_cost, price_block, setting_of, work_of
from autoshard.cost.sharded import ListedBlocks
from autoshard.cost.step import StageLayers
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.tables import table_name
from autoshard.spec.mesh import axis_of_atoms

_HALVES = {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}
_AGAIN = ".again"  # ends the name of a tensor that is computed again
_STARTS = "waiting for kernels to start"
_HOST = {"F": "on the way to host memory", "I": "on the way from host memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPiece:
    """A kernel, a Collective or waiting inside a block."""

    name: str
    kind: str  # kernel, collective or waiting
    part: str  # of the prediction's seconds
    pass_: str  # F, I or W
    time_s: float
    again: bool = False  # computed again for backward
    hidden_s: float = 0.0  # of a Collective: what runs behind kernels, which time_s leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPieces:
    """A block inside a pass; ``table`` names its layouts in the plan."""

    name: str
    table: str
    pieces: tuple[PassPiece, ...]


class PassContents:
    """What the passes of a plan's stages consist of."""

    def __init__(self, plan: Plan) -> None:
        self.question: Question = question_of(plan, calibration_of(plan))
        self.setting: Setting = setting_of(self.question, plan.candidate, ListedBlocks.of(plan))
        self.stages = StageLayers.of(plan)
        self.pieces_of = cache(self._pieces_of)

    def of(self, kind: str, stage: int) -> Sequence[BlockPieces]:
        """Return the blocks of a pass in order, after what a host takes to start the pass."""
        layers, again = self.stages[stage], self.stages[stage].recompute
        blocks = [("embedding", "embed", Recompute())] if layers.is_first else []
        blocks += [(f"layer {layers.first + number}", layer, again.of_layer(number))
                   for number, layer in enumerate(layers.kinds)]  # fmt: skip
        blocks += [("head", "head", Recompute())] if layers.is_last else []
        ordered = blocks if kind == "F" else blocks[::-1]
        contents = [
            BlockPieces(name=name, table=table_name(block, drop), pieces=pieces)
            for name, block, drop in ordered
            if (pieces := self.pieces_of(block, drop, kind))  # an embedding has no gradients of inputs
        ]
        start_s = self.question.calibration.task_s / 2
        if kind != "W" and start_s:
            start = PassPiece(name="start of the task", kind="waiting", part="waiting", pass_=kind, time_s=start_s)
            contents.insert(0, BlockPieces(name="start", table="", pieces=(start,)))
        return contents

    def _pieces_of(self, kind: str, drop: Recompute, pass_kind: str) -> tuple[PassPiece, ...]:
        work = work_of(self.question, self.setting, kind, drop)
        block = self.setting.blocks.block(kind, drop).block
        order = {op.name: number for number, op in enumerate(block.select("micro_batch", "F"))}
        pieces: list[PassPiece] = []
        for half in _HALVES[pass_kind]:
            placed = [*self._kernels(work, half), *self._messages(work, half)]
            sign = 1 if half == "F" else -1

            def place(entry: tuple[str, PassPiece], sign: int = sign) -> tuple[bool, int]:
                name, piece = entry
                number = order.get(name, len(order))
                return (not piece.again, number if piece.again else sign * number)

            pieces += [piece for _, piece in sorted(placed, key=place) if piece.time_s > 0 or piece.hidden_s > 0]
            waiting_s = float(self._seconds(work)[half].get("waiting", 0.0))
            if waiting_s:
                pieces.append(PassPiece(name=_STARTS, kind="waiting", part="waiting", pass_=half, time_s=waiting_s))
            host_s = float(price_block(self.question, self.setting, kind, drop).seconds[half].get("host", 0.0))
            if host_s > 0:
                pieces.append(PassPiece(name=_HOST[half], kind="waiting", part="host", pass_=half, time_s=host_s))
        return tuple(pieces)

    def _seconds(self, work: BlockWork) -> Mapping[str, Mapping[str, Number]]:
        return block_cost(work, self.setting.rings, self.question.rates).seconds

    def _kernels(self, work: BlockWork, half: str) -> Iterator[tuple[str, PassPiece]]:
        for run, kernel in work.kernels:
            if run.pass_ == half:
                names = dict.fromkeys(op.source for op in run.ops)
                time_s = float(kernel_time(kernel, self.question.rates))
                yield (
                    run.ops[0].source,
                    PassPiece(
                        name=", ".join(names),
                        kind="kernel",
                        part="compute",
                        pass_=half,
                        time_s=time_s,
                        again=run.ops[0].again,
                    ),
                )

    def _messages(self, work: BlockWork, half: str) -> Iterator[tuple[str, PassPiece]]:
        """Yield Collectives; where kernels hide some of tp, each without its share of what is hidden."""
        rings, eager = self.setting.rings, any(kernel.launches for _, kernel in work.kernels)
        messages = [(message, size) for message, size in work.messages if message.pass_ == half]
        times = [
            float(rings[message.collective.atoms].busy_s(message.collective, size, eager=eager))
            for message, size in messages
        ]
        axes = [axis_of_atoms(message.collective.atoms) for message, _ in messages]
        weights = [
            time_s * (1 - 1 / float(rings[message.collective.atoms].size))
            if axis == "tp" and message.collective.kind in IN_PIECES
            else 0.0
            for (message, _), time_s, axis in zip(messages, times, axes, strict=True)
        ]
        whole_s = sum(time_s for time_s, axis in zip(times, axes, strict=True) if axis == "tp")
        hidden_s = whole_s - float(self._seconds(work)[half].get("tp", 0.0))
        share = hidden_s / sum(weights) if any(weights) else 0.0
        for (message, _), time_s, axis, weight in zip(messages, times, axes, weights, strict=True):
            behind_s = share * weight
            name, again = f"{message.collective} {message.entry}", message.tensor.endswith(_AGAIN)
            yield (
                message.entry,
                PassPiece(
                    name=name,
                    kind="collective",
                    part=axis,
                    pass_=half,
                    time_s=time_s - behind_s,
                    again=again,
                    hidden_s=behind_s,
                ),
            )
