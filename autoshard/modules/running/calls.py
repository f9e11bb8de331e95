"""What the ranks bring to a call of a sharded module: the same batch, or each its part of one."""

import inspect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as tree

from autoshard.errors import InputError
from autoshard.modules.export import flattened
from autoshard.modules.nodes import place_in_tree
from autoshard.modules.running.agreeing import (
    CallAgreement,
    InputLook,
    is_small,
    number_of,
    refuse_kinds,
    refuse_numbers,
    shown_input,
    sum_of_bits,
)
from autoshard.modules.running.batches import LOCAL, BatchRows, LocalBatch
from autoshard.modules.shard import Inputs

_WHOLE = f"give every rank the same whole batch, or shard with batch={LOCAL!r}, where each brings its part"
_PADDED = "pad the parts of a batch alike"
_COMMON = "what has no rows of the batch is the same on all ranks"
_ELSE = "is called in another way on some ranks: it trains or not, gets other gradients, or its attributes differ"


@dataclass(frozen=True, kw_only=True)
class RankCall:
    """The arguments of a call on this rank, one by one, and which of them are parts of a batch."""

    signature: inspect.Signature
    layout: tree.TreeSpec
    flat: Sequence[Any]
    parts: Sequence[int]

    def shown(self) -> list[str]:
        """Say what each argument is."""
        return [shown_input(value, is_part=number in self.parts) for number, value in enumerate(self.flat)]

    def bits(self) -> list[int]:
        """Return what stands for the numbers of each argument."""
        return [sum_of_bits(value) if isinstance(value, torch.Tensor) else 0 for value in self.flat]

    def totals(self) -> tuple[int, int]:
        """Return what stands for the numbers of whole inputs, and of parts."""
        bits = self.bits()
        common = [bit for number, bit in enumerate(bits) if number not in self.parts]
        return number_of(common), number_of([bits[number] for number in self.parts])

    def looks(self) -> list[InputLook]:
        """Return what messages show."""
        args, kwargs = tree.tree_unflatten([*self.flat], self.layout)
        named = self.signature.bind(*args, **kwargs).arguments
        names = [place_in_tree(path) for path, _ in tree.tree_flatten_with_path(named)[0]]
        return [
            InputLook(name=name, shown=shown, bits=bits)
            for name, shown, bits in zip(names, self.shown(), self.bits(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class RankInputs:
    """How the inputs of all ranks become those of a program."""

    agreement: CallAgreement
    batch: LocalBatch | None
    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    @classmethod
    def of(cls, mesh: DeviceMesh, axes: tuple[str, ...]) -> "RankInputs | None":
        """Prepare groups for a mesh; along ``axes`` ranks bring parts of a batch. A single rank needs none."""
        if mesh.size() == 1:
            return None
        return cls(agreement=CallAgreement.for_all_ranks(), batch=LocalBatch.of(mesh, axes) if axes else None)

    def agreed(
        self,
        called: tuple[inspect.Signature, tree.TreeSpec, Sequence[Any]],
        modes: tuple[Hashable, ...] = (),
        states: int = 0,
    ) -> tuple[list[Any], BatchRows | None]:
        """Return the inputs of the program, and which rows are this rank's; refuse on all ranks what does not fit.

        What runs depends on ``modes`` as well; ``states`` says which programs fit the state of the module.
        """
        signature, layout, flat = called
        count = self.batch.size(flat) if self.batch else 0
        parts = self.batch.parts(flat, count) if self.batch else []
        call = RankCall(signature=signature, layout=layout, flat=flat, parts=parts)
        if modes not in self.numbers:
            self.numbers[modes] = number_of([sorted(mode) if isinstance(mode, frozenset) else mode for mode in modes])  # pyright: ignore
        kind = number_of(str(layout), call.shown(), self.numbers[modes]), states
        headers = self.agreement.headers(kind, count, call.totals, always=is_small(flat))
        sharing = self.batch.sharing if self.batch else []
        is_alike = len({(*header[:2],) for header in headers}) == 1 and _is_same(header[3] for header in headers)
        if not (is_alike and all(_is_same(headers[rank][4] for rank in group) for group in sharing)):
            self.agreement.seen.clear()  # on all ranks, so that all compare numbers at the same calls
            self._refuse(call, sharing)
        if not self.batch:
            return [*flat], None
        counts = tuple(headers[rank][2] for rank in self.batch.ranks)
        rows = BatchRows(batch=self.batch, parts=tuple(parts), counts=counts)
        return rows.whole(flat), rows

    def examples(self, module: torch.nn.Module, inputs: Inputs) -> Inputs:
        """Return example inputs of the whole batch, from those of this rank."""
        signature = inspect.signature(module.forward)
        by_name = isinstance(inputs, Mapping)
        values, layout = flattened(signature, *((), inputs) if by_name else (tuple(inputs), {}))
        flat, _ = self.agreed((signature, layout, values))
        args, kwargs = tree.tree_unflatten(flat, layout)
        return {**dict(zip(signature.parameters, args, strict=False)), **kwargs} if by_name else args

    def _refuse(self, call: RankCall, sharing: Sequence[Sequence[int]]) -> NoReturn:
        """Refuse a call that is not the same on all ranks, on all of them."""
        by_rank: list[list[InputLook]] = self.agreement.exchanged(call.looks())
        refuse_kinds(by_rank, _PADDED if self.batch else _WHOLE)
        parts = [[looks[number] for number in call.parts] for looks in by_rank]
        common = [[entry for number, entry in enumerate(looks) if number not in call.parts] for looks in by_rank]
        refuse_numbers(common, [range(len(by_rank))], _COMMON if self.batch else _WHOLE)
        if self.batch:
            refuse_numbers(parts, sharing, self.batch.remedy())
        raise InputError.of("module", _ELSE)


def _is_same(numbers: Iterable[int]) -> bool:
    """Say whether all ranks that compare numbers have the same; the others have 0."""
    return len({*numbers} - {0}) <= 1
