"""Which forward operations run as one kernel, and which tensors stay alive for backward."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from autoshard.graph.block import Fused, Saved
from autoshard.graph.kinds.attention import SCORES
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Op, Tensor
from autoshard.spec.kernels import NEVER, Kernel, Kernels
from autoshard.spec.workload import Dtype


class Flow:
    """Who makes and who reads each forward tensor of a block, looking through delivers."""

    def __init__(self, tensors: dict[str, Tensor], ops: Sequence[Op]) -> None:
        self.tensors = tensors
        self.ops = ops
        self.forward = [op for op in ops if op.pass_ == "F" and op.phase == "micro_batch"]
        self._origin = {op.outputs[0]: op.inputs[0] for op in self.forward if isinstance(op.kind, Deliver)}
        self._maker = {name: op.name for op in self.forward for name in op.outputs}

    def root(self, tensor: str) -> str:
        """Return the tensor whose memory this one shares: delivers make no copy."""
        while tensor in self._origin:
            tensor = self._origin[tensor]
        return tensor

    def maker(self, tensor: str) -> str | None:
        """Return the operation that computes it; None for what comes from outside the block."""
        return self._maker.get(self.root(tensor))

    def is_kept(self, tensor: str) -> bool:
        """Whether keeping it costs memory: activations do; weights and the batch are there anyway."""
        return self.tensors[self.root(tensor)].role == "activation"

    def read_by_backward(self, sources: Sequence[str]) -> list[str]:
        """Return the forward tensors that the gradients of these operations read, each once."""
        forward = {name for op in self.forward for name in (*op.inputs, *op.outputs)}
        reads = [
            name
            for op in self.ops
            if op.pass_ != "F" and op.phase == "micro_batch" and op.source in sources
            for name in op.inputs
            if name in forward and self.is_kept(name)
        ]
        return list(dict.fromkeys(reads))

    def external_inputs(self, ops: Sequence[str]) -> list[str]:
        """Return the activations that these operations read from others, each once, in order."""
        reads = [
            name
            for op in self.forward
            if op.name in ops
            for name in op.inputs
            if self.is_kept(name) and self.maker(name) not in ops
        ]
        return list({self.root(name): name for name in reversed(reads)}.values())[::-1]


def fuse(flow: Flow, kernels: Kernels) -> tuple[Fused, ...]:
    """Group the forward operations into kernels; what no table entry names stands alone."""
    names = [op.name for op in flow.forward if not isinstance(op.kind, Deliver)]
    owner = {name: next((kernel for kernel in kernels.kernels if _matches(kernel, name)), None) for name in names}
    groups: list[Fused] = []
    taken: set[str] = set()
    for name, kernel in owner.items():
        if name in taken:
            continue
        run = _run(kernel, name, [other for other in names if owner[other] is kernel]) if kernel else (name,)
        taken.update(run)
        fused = _fused(flow, kernel, run)
        groups.append(fused if kernels.eager else replace(fused, launches=NEVER))
    return tuple(groups)


def saved_tensors(flow: Flow, fused: Sequence[Fused], recomputed: frozenset[str] = frozenset()) -> tuple[Saved, ...]:
    """Return all that stays from forward to backward when some operations are computed again.

    What the kernels of those operations keep is dropped; what they read from elsewhere stays.
    """
    entries = [save for group in fused if not recomputed.intersection(group.ops) for save in group.saves]
    entries += [_saved(flow, name) for name in flow.external_inputs(sorted(recomputed))]
    return tuple({entry.storage: entry for entry in entries}.values())


def _matches(kernel: Kernel, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in kernel.ops)


def _run(kernel: Kernel, first: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the operations that a kernel covers here; one that the model lacks is passed over."""
    return (first,) if kernel.apart else (first, *(name for name in kernel.ops if name in names and name != first))


def _fused(flow: Flow, kernel: Kernel | None, run: tuple[str, ...]) -> Fused:
    if kernel is None:
        return Fused(ops=run, saves=tuple(_saved(flow, name) for name in flow.read_by_backward(run)))
    if kernel.saves is None:
        saves = [_saved(flow, name) for name in flow.read_by_backward(run)]
    else:
        saves = [save for number, text in enumerate(kernel.saves) for save in _named_saves(flow, run, text, number)]
    ratio = kernel.backward_flops_ratio
    return Fused(
        ops=run,
        saves=tuple(saves),
        skips_masked=kernel.skips_masked,
        mask_tile=kernel.mask_tile,
        expands_keys=kernel.expands_keys,
        backward_flops_ratio=ratio,
        launches=kernel.launches,
        score_bytes=kernel.score_bytes,
        traffic_ratio=kernel.traffic_ratio,
    )


def _saved(flow: Flow, name: str) -> Saved:
    return Saved(storage=flow.root(name), tensor=flow.tensors[name], op=flow.maker(name))


def _named_saves(flow: Flow, run: tuple[str, ...], text: str, number: int) -> Iterator[Saved]:
    """Read one entry of a kernel's ``saves``; an entry of its own memory is told apart by its number."""
    reference, _, dtype = text.partition("@")
    apart, _, place = reference.rpartition(":")
    if place == "scores":
        yield _saved_scores(flow, run[0], f"{run[0]}.copy{number}", dtype)
        return
    for index, name in enumerate(_places(flow, run, place)):
        tensor = flow.tensors[name]
        wanted = _dtype(dtype) if dtype else tensor.dtype
        if not apart and wanted == tensor.dtype:
            yield _saved(flow, name)
        else:
            storage = f"{run[0]}.copy{number}" if index == 0 else f"{run[0]}.copy{number}_{index}"
            over = flow.root(name) if apart == "over" else None
            yield Saved(storage=storage, tensor=replace(tensor, name=storage, dtype=wanted), op=run[0], over=over)


def _saved_scores(flow: Flow, attend: str, storage: str, dtype: str) -> Saved:
    query = next(op.inputs[0] for op in flow.forward if op.name == attend)
    wanted = _dtype(dtype) if dtype else flow.tensors[query].dtype
    return Saved(storage=storage, tensor=Tensor(name=storage, dims=SCORES, dtype=wanted), op=attend)


def _places(flow: Flow, run: tuple[str, ...], place: str) -> Sequence[str]:
    if place == "in*":
        return flow.external_inputs(run)
    if place.startswith("in"):
        return [flow.external_inputs(run)[int(place[2:])]]
    last = next(op for op in flow.forward if op.name == run[-1])
    return [last.outputs[int(place[3:])]]


def _dtype(text: str) -> Dtype:
    assert text in ("bf16", "fp16", "fp32", "fp8"), f"{text} is not a dtype of a saved tensor"
    return text
