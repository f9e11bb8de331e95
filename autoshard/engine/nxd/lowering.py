"""A plan as NxD takes it: layers, cuts and configurations, as data; no torch, no NxD.

What stands here is passed on as it is. The names of classes are those of ``layers`` and ``model``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from autoshard.errors import InputError, require
from autoshard.plan.nxd.forms import plan_forms
from autoshard.plan.nxd.match import Form
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute
from autoshard.plan.tables import plan_blocks, plan_programs
from autoshard.spec.kernels import load_kernels

INPUTS = ("tokens", "labels", "token_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLayers:
    """Neighbouring layers that compute the same again: runs of leaves, each as one module; an empty name is all."""

    num_layers: int
    runs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdLowering:
    """All that NxD needs to know of a plan."""

    forms: Mapping[str, tuple[Form, ...]] = field(hash=False)  # by kind of block
    recompute: tuple[RecomputedLayers, ...]
    attention: str  # core, flash or ring
    config: Mapping[str, Any] = field(hash=False)  # arguments of neuronx_distributed_config
    update: str  # the class of torch.optim
    optimizer: Mapping[str, Any] = field(hash=False)  # arguments of initialize_parallel_optimizer
    loss_scale: int  # NxD takes means over micro-batches and replicas of the batch; a plan's loss is a sum

    @property
    def sequence_first(self) -> bool:
        """Whether the hidden state between layers is [seq, batch, hidden], cut along the sequence."""
        return any(form.arguments.get("sequence_parallel_enabled") for form in self.forms["layer"])


def lowering_of(plan: Plan) -> NxdLowering:
    """Lower a plan, or say for which entries of its table NxD has no layer."""
    message = "the table is empty, so nothing says what is sent. Make the plan again"
    require((bool(plan.strategies), "strategies", message))
    forms, faults = plan_forms(plan, plan_programs(plan))
    if faults:
        raise InputError(faults)
    drops = (stage.recompute.of_layer(index) for stage in plan.stages for index in range(stage.num_layers))
    recompute = tuple(
        RecomputedLayers(num_layers=len(list(same)), runs=_runs(plan, drop)) for drop, same in groupby(drops)
    )
    summed = any(parameter.summed for block in forms.values() for form in block for parameter in form.parameters)
    scale = plan.mesh.size("dp") * plan.mesh.size("cp")
    return NxdLowering(
        forms=forms,
        recompute=recompute,
        attention="ring" if plan.mesh.size("cp") > 1 else "core" if plan.kernels == "nxd_core" else "flash",
        config=_config(plan, sums_gradients=summed, recomputes=any(again.runs for again in recompute)),
        update={"adamw": "AdamW", "sgd": "SGD"}[plan.workload.optimizer],
        # ZeRO-1 reads the limit of the norm here, not in its configuration; a run's constants come beside it.
        optimizer={"max_norm": plan.workload.clip_norm} if plan.zero == 1 else {},
        loss_scale=scale * (plan.schedule.num_micro_batches if plan.mesh.size("pp") > 1 else 1),
    )


def _runs(plan: Plan, drop: Recompute) -> tuple[tuple[str, ...], ...]:
    """Return the runs of leaves that a layer computes again."""
    if drop.kind == "none":
        return ()
    if drop.kind == "full":
        return (("",),)
    sets = load_kernels(plan.kernels).selective
    forward_ops = {op.name for op in plan_blocks(plan)["layer"].select("micro_batch", "F")}
    leaves = forward_ops.intersection(leaf for name in drop.ops for leaf in sets.get(name, (name,)))
    runs: list[tuple[str, ...]] = []
    for run in (("up", "gate", "act", "product", "down"), ("act", "product")):  # computed again as one module
        if leaves.issuperset(run):
            runs.append(run)
            leaves -= set(run)
    return (*runs, *((leaf,) for leaf in sorted(leaves)))


def _config(plan: Plan, *, sums_gradients: bool, recomputes: bool) -> Mapping[str, Any]:
    precision, zero_one = plan.workload.precision, plan.zero == 1
    pipeline = {
        "transformer_layer_cls": "MiddleStage",
        "num_microbatches": plan.schedule.num_micro_batches,
        "virtual_pipeline_size": plan.schedule.num_chunks,
        "output_loss_value_spec": True,
        "input_names": INPUTS,
        # The last layer of every stage but the last.
        "pipeline_cuts": tuple(f"layers.{stage.first_layer + stage.num_layers - 1}" for stage in plan.stages[:-1]),
        "leaf_module_cls": ("FirstStage", "LastStage"),
        "tracer_cls": "torch",
        "broadcast_and_average_loss": True,
        "use_zero1_optimizer": zero_one,
        "use_optimizer_wrapper": True,
    }
    return {
        "tensor_parallel_size": plan.mesh.size("tp"),
        "pipeline_parallel_size": plan.mesh.size("pp"),
        "context_parallel_size": plan.mesh.size("cp"),
        "expert_parallel_size": 1,
        "lnc_size": plan.cluster.lnc or 1,
        "sequence_parallel": sums_gradients,
        "pipeline_config": pipeline if plan.mesh.size("pp") > 1 else None,
        "optimizer_config": {
            "zero_one_enabled": zero_one,
            "grad_clipping": True,
            "max_grad_norm": plan.workload.clip_norm,
        },
        "mixed_precision_config": {
            "use_master_weights": precision.masters is not None,
            "use_fp32_grad_acc": zero_one and precision.gradients != precision.weights,
            "use_master_weights_in_ckpt": zero_one,  # else torch_xla warns of its own checkpoints, which are not used
        },
        "model_init_config": {"meta_device_init": True, "param_init_fn": "leave"},
        "activation_checkpoint_config": "Recomputed" if recomputes else None,
    }
