"""What a decoder is trained by: the logits of its tokens, or a loss that it makes of them by itself."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.errors import require
from autoshard.modules.capture import Captured
from autoshard.modules.decoder.stack.splitting import ends_in_layers, has_several_lists
from autoshard.modules.dims import Position, factors
from autoshard.modules.program import Read, Result, Traced, TracedProgram, TracedStep, name_of
from autoshard.modules.reach import steps_to

LOGITS, LOSS = "logits", "loss"
LOGITS_DIMS = 3  # batch, sequence, vocabulary
_TOKEN_DIMS = 2
_NEITHER = (
    "returns neither logits of each token, [batch, sequence, vocabulary], nor a loss, which is one number; let it "
    "return one of them"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedEnd:
    """The result of a decoder that training minimises, or makes its loss of; with the logits behind it."""

    name: str  # of the result
    value: Traced
    logits: Traced  # where samples are no tokens: what the last product with a weight makes of a sample, or the head
    is_loss: bool
    data: tuple[str, ...] = ()  # the arguments that samples bring, where these are no tokens


def trained_end(captured: Captured, of_tokens: Collection[str]) -> TrainedEnd:
    """Return the logits among a decoder's results: of this name, or the first that tokens have; else its loss.

    A loss may be made of any samples, if the module reads other tensors beside the arguments ``of_tokens``.
    """
    values = {
        result.name: result.read.value
        for result in captured.program.results
        if result.read and not result.read.value.is_index and not result.is_buffer
    }
    with_tokens = {name: value for name, value in values.items() if len(value.dims) >= LOGITS_DIMS}
    losses = {name: value for name, value in values.items() if not value.dims}
    data = data_arguments(captured, of_tokens) if losses else ()
    name = ("" if data else _named(LOGITS, values, with_tokens)) or _named(LOSS, losses, losses)
    require((bool(name), "module", _NEITHER))
    value, is_loss = values[name], name in losses
    logits = _logits_behind(captured.program, value, data) if is_loss else value
    return TrainedEnd(name=name, value=value, logits=logits, is_loss=is_loss, data=data)


def dims_of_samples(captured: Captured, end: TrainedEnd) -> Position:
    """Return the dims along which samples lie in a batch: the first of an argument, or of what is returned."""
    values = {value.name: value.positions for value in captured.program.values}
    logits = [result.read for result in captured.program.results if result.name == end.name and not end.is_loss]
    results = [*(read.positions for read in logits if read), end.logits.positions]
    arguments = [values[name] for name in end.data or captured.exported.arguments if name in values]
    return next((positions[0] for positions in (*arguments, *results) if positions), ())


def data_arguments(captured: Captured, of_tokens: Collection[str]) -> tuple[str, ...]:
    """Return the arguments that samples bring, if tokens alone do not do; none if these are all that is read.

    What an encoder and a decoder read are two texts, whatever they are called.
    """
    exported = captured.exported
    read_nodes = {node.name for node in exported.part([*captured.inputs.values()]).graph.nodes if node.users}
    examples = {
        name: example
        for name, example in exported.arguments.items()
        if name in read_nodes and isinstance(example, torch.Tensor)
    }
    is_plain = all(name in of_tokens and example.dim() == _TOKEN_DIMS for name, example in examples.items())
    are_two_texts = len(examples) > 1 and has_several_lists(captured.program.steps)
    return () if is_plain and not are_two_texts else tuple(examples)


def up_to_logits(captured: Captured, end: TrainedEnd) -> Captured:
    """Return the part of a program that makes the logits, as if the module returned these."""
    if not end.is_loss:
        return captured
    program, logits = captured.program, end.logits
    steps = steps_to(program.steps, [logits])
    used = {logits, *(value for step in steps for value in (step.makes, *(read.value for read in step.reads)))}
    values = tuple(value for value in program.values if value in used)
    result = Result(
        name=LOGITS, read=Read(value=logits, positions=logits.positions), is_seeded=True, is_trained=True
    )  # fmt: skip
    names = {value.name for value in values}
    return replace(
        captured,
        program=replace(
            program, values=values, steps=steps, results=(result,), trained=program.trained & {*values},
            modules={path: read for path, read in program.modules.items() if read.value in used},
        ),
        inputs={name: node for name, node in captured.inputs.items() if name in names},
        parameters={name: path for name, path in captured.parameters.items() if name in names},
    )  # fmt: skip


def loss_notes(end: TrainedEnd) -> Iterator[str]:
    """Say what the plan of a decoder with a loss of its own does not say."""
    if end.is_loss and not end.data:
        yield "its own loss is planned as the cross-entropy of its logits"
    if end.data:
        yield f"what follows {end.logits.name} up to its loss is planned by its work alone"


def _named(usual: str, values: Mapping[str, Traced], usable: Mapping[str, Traced]) -> str:
    return usual if usual in values else next(iter(usable), "")


def _logits_behind(program: TracedProgram, loss: Traced, data: Collection[str]) -> Traced:
    """Return what the last product with a weight makes, with its bias, of those behind a loss: logits of each token."""
    steps = steps_to(program.steps, [loss])
    products = [step.makes for step in steps if step.sort == "product" and _has_weight(step)]
    is_of_tokens = bool(products) and len(products[-1].dims) == LOGITS_DIMS
    message = "makes its loss of no logits of each token, [batch, sequence, vocabulary], by a product with a weight"
    require((is_of_tokens or (bool(products) and bool(data)), "module", message))
    logits = products[-1] if data else _of_all_tokens(steps, products)
    readers = [step for step in steps if any(read.value is logits for read in step.reads)]
    shifts = [step.makes for step in readers if name_of(step) in ("add", "add_") and _has_weight(step)]
    logits = shifts[0] if len(readers) == len(shifts) == 1 else logits
    return _result_of_head(steps, logits) if ends_in_layers(steps_to(steps, [logits])) else logits


def _of_all_tokens(steps: Sequence[TracedStep], products: Sequence[Traced]) -> Traced:
    """Return the last of the products of a head that have all tokens, or else the last one.

    A head that tells the tokens after the next ones has fewer.
    """
    most = max(product.dims[1].size for product in products if len(product.dims) == LOGITS_DIMS)
    for product in reversed(products):
        if len(product.dims) == LOGITS_DIMS and product.dims[1].size == most:
            return products[-1] if ends_in_layers(steps_to(steps, [product])) else product
    return products[-1]


def _result_of_head(steps: Sequence[TracedStep], inside: Traced) -> Traced:
    """Return what a head without a product makes last of a sample, as one that pools for a contrastive loss does."""
    samples, following, result = {*factors(inside.positions[0])}, {inside}, inside
    for step in steps:
        if any(read.value in following for read in step.reads):
            following.add(step.makes)
            is_of_samples = samples <= {*step.makes.dims} and not step.makes.is_index
            result = step.makes if is_of_samples else result
    return result


def _has_weight(step: TracedStep) -> bool:
    return any(read.value.origin == "parameter" for read in step.reads)
