"""The Trainium of a measurement: that of this machine, or the one that a dry run plays; and which engines it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoshard.cost.built_in import built_in
from autoshard.cost.calibration import Calibration
from autoshard.errors import InputError, require
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.runtime.here import neuron_devices, node_type_here
from autoshard.search.bound.request import Request, plan_at
from autoshard.spec.cluster import Cluster, EngineName
from autoshard.spec.cluster_catalogue import NodeType, cluster_names, load_node_type
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Workload
from benchmarks.guarded import Setting
from benchmarks.result import Extra, Result

PLAYED = "trn1.32xlarge"  # what a dry run plays
NXD, NATIVE = "neuronx_distributed", "torch_neuron"  # packages that the engines run through
_NONE = "there is no Trainium here that neuron-ls shows. Rent one (docs/guides/trainium.md), or type --dry-run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One node with Trainium. A dry run computes nothing on it."""

    node_type: NodeType
    engines: tuple[EngineName, ...]  # that can run here: each has an environment of its own
    setting: Setting

    @property
    def dry(self) -> bool:
        """Whether everything is only gone through."""
        return self.setting.dry

    @property
    def lncs(self) -> tuple[int | None, ...]:
        """The logical NeuronCore configurations, the default first; None where there is nothing to choose."""
        return tuple(variant.lnc for variant in self.node_type.variants)

    @property
    def price_usd_per_hour(self) -> float | None:
        """The price on demand, if it is known."""
        return self.node_type.price_usd_per_node_hour

    def node(self, lnc: int | None = None) -> Cluster:
        """Return the node as plans see it."""
        variants = self.node_type.variants
        return self.node_type.cluster(next((one for one in variants if one.lnc == lnc), variants[0]), 1)

    def calibration(self) -> Calibration:
        """Return the constants that come with autoshard for this machine."""
        return built_in(self.node_type.name)

    def plan(
        self, text: str, model: ModelSpec, workload: Workload, *, engine: EngineName = "nxd", lnc: int | None = None
    ) -> Plan:
        """Return the plan of a layout on this machine, or raise why it cannot run there."""
        request = Request(model=model, cluster=self.node(lnc), workload=workload, engines=(engine,))
        return plan_at(request, Candidate.parse(text))


def machine_of(setting: Setting) -> Machine:
    """Return the Trainium of this machine; in a dry run what stands for it."""
    if setting.dry:
        name = setting.machine or PLAYED
        node_type = load_node_type(name)
        known = [one for one in cluster_names() if one.startswith("trn")]
        require((_is_trainium(node_type), "--machine", f"{name} is no Trainium. Use one of {', '.join(known)}"))
        return Machine(node_type=node_type, engines=_engines(node_type), setting=setting)
    if not neuron_devices():
        raise InputError.of("", _NONE)
    node_type = node_type_here()
    require(
        (
            node_type is not None,
            "",
            "neuron-ls shows an instance that autoshard does not know. See docs/guides/trainium.md",
        )
    )
    assert node_type, "checked above"
    found: list[EngineName] = [engine for engine in _engines(node_type) if _is_there(engine)]
    guide = Path("docs/guides/trainium.md")
    nothing = f"neither neuronx-distributed nor TorchNeuron is installed in this environment, {guide}"
    require((bool(found), "", f"{nothing} says how to take the one of this machine's image"))
    return Machine(node_type=node_type, engines=tuple(found), setting=setting)


def _is_trainium(node_type: NodeType) -> bool:
    return node_type.chip.name.startswith("trainium")


def _engines(node_type: NodeType) -> tuple[EngineName, ...]:
    """Return the engines of a machine: native PyTorch does not serve trn1, and NxD not trn3."""
    of: Mapping[str, tuple[EngineName, ...]] = {"trainium1": ("nxd",), "trainium2": ("nxd", "torch")}
    native: tuple[EngineName, ...] = ("torch",)
    return of.get(node_type.chip.name, native)


def _is_there(engine: EngineName) -> bool:
    if engine == "nxd":
        return find_spec(NXD) is not None
    import torch

    there = torch.accelerator.current_accelerator(check_available=True)
    return there is not None and there.type == "neuron"


def told(name: str, predicted_s: float, measured_s: float | None, more: Mapping[str, Extra] | None = None) -> Result:
    """Return seconds beside their prediction; a dry run has the prediction alone."""
    extras: dict[str, Extra] = {"predicted_s": predicted_s}
    if measured_s is None:
        return Result(
            name=name, value=predicted_s, unit="s, predicted (dry run)", bar=None, holds=True, extras=dict(more or {})
        )
    extras["measured_over_predicted"] = measured_s / predicted_s if predicted_s else None
    return Result(name=name, value=measured_s, unit="s", bar=None, holds=True, extras=extras | dict(more or {}))


def columns(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Extra]:
    """Return some entries of a record, those that there are."""
    return {name: row[name] for name in names if row.get(name) is not None}
