"""A run's engine on one rank of Trainium: NxD's model and optimizer, made as the plan says."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.engine.base import Allows, Batch, Measured, Run, StepReport, whenever_finite
from autoshard.engine.initial import InitialWeights
from autoshard.engine.nxd.layers import Recomputed
from autoshard.engine.nxd.library import groups, named, trainer
from autoshard.engine.nxd.lowering import INPUTS, Lowering, lowering_of
from autoshard.engine.nxd.model import Built, Kernels, build_model, places_of, tie
from autoshard.engine.nxd.stages import MiddleStage
from autoshard.engine.pieces import Piece
from autoshard.engine.programs import graph_of
from autoshard.graph.op import Array
from autoshard.plan.plan import Plan

Whole = Callable[[str], Array]  # a whole weight by its name, as in ``graph/evaluate``
_CLASSES: Mapping[str, type[nn.Module]] = {"MiddleStage": MiddleStage, "Recomputed": Recomputed}
_UPDATES: Mapping[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
_KERNELS: Kernels = MappingProxyType({})
_DTYPES: Mapping[str, torch.dtype] = {"token_weight": torch.float32}


class NxdEngine:
    """One rank of a run in a running world of ``torch.distributed``."""

    def __init__(
        self,
        plan: Plan,
        whole: Whole,
        learning_rate: float,
        updates: Mapping[str, Any] = _UPDATES,
        kernels: Kernels = _KERNELS,
    ) -> None:
        """Build this rank's share; ``updates`` are classes by the name of the one of ``torch.optim`` that they are."""
        self.plan, self.lowering = plan, lowering_of(plan)
        config = trainer().neuronx_distributed_config(**_with_classes(self.lowering))
        self.built: Built = build_model(plan, self.lowering, kernels)
        self.places = places_of(plan)
        self.model: Any = trainer().initialize_parallel_model(config, lambda: self.built.model)
        if plan.model.tied_embeddings:
            tie(self.built.model)
        self.parameters: list[tuple[str, nn.Parameter]] = list(self.model.named_parameters())
        self.built.fill(self.parameters, whole)
        self.built.mark(self.parameters)
        given = [parameter for _, parameter in self.parameters]
        options = {"lr": learning_rate, **self.lowering.optimizer}
        self.optimizer: Any = trainer().initialize_parallel_optimizer(
            config, updates[self.lowering.update], given, **options
        )

    def step(
        self, micro_batches: Sequence[Batch], learning_rate: float, allows: Allows = whenever_finite
    ) -> StepReport:
        """Run one optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        parts = [self._part(batch) for batch in micro_batches]
        loss = self._through_pipeline(parts) if self.plan.mesh.size("pp") > 1 else self._one_by_one(parts)
        self.optimizer.step()
        named("mark_step")()  # what is traced until here runs as one graph
        return StepReport(loss=loss, norm=float(self.optimizer.grad_norm))

    def save(self, folder: Path, step: int) -> None:
        """Write weights and the optimizer's states in NxD's layout, every rank its own files."""
        tag, content = _tag(step, groups().get_context_model_parallel_rank()), {"step": step}
        (folder / tag / "optim").mkdir(parents=True, exist_ok=True)  # NxD makes that of rank 0 only
        trainer().save_checkpoint(str(folder), tag, self.model, self.optimizer, user_content=content)

    def load(self, folder: Path, step: int) -> None:
        """Read them again: weights first, since ZeRO-1 cuts its shards from them unless masters were saved."""
        mine = groups().get_context_model_parallel_rank()
        trainer().load_checkpoint(str(folder), _tag(step, 0), model=self.model)
        trainer().load_checkpoint(str(folder), _tag(step, mine), optimizer=self.optimizer)

    def pieces(self) -> Sequence[Piece]:
        """Return what this rank holds of the state."""
        raise AssertionError("checkpoints of the nxd engine are its own: see save")

    def restored(self, num_updates: int) -> None:
        """Take over what the pieces were filled with."""
        raise AssertionError("checkpoints of the nxd engine are its own: see load")

    def measured(self) -> Measured:
        """Return what this rank holds; what graphs keep for backward and send, the host does not see."""
        masters = [one for one in self._shards() if one.dtype == torch.float32] if self.plan.zero == 1 else []
        sums = [getattr(one, "main_grad", None) for _, one in self.parameters]
        states = [state for one in self._states() for state in one.values() if isinstance(state, Tensor)]
        return Measured(
            memory_bytes={
                "weights": sum(one.nbytes for _, one in self.parameters),
                "gradients": sum(one.nbytes for one in sums if one is not None),
                "masters": sum(one.nbytes for one in masters),
                "optimizer": sum(one.nbytes for one in states if one.ndim),
            },
            calls={},
            sent_bytes={},
        )

    def _part(self, batch: Batch) -> dict[str, Tensor]:
        """Take this replica's sequences, and of each this rank's places."""
        count, mine = groups().get_data_parallel_size(), groups().get_data_parallel_rank()
        whole = {name: np.array_split(np.asarray(batch[name]), count)[mine] for name in INPUTS}
        parts = {name: array[:, slice(self.places.start, self.places.stop)] for name, array in whole.items()}
        return {name: torch.from_numpy(part.copy()).to(_DTYPES.get(name, torch.int64)) for name, part in parts.items()}

    def _through_pipeline(self, parts: Sequence[Mapping[str, Tensor]]) -> float:
        """NxD cuts the batch into micro-batches again; its loss is the mean over them and over replicas."""
        whole = {name: torch.cat([part[name] for part in parts]) for name in INPUTS}
        return float(self.model.run_train(**whole))

    def _one_by_one(self, parts: Sequence[Mapping[str, Tensor]]) -> float:
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
        return float(total)

    def _shards(self) -> list[Tensor]:
        groups = getattr(self.optimizer.optimizer, "base_optimizer", self.optimizer.optimizer).param_groups
        return [one for group in groups for one in group["params"]]

    def _states(self) -> list[Mapping[str, Any]]:
        return list(getattr(self.optimizer.optimizer, "base_optimizer", self.optimizer.optimizer).state.values())


def build(plan: Plan, run: Run) -> NxdEngine:
    """Build this rank's share of a plan."""
    return NxdEngine(plan, InitialWeights(graph=graph_of(plan), seed=run.training.seed), run.training.learning_rate)


def _tag(step: int, cp_rank: int) -> str:
    """Return where a rank of cp saves: ZeRO-1 cuts over cp too, but NxD names the files of all of them alike.

    The first writes the weights for all, and lies where NxD looks for checkpoints.
    """
    return f"step_{step}/cp_rank_{cp_rank:02d}" if cp_rank else f"step_{step}"


def _leave(module: nn.Module, device: torch.device) -> None:
    """Leave parameters as they are made: they are filled by name."""


def _with_classes(lowering: Lowering) -> dict[str, Any]:
    """Put classes for their names, and lists for NxD to append to."""
    config = dict(lowering.config)
    again = config["activation_checkpoint_config"]
    config["activation_checkpoint_config"] = [_CLASSES[again]] if again else None
    config["model_init_config"] = {**config["model_init_config"], "param_init_fn": _leave}
    if config["pipeline_config"]:
        layer = _CLASSES[config["pipeline_config"]["transformer_layer_cls"]]
        listed = {name: list(value) for name, value in config["pipeline_config"].items() if isinstance(value, tuple)}
        config["pipeline_config"] = {**config["pipeline_config"], **listed, "transformer_layer_cls": layer}
    return config
