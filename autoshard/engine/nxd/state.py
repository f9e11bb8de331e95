"""The state of NxD's optimizer on one rank, as boxes of our whole tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.engine.nxd.library import groups, named
from autoshard.engine.nxd.model import Built, ParameterContents
from autoshard.engine.nxd.shards import patches_of
from autoshard.engine.placement import StatePart, StatePiece, saves_alone
from autoshard.plan.candidate import Zero
from autoshard.plan.nxd.match import TP, FormPiece

_MOMENTS: Mapping[StatePart, str] = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}  # as torch.optim.AdamW names them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OptimizedParameter:
    """A parameter, and what the optimizer updates in its place: ZeRO-1's shard of its rows, or the parameter itself."""

    contents: ParameterContents
    parameter: nn.Parameter
    updated: nn.Parameter
    rows: tuple[int, int]


class State:
    """What one rank updates; ``optimizer`` is NxD's.

    On the host pieces are views of it. Elsewhere (``apart``) views need not share memory, so that pieces are of copies,
    made when they are asked for and brought back by ``restored``.
    """

    def __init__(self, built: Built, optimizer: Any, parameters: Mapping[str, nn.Parameter], zero: Zero) -> None:
        self._built, self._zero = built, zero
        self._given = optimizer.optimizer  # ZeRO-1, or what it would wrap
        self.stepping: torch.optim.Optimizer = self._given.base_optimizer if zero else self._given
        names, optimized = {parameter: name for name, parameter in parameters.items()}, list[OptimizedParameter]()
        for whole, parts in zip(self._given.param_groups, self.stepping.param_groups, strict=True):
            for parameter, updated in zip(whole["params"], parts["params"], strict=True):
                first = len(updated) * self._given.local_rank if zero else 0
                rows, contents = (first, first + len(updated)), built.contents[names[parameter]]
                optimized.append(OptimizedParameter(contents=contents, parameter=parameter, updated=updated, rows=rows))
        self.optimized = tuple(optimized)
        self.apart = any(one.updated.device.type != "cpu" for one in self.optimized)
        self._copies: list[tuple[Tensor, Tensor]] = []
        if isinstance(self.stepping, torch.optim.AdamW):
            for one in self.optimized:  # what torch's own optimizer begins its first step with
                keep: Any = {"memory_format": torch.preserve_format}
                moments = {name: torch.zeros_like(one.updated, **keep) for name in _MOMENTS.values()}
                self.stepping.state[one.updated] = {"step": torch.tensor(0.0), **moments}

    def pieces(self) -> tuple[StatePiece, ...]:
        """Return the boxes of weights and moments that this rank holds."""
        self.forget()
        return tuple(piece for one in self.optimized for piece in self._pieces(one))

    def restored(self, num_updates: int) -> None:
        """Use the values that the last pieces were filled with: weights are made of the masters."""
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
            self.forget()
            for state in self.stepping.state.values():
                if "step" in state:
                    state["step"].fill_(num_updates)
            if self._zero:
                self._publish()
        named("mark_step")()

    def forget(self) -> None:
        """Free the copies of the last pieces."""
        self._copies = []

    def _pieces(self, one: OptimizedParameter) -> Iterator[StatePiece]:
        built, holds, state = self._built, one.contents.holds, self.stepping.state.get(one.updated, {})
        tensors: dict[StatePart, Tensor] = {"weight": one.updated.detach()}
        tensors |= {part: state[name] for part, name in _MOMENTS.items() if name in state}
        pieces = {piece.tensor: piece for piece in holds.pieces}
        wholes = patches_of(holds, built.rank, built.sizes, built.whole)
        found = [patch for whole in wholes for patch in whole.rows(*one.rows)]
        for part, tensor in tensors.items():
            memory = tensor
            if self.apart:
                memory = tensor.to("cpu", copy=True)
                self._copies.append((tensor, memory))
            for patch in found:
                weight, its = f"{one.contents.instance}.{patch.tensor}", pieces[patch.tensor]
                yield StatePiece(
                    weight=weight, part=part, whole=tuple(built.whole[dim] for dim in its.dims), offsets=patch.box[0],
                    memory=patch.view(memory), saves=saves_alone(weight, *self._alike(its)),
                )  # fmt: skip

    def _alike(self, piece: FormPiece) -> tuple[int, int]:
        """Return which this rank is of those that hold the same box, and how many they are."""
        cut = {atom for atoms in piece.cuts.values() for atom in atoms}
        same = [atom for atom in TP if atom not in cut]
        number, count = self._built.rank.coordinate(same), self._built.rank.size(same)
        if not self._zero:
            known = groups()
            for place, size in (
                (known.get_data_parallel_rank(), known.get_data_parallel_size()),
                (known.get_context_model_parallel_rank(), known.get_context_model_parallel_size()),
            ):
                number, count = number + count * place, count * size
        return number, count

    def _publish(self) -> None:
        """Let ZeRO-1 gather the weights from its shards; it only does that for weights that have a gradient."""
        for one in self.optimized:
            shape, device = one.parameter.shape, one.parameter.device
            if self._given.use_grad_acc_hook and not hasattr(one.updated, "main_grad"):
                zeros: Any = torch.zeros(shape, dtype=self._given.optimizer_dtype, device=device)
                one.updated.main_grad = one.parameter.main_grad = zeros  # pyright: ignore[reportAttributeAccessIssue]
            elif not self._given.use_grad_acc_hook and one.parameter.grad is None:
                one.parameter.grad = torch.zeros_like(one.parameter)
        self._given.allgather_weights_and_update_full_parameter()
