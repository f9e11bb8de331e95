"""The forms of a whole plan, or why NxD cannot execute its table."""

from collections.abc import Mapping

from autoshard.errors import Fault
from autoshard.layout.program import Program
from autoshard.plan.nxd.form import Form
from autoshard.plan.nxd.match import forms_of
from autoshard.plan.nxd.matching import TP, Setting
from autoshard.plan.plan import Plan
from autoshard.plan.tables import plan_blocks, step_of

SOURCE = (
    "aws-neuron/neuronx-distributed parallel_layers/layers.py and loss_functions.py, modules/qkv_linear.py: "
    "what each layer sends"
)


def setting_of(plan: Plan) -> Setting:
    """Return what the forms of a plan are made for."""
    sizes = {**step_of(plan).sizes(plan.micro_batch), **plan.padding}
    atoms = {atom: plan.mesh.size(atom) for atom in TP if plan.mesh.size(atom) > 1}
    return Setting(sizes=sizes, atoms=atoms, dtype=plan.workload.precision.weights)


def plan_forms(plan: Plan, programs: Mapping[str, Program]) -> tuple[Mapping[str, tuple[Form, ...]], tuple[Fault, ...]]:
    """Return the forms of each kind of block, and every entry of the table for which there is none.

    Other tables of a layer differ in what is computed again: NxD computes whole modules again, with what they send.
    """
    setting, found, faults = setting_of(plan), dict[str, tuple[Form, ...]](), list[Fault]()
    for name, block in plan_blocks(plan).items():
        if name == block.kind:
            found[name], wrong = forms_of(block, programs[name], setting)
            faults += [fault.under(f"strategies.{name}") for fault in wrong]
    return found, tuple(faults)
