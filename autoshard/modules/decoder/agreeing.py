"""Where a card's operations compute other numbers than a module of its config, with the same weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from autoshard.engine.hf_names import HfNames, shapes_of
from autoshard.graph.block import Block, OpGraph
from autoshard.graph.decoder import LOGITS, decoder_graph
from autoshard.graph.kinds.attention import Rotary
from autoshard.graph.kinds.experts import Dispatch
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Array, Op
from autoshard.modules.decoder.calls import AFTER, BEFORE, CallTape
from autoshard.modules.decoder.twins import TWIN_SEQUENCES, TWIN_TOKENS, Twin
from autoshard.spec.kernels import load_kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload

FREQUENCIES = "inv_freq"  # how the names of tables of rotary frequencies end in transformers
_MOST_NAMED = 8  # operations of a block
_ROUNDED = 2e-6  # of each number of a table that code computes in FP32
_TOLERANCE = 2e-5  # of the largest number: code computes norms, angles and softmaxes in FP32


def twin_graph(card: ModelSpec) -> OpGraph:
    """Return a card's graph for the tokens of a twin."""
    workload = Workload(seq_len=TWIN_TOKENS, global_batch=TWIN_SEQUENCES, precision=Precision.named("fp32"))
    return decoder_graph(card, workload, load_kernels("torch_engine"), micro_batch=TWIN_SEQUENCES)


def differing_numbers(card: ModelSpec, family: str, twin: Twin, tape: CallTape, tokens: torch.Tensor) -> Iterator[str]:
    """Yield the first operation of each kind of block whose numbers the module does not make."""
    plain = replace(card, hidden_dropout=0.0, attention_dropout=0.0)
    graph = twin_graph(plain)
    weights = _weights(plain, family, twin)
    inputs = {"tokens": tokens.numpy(), "positions": np.arange(TWIN_TOKENS), "key_positions": np.arange(TWIN_TOKENS)}
    ends = [*(tape.hidden_states[number] for number in range(card.num_layers)), tape.hidden_states[AFTER], tape.logits]
    parts = [BEFORE, *range(card.num_layers), AFTER]
    kinds: set[str] = set()
    for (name, block), part, end in zip(graph.instances(), parts, ends, strict=True):
        values = {**inputs, **{t.name: weights[f"{name}.{t.name}"] for t in block.parameters}}
        values |= {"x": tape.hidden_states[part].numpy()} if part != BEFORE else {}
        if block.kind not in kinds and (difference := _difference(block, graph, values, (tape, part), end)):
            kinds.add(block.kind)
            yield difference


def differing_frequencies(graph: OpGraph, buffers: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Yield the tables of rotary frequencies that no operation turns by: short sequences do not show slow ones."""
    kinds = {op.kind for block in graph.blocks for op in block.ops if isinstance(op.kind, Rotary)}
    expected = [kind.frequencies(graph.sizes[kind.over]) for kind in kinds]
    for path, buffer in buffers.items():
        if path.endswith(FREQUENCIES):
            numbers = buffer.detach().double().cpu().numpy()
            rtol = max(_ROUNDED, float(torch.finfo(buffer.dtype).eps))
            same = (table for table in expected if table.shape == numbers.shape)
            if not any(np.allclose(numbers, table, rtol=rtol, atol=0) for table in same):
                yield f"{path} has other frequencies than its card"


def _difference(
    block: Block, graph: OpGraph, values: dict[str, Array], where: tuple[CallTape, int], end: torch.Tensor
) -> str:
    """Run a block; if it ends in other numbers, name its first operation whose numbers no call returns."""
    tokens = TWIN_SEQUENCES * TWIN_TOKENS
    sizes = {**graph.sizes, **({"slots": tokens} if "slots" in graph.sizes else {})}
    ops = _until_logits(block)
    block.run(ops, sizes, values)
    result = values[ops[-1].outputs[0]]
    theirs = end.detach().numpy()
    if result.shape == theirs.shape and _close(result, theirs):
        return ""
    tape, part = where
    returned = [value for call in tape.parts[part] for value in _tensors(call.result)]
    names = _unmatched(block, ops, values, returned) or [ops[-1].name]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{block.kind}: from {names[0]} on, the code computes other numbers: {', '.join(names[:_MOST_NAMED])}{more}"


def _unmatched(
    block: Block, ops: Sequence[Op], values: Mapping[str, Array], returned: Sequence[torch.Tensor]
) -> Sequence[str]:
    """Return the operations whose numbers no call returns, and of which nothing is made that one does.

    Code may compute a product and its bias at once, so that nothing returns the product alone.
    """
    needed: set[str] = set()  # what leads to something that a call returns
    names: list[str] = []
    for op in reversed(ops):
        is_moved = isinstance(op.kind, Deliver | Dispatch)  # rows do not show which expert they go to
        is_compared = not is_moved and block.tensors[op.outputs[0]].dtype != "int64"
        if {*op.outputs} & needed or (is_compared and _is_returned(values[op.outputs[0]], returned)):
            needed |= {*op.inputs}
        elif is_compared:
            names.insert(0, op.name)
    return names


def _until_logits(block: Block) -> Sequence[Op]:
    ops = block.select("micro_batch", "F")
    if block.kind != "head":
        end = next(place for place, op in enumerate(ops) if block.carry_out in op.outputs)
        return ops[: end + 1]
    ends = [place for place, op in enumerate(ops) if op.name in LOGITS]
    return ops[: ends[-1] + 1]  # the loss follows


def _tensors(result: Any) -> list[torch.Tensor]:
    several = result if isinstance(result, tuple | list) else [result]
    return [value for value in several if isinstance(value, torch.Tensor) and not value.is_complex()]


def _close(a: Array, b: Array) -> bool:
    scale = max(float(np.abs(a).max(initial=0)), float(np.abs(b).max(initial=0)), 1e-30)
    return bool((np.abs(a - b) <= _TOLERANCE * scale).all())


def _is_returned(array: Array, returned: Sequence[torch.Tensor]) -> bool:
    """Say whether some call returns these numbers, in whatever order they lie; zeros may fill slots of experts."""
    ours = _sorted(array)
    theirs = (_sorted(value.detach().double().numpy()) for value in returned)
    return any(numbers.size == ours.size and _close(ours, numbers) for numbers in theirs)


def _sorted(array: Array) -> Array:
    return np.sort(array[array != 0], axis=None)


def _weights(card: ModelSpec, family: str, twin: Twin) -> Mapping[str, Array]:
    """Return the card's tensors, filled from those of the module."""
    names, stored = HfNames.of(family, card, "module"), twin.weights()
    arrays = {name: np.zeros(shape) for name, shape in shapes_of(card).items()}
    for theirs, patches in names.patches().items():
        for patch in patches:
            arrays[patch.tensor][patch.place] = patch.view(stored[theirs].numpy())
    return {**arrays, **{theirs: arrays[owner] for theirs, owner in names.tied.items()}}
