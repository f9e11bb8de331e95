"""The forward operations of a block as lines of text, from which the block can be built again."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, cast

from autoshard.errors import InputError, inside, nearest, require
from autoshard.graph.block import Block
from autoshard.graph.builder import BlockBuilder, usual_delivery
from autoshard.graph.kinds.attention import Attend, Join, Rotary
from autoshard.graph.kinds.dropout import Drop
from autoshard.graph.kinds.experts import Combine, Dispatch, Slot, TopK
from autoshard.graph.kinds.indexing import Lookup
from autoshard.graph.kinds.linear import Deliver, Einsum
from autoshard.graph.kinds.norm import MeanSquare, Norm, Rescale, Softmax
from autoshard.graph.kinds.opaque import Opaque
from autoshard.graph.kinds.pointwise import Add, Cast, Multiply, ScaleBy, Unary
from autoshard.graph.op import OpKind
from autoshard.spec.files import parsed_json
from autoshard.spec.record import decode, encode
from autoshard.spec.workload import Dtype

_LINE = re.compile(r"(\S+) = (\w+)(?: (\{.*\}))? of (\S.*)")
_OPERAND = re.compile(r"([\w.]+)(?:\[([\w ]*)\](?::(\w+))?)?")
_KINDS: Mapping[str, type[OpKind]] = {
    kind.__name__: kind
    for kind in (
        Add, Attend, Cast, Combine, Deliver, Dispatch, Drop, Einsum, Join, Lookup, MeanSquare, Multiply, Norm, Opaque,
        Rescale, Rotary, ScaleBy, Slot, Softmax, TopK, Unary,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOp:
    """One line: ``q = Einsum {"dims": ["batch", "seq", "ffn"]} of attn_norm, q.weight[ffn hidden]``.

    An operand with dims is a weight, one with dims and a format (``tokens[batch seq]:int64``) an input of the batch;
    any other is what an operation before gives. ``Deliver`` says under which name a tensor reaches its readers.
    """

    name: str
    kind: OpKind
    operands: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> "WrittenOp":
        """Read a line."""
        match = _LINE.fullmatch(line)
        message = f"cannot read {line!r}; write NAME = KIND {{options}} of OPERAND, OPERAND"
        require((match is not None, "", message))
        name, kind, options, operands = cast(re.Match[str], match).groups()
        with inside(name):
            require((kind in _KINDS, "", f"there is no kind {kind}. {nearest(kind, list(_KINDS))}"))
            stated = parsed_json(options or "{}", "")
            texts = tuple(operands.split(", "))
            unread = [text for text in texts if not _OPERAND.fullmatch(text)]
            forms = "write name, weight[dim dim] or input[dim]:int64"
            require((not unread, "", f"cannot read {', '.join(unread)}; {forms}"))
            return cls(name=name, kind=decode(_KINDS[kind], stated), operands=texts)

    def __str__(self) -> str:
        kind: Any = self.kind
        usual = {
            spec_field.name: encode(spec_field.default)
            for spec_field in fields(kind)
            if spec_field.default is not MISSING
        }
        stated = {key: value for key, value in encode(kind).items() if key not in usual or value != usual[key]}
        options = f" {json.dumps(stated)}" if stated else ""
        return f"{self.name} = {type(self.kind).__name__}{options} of {', '.join(self.operands)}"


def parse_lines(lines: Iterable[str]) -> tuple[WrittenOp, ...]:
    """Read the lines of a block."""
    return tuple(WrittenOp.parse(line) for line in lines)


def emit_written(
    b: BlockBuilder, ops: Sequence[WrittenOp], more: Mapping[str, Sequence[str]], settled: str = ""
) -> str:
    """Emit operations; return the name of the last one's first output.

    ``more`` gives operations further inputs, read after those of their lines. The gradient of the tensor
    ``settled`` is summed where it arrives.
    """
    for op in ops:
        if isinstance(op.kind, Deliver):
            (tensor,) = op.operands
            b.deliver_as(tensor, op.name, op.kind.rename, settles=tensor == settled)
    emitted = [op for op in ops if not isinstance(op.kind, Deliver)]
    for op in emitted:
        with inside(op.name):
            reads = [_declared(b, text) for text in op.operands]
            try:
                b.emit(op.name, op.kind, *reads, *more.get(op.name, ()))
            except (AssertionError, ValueError) as error:  # lines may be edited by hand
                raise InputError.of("", f"{op.kind.label} cannot read these operands: {error}") from None
    return emitted[-1].name


def block_lines(block: Block) -> tuple[WrittenOp, ...]:
    """Return the forward operations of a block as lines say them; delivers of the usual name need no line."""
    forward = block.select("micro_batch", "F")
    origin = {op.outputs[0]: op.inputs[0] for op in forward if isinstance(op.kind, Deliver)}

    def operand(name: str) -> str:
        tensor = block.tensors[origin.get(name, name)]
        dims = f"{tensor.name}[{' '.join(tensor.dims)}]"
        return {"parameter": dims, "input": f"{dims}:{tensor.dtype}"}.get(tensor.role, tensor.name)

    return tuple(
        WrittenOp(name=op.name, kind=op.kind, operands=tuple(map(operand, op.inputs)))
        for op in forward
        if not (op.kind == Deliver() and op.name == usual_delivery(op.inputs[0]))
    )


def _declared(b: BlockBuilder, text: str) -> str:
    """Declare the weight or the input that an operand names, if it is not declared yet; return its name."""
    name, dims, dtype = cast(re.Match[str], _OPERAND.fullmatch(text)).groups()
    if dims is None:
        require((name in b.tensors, "", f"reads {name}, which no line before gives. {nearest(name, list(b.tensors))}"))
    elif name not in b.tensors:
        names = tuple(dims.split())
        b.add(name, names, cast(Dtype, dtype), "input") if dtype else b.weight(name, *names)
    return name
