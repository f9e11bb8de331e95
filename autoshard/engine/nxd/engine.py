"""A run's engine on one rank of Trainium: NxD's model and optimizer, made as the plan says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.engine.initial import InitialWeights
from autoshard.engine.nxd.blocks import MiddleStage
from autoshard.engine.nxd.library import groups, named, trainer
from autoshard.engine.nxd.lowering import INPUTS, NxdLowering, lowering_of
from autoshard.engine.nxd.model import NxdModel, ParameterContents, Recomputed
from autoshard.engine.nxd.shards import local_patches
from autoshard.engine.programs import graph_of
from autoshard.graph.kinds.optimizer import AdamW
from autoshard.graph.op import Array
from autoshard.plan.candidate import Zero
from autoshard.plan.nxd.match import TP, FormPiece
from autoshard.plan.plan import Plan
from autoshard.run.placement import StatePart, StatePiece, saves_alone
from autoshard.run.protocol import Allows, Batch, Run, StepReport, whenever_finite
from autoshard.run.reports import Measured
from autoshard.spec.training import AdamWConstants

Whole = Callable[[str], Array]  # a whole weight by its name, as in ``OpGraph.instances``
# The loss of a step over all ranks, and those of micro-batches on this rank where NxD returns them.
_StepLosses = tuple[Tensor, Sequence[Tensor]]
_USUAL = AdamWConstants()
_MOST_SUSPECTS = 3  # that a rank names of what it found


class NxdEngine:
    """One rank of a run in a running world of ``torch.distributed``."""

    def __init__(self, plan: Plan, whole: Whole, constants: AdamWConstants = _USUAL) -> None:
        """Build this rank's share."""
        self.plan, self.lowering = plan, lowering_of(plan)
        config = trainer().neuronx_distributed_config(**_with_classes(self.lowering))
        self.built = NxdModel(plan, self.lowering)
        self.model: Any = trainer().initialize_parallel_model(config, lambda: self.built.module)
        self.built.tie()
        self.parameters: list[tuple[str, nn.Parameter]] = list(self.model.named_parameters())
        self.built.fill(self.parameters, whole)
        self.built.mark(self.parameters)
        self.optimizer: Any = trainer().initialize_parallel_optimizer(
            config, getattr(torch.optim, self.lowering.update), self._groups(constants), **self.lowering.optimizer
        )
        self.state = State(self.built, self.optimizer, dict(self.parameters), plan.zero)
        self.built.make_tables(self.parameters[0][1].device)
        named("mark_step")()  # else the first step's graph would make tables, moments and gradients: a graph of its own
        # Devices take no Python objects.
        self._hosts: Any = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def step(
        self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = whenever_finite
    ) -> StepReport:
        """Run one optimizer step; where a device computes, it is waited for once, before the update."""
        self.state.forget()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        parts = [self._own_batch(batch) for batch in micro_batches]
        if self.plan.mesh.size("pp") > 1:
            # NxD cuts the batch into micro-batches again; its loss is the mean over them and over replicas.
            whole = {name: torch.cat([part[name] for part in parts]) for name in INPUTS}
            losses: _StepLosses = self.model.run_train(**whole), ()
        else:
            losses = self._one_by_one(parts)
        report = self._updated(losses, allows)
        # In the graph of the update, so that gradients go into every micro-batch's graph alike: they share one.
        self.optimizer.zero_grad()
        named("mark_step")()  # what is traced until here runs as one graph
        return report

    def pieces(self) -> Sequence[StatePiece]:
        """Return the boxes of weights and moments that this rank holds; of state on a device, copies on the host."""
        return self.state.pieces()

    def restored(self, num_updates: int) -> None:
        """Use the numbers that were loaded into the memory of the last pieces."""
        self.state.restored(num_updates)

    def measured(self) -> Measured:
        """Return the bytes of this rank's state; the host does not see what graphs keep for backward, or send."""
        updated = [optimized.updated for optimized in self.state.optimized] if self.plan.zero else []
        masters = [tensor for tensor in updated if tensor.dtype == torch.float32]
        sums = [getattr(parameter, "main_grad", None) for _, parameter in self.parameters]
        states = [tensor for moments in self.state.stepping.state.values() for tensor in moments.values()]
        return Measured(
            memory_bytes={
                "weights": sum(parameter.nbytes for _, parameter in self.parameters),
                "gradients": sum(gradient.nbytes for gradient in sums if gradient is not None),
                "masters": sum(tensor.nbytes for tensor in masters),
                "optimizer": sum(tensor.nbytes for tensor in states if tensor.ndim),
            },
            sent_bytes={},
        )

    def _own_batch(self, batch: Batch) -> dict[str, Tensor]:
        """Take this replica's sequences, and of each this rank's positions."""
        count, replica = groups().get_data_parallel_size(), groups().get_data_parallel_rank()
        whole = {name: np.array_split(np.asarray(batch[name]), count)[replica] for name in INPUTS}
        positions = slice(self.built.positions.start, self.built.positions.stop)
        parts = {name: array[:, positions] for name, array in whole.items()}
        return {
            name: torch.from_numpy(part.copy()).to(torch.float32 if name == "token_weight" else torch.int64)
            for name, part in parts.items()
        }

    def _one_by_one(self, parts: Sequence[Mapping[str, Tensor]]) -> _StepLosses:
        """Without a pipeline, gradients of micro-batches add up here."""
        device = self.parameters[0][1].device
        losses: list[Tensor] = []
        for part in parts:
            loss = self.model(*(part[name].to(device) for name in INPUTS))
            loss.backward()
            named("mark_step")()
            losses.append(loss.detach())
        total = torch.stack(losses).sum() / self.lowering.loss_scale
        for group in (groups().get_data_parallel_group(), groups().get_context_model_parallel_group()):
            dist.all_reduce(total, group=group)
        return total, losses

    def _updated(self, losses: _StepLosses, allows: Allows) -> StepReport:
        """Let NxD reduce, clip and update; ask where torch's own optimizer, inside NxD's, begins its step."""
        reports: list[StepReport] = []

        def ask(*_: Any) -> None:
            if reports:
                return
            named("mark_step")()  # all until here is one graph, the update another
            reports.append(self._report(losses))
            if not allows(reports[0]):
                raise _DeclinedError

        hook = self.state.stepping.register_step_pre_hook(ask)
        try:
            self.optimizer.step()
        except _DeclinedError:
            if self.plan.zero:
                self.state.stepping.zero_grad()  # else the shards' gradients would be held until the next step
            return replace(reports[0], updated=False)
        finally:
            hook.remove()
        return reports[0]

    def _report(self, losses: _StepLosses) -> StepReport:
        """Read loss and norm; what rank 0 reads holds for all, since sums over other groups may round otherwise."""
        norm = (self.optimizer.optimizer if self.plan.zero else self.optimizer).grad_norm
        words = torch.tensor([float(losses[0]), float(norm)], dtype=torch.float64)
        dist.broadcast(words, 0, group=self._hosts)
        loss, norm = words.tolist()
        report = StepReport(loss=loss, norm=norm)
        return report if report.finite else replace(report, suspects=self._suspects(losses))

    def _suspects(self, losses: _StepLosses) -> tuple[str, ...]:
        """Return by rank the losses and gradients that are not finite; gradients are those before the reduction.

        Without ZeRO-1, NxD has summed gradients over replicas by now, in their place.
        """
        suspects = [f"loss of micro-batch {number}" for number, loss in enumerate(losses[1]) if not _is_finite(loss)]
        for optimized in self.state.optimized:
            parameter, contents = optimized.parameter, optimized.contents
            gradient = getattr(parameter, "main_grad", None) if parameter.grad is None else parameter.grad
            if gradient is not None and not _is_finite(gradient):
                suspects += [f"gradient of {contents.instance}.{piece.tensor}" for piece in contents.holds.pieces]
        by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, suspects[:_MOST_SUSPECTS], group=self._hosts)
        return tuple(f"rank {rank}: {', '.join(its)}" for rank, its in enumerate(by_rank) if its)

    def _groups(self, constants: AdamWConstants) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer: those that decay in the graph, and the others."""
        if self.lowering.update != "AdamW":
            return [{"params": [parameter for _, parameter in self.parameters]}]
        graph, groups = graph_of(self.plan), dict[bool, list[nn.Parameter]]()
        for name, parameter in self.parameters:
            contents = self.built.contents[name]
            block = graph.block_of(contents.instance)
            kinds = [block.op(f"{piece.tensor}.update").kind for piece in contents.holds.pieces]
            decays = {isinstance(kind, AdamW) and kind.decay > 0 for kind in kinds}
            assert len(decays) == 1, f"{contents} holds weights that decay and others"
            groups.setdefault(decays.pop(), []).append(parameter)
        usual = {"betas": (constants.beta1, constants.beta2), "eps": constants.eps}
        return [
            {"params": members, "weight_decay": constants.weight_decay if decays else 0.0, **usual}
            for decays, members in groups.items()
        ]


class _DeclinedError(Exception):
    """The loop of the run does not allow the update."""


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().cpu().isfinite().all())


def build(plan: Plan, run: Run) -> NxdEngine:
    """Build this rank's share of a plan."""
    return NxdEngine(plan, InitialWeights.of(plan, graph_of(plan), run.training.seed), run.training.adamw)


def _with_classes(lowering: NxdLowering) -> dict[str, Any]:
    """Return NxD's configuration: with classes in the place of names, and with lists, to which NxD appends.

    NxD draws no weights, since this engine fills them.
    """
    config = dict(lowering.config)
    config["activation_checkpoint_config"] = [Recomputed] if config["activation_checkpoint_config"] else None
    config["model_init_config"] = {**config["model_init_config"], "param_init_fn": lambda module, device: None}
    if config["pipeline_config"]:
        listed = {name: list(value) for name, value in config["pipeline_config"].items() if isinstance(value, tuple)}
        config["pipeline_config"] = {**config["pipeline_config"], **listed, "transformer_layer_cls": MiddleStage}
    return config


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

    def __init__(self, built: NxdModel, optimizer: Any, parameters: Mapping[str, nn.Parameter], zero: Zero) -> None:
        self._built, self._zero = built, zero
        self._outer = optimizer.optimizer  # ZeRO-1, or what it would wrap
        self.stepping: torch.optim.Optimizer = self._outer.base_optimizer if zero else self._outer
        names, optimized = {parameter: name for name, parameter in parameters.items()}, list[OptimizedParameter]()
        for whole, parts in zip(self._outer.param_groups, self.stepping.param_groups, strict=True):
            for parameter, updated in zip(whole["params"], parts["params"], strict=True):
                first = len(updated) * self._outer.local_rank if zero else 0
                rows, contents = (first, first + len(updated)), built.contents[names[parameter]]
                optimized.append(OptimizedParameter(contents=contents, parameter=parameter, updated=updated, rows=rows))
        self.optimized = tuple(optimized)
        self.off_host = any(entry.updated.device.type != "cpu" for entry in self.optimized)
        self._copies: list[tuple[Tensor, Tensor]] = []
        if isinstance(self.stepping, torch.optim.AdamW):
            for entry in self.optimized:  # what torch's own optimizer begins its first step with
                keep: Any = {"memory_format": torch.preserve_format}
                moments = {name: torch.zeros_like(entry.updated, **keep) for name in _MOMENTS.values()}
                self.stepping.state[entry.updated] = {"step": torch.tensor(0.0), **moments}
        self._make_gradients()

    def pieces(self) -> tuple[StatePiece, ...]:
        """Return the boxes of weights and moments that this rank holds."""
        self.forget()
        return tuple(piece for optimized in self.optimized for piece in self._pieces(optimized))

    def restored(self, num_updates: int) -> None:
        """Use the values that the last pieces were filled with: weights are made of the masters."""
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
            self.forget()
            for state in self.stepping.state.values():
                if "step" in state:
                    state["step"].fill_(num_updates)
            if self._zero:  # it only gathers weights that have a gradient, and all have
                self._outer.allgather_weights_and_update_full_parameter()
        named("mark_step")()

    def forget(self) -> None:
        """Free the copies of the last pieces."""
        self._copies = []

    def _pieces(self, optimized: OptimizedParameter) -> Iterator[StatePiece]:
        built, holds, state = self._built, optimized.contents.holds, self.stepping.state.get(optimized.updated, {})
        tensors: dict[StatePart, Tensor] = {"weight": optimized.updated.detach()}
        tensors |= {part: state[name] for part, name in _MOMENTS.items() if name in state}
        pieces = {piece.tensor: piece for piece in holds.pieces}
        _, wholes = local_patches(holds, built.rank, built.sizes, built.whole)
        patches = [patch for whole in wholes for patch in whole.rows(*optimized.rows)]
        for part, tensor in tensors.items():
            memory = tensor
            if self.off_host:
                memory = tensor.to("cpu", copy=True)
                self._copies.append((tensor, memory))
            for patch in patches:
                weight, its = f"{optimized.contents.instance}.{patch.tensor}", pieces[patch.tensor]
                yield StatePiece(
                    weight=weight, part=part, whole=tuple(built.whole[dim] for dim in its.dims), offsets=patch.box[0],
                    memory=patch.view(memory), saves=saves_alone(weight, *self._replica(its)),
                )  # fmt: skip

    def _replica(self, piece: FormPiece) -> tuple[int, int]:
        """Return this rank's number among the ranks that hold copies of a box, and the count of these ranks."""
        cut = {atom for atoms in piece.cuts.values() for atom in atoms}
        same = [atom for atom in TP if atom not in cut]
        number, count = self._built.rank.coordinate(same), self._built.rank.size(same)
        if not self._zero:
            nxd_groups = groups()
            for place, size in (
                (nxd_groups.get_data_parallel_rank(), nxd_groups.get_data_parallel_size()),
                (nxd_groups.get_context_model_parallel_rank(), nxd_groups.get_context_model_parallel_size()),
            ):
                number, count = number + count * place, count * size
        return number, count

    def _make_gradients(self) -> None:
        """Give every parameter the gradient, of zeros, to which NxD adds those of micro-batches."""
        for optimized in self.optimized:
            parameter, updated = optimized.parameter, optimized.updated
            if self._zero and self._outer.use_grad_acc_hook:
                shape, device = parameter.shape, parameter.device
                zeros: Any = torch.zeros(shape, dtype=self._outer.optimizer_dtype, device=device)
                updated.main_grad = parameter.main_grad = zeros  # pyright: ignore[reportAttributeAccessIssue]
            else:
                parameter.grad = torch.zeros_like(parameter)
