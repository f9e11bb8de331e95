"""The proof of a traced block: on virtual ranks it gives the module's own result and all of its gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten  # as torch.export lays inputs out

from autoshard.graph.op import Array
from autoshard.layout.interpret import Interpreter
from autoshard.layout.layout import Cuts
from autoshard.layout.lower import lower
from autoshard.layout.redistribute import Price
from autoshard.spec.mesh import Mesh
from autoshard.trace.blocks import TracedBlock
from autoshard.trace.capture import Captured


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """The largest difference of a tensor from the module's own, relative to the largest number in it."""

    name: str
    error: float


class ModuleRun:
    """A module run once on its example inputs in float64, with the gradients that autograd gives."""

    def __init__(self, module: torch.nn.Module, inputs: Sequence[Any], captured: Captured, traced: TracedBlock) -> None:
        exported, self.captured, self.traced = captured.exported, captured, traced
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        carried = next((one for one in captured.program.values if one.origin == "carried"), None)
        names = [spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
        flat, layout = tree_flatten(tuple(inputs))
        place = names.index(carried.name) if carried else None
        if place is not None:
            flat[place] = flat[place].detach().clone().requires_grad_()
        self.carried = flat[place] if place is not None else None
        found = module(*tree_unflatten(flat, layout))
        self.result = found[0] if isinstance(found, tuple) else found
        self.seed = torch.randn(self.result.shape, dtype=self.result.dtype, generator=torch.Generator().manual_seed(0))
        trained = {path: one for path, one in self.parameters.items() if one.requires_grad}
        wanted = [*trained.values(), *([] if self.carried is None else [self.carried])]
        gradients = torch.autograd.grad(self.result, wanted, self.seed, allow_unused=True)
        whole = [torch.zeros_like(one) if own is None else own for one, own in zip(wanted, gradients, strict=True)]
        self.gradients = dict(zip(trained, whole, strict=False))
        self.carried_gradient = whole[-1]
        self.inputs = _node_values(module, exported, dict(zip(names, flat, strict=True)), captured)

    def given(self) -> dict[str, Array]:
        """Return the arrays that the block reads: weights, inputs, what is carried, the gradient of the result."""
        found = {name: self.parameters[path] for name, path in self.captured.parameters.items()}
        found |= self.inputs
        for value in self.captured.program.values:
            if value.origin == "carried" and self.carried is not None:
                found[value.name] = self.carried
        laid_out = {name: self._laid_out(name, tensor) for name, tensor in found.items() if name in self.traced.dims}
        laid_out[f"d.{self.traced.result}"] = self._laid_out(self.traced.result, self.seed)
        zero = {f"{name}.grad": np.zeros_like(laid_out[name]) for name in self.captured.parameters if name in laid_out}
        return {**laid_out, **zero}

    def compare(self, cuts: Mapping[str, Cuts], mesh: Mesh, price: Price, boundary: Cuts) -> list[ComparedTensor]:
        """Run the block with these cuts on virtual ranks, and compare all it gives with the module's own."""
        block, atoms = self.traced.block, dict(mesh.axes)
        program = lower(block, cuts, atoms, price, boundary=boundary, keeps_gathered=True)
        runner = Interpreter(block=block, mesh=mesh, sizes=self.traced.sizes)
        found = runner.run(program, self.given())
        wanted: dict[str, torch.Tensor] = {self.traced.result: self.result}
        for name, path in self.captured.parameters.items():
            if name in self.traced.dims and path in self.gradients:  # frozen weights have none
                wanted[f"{name}.sum"] = self.gradients[path]
        if block.carry_in and self.carried is not None:
            last = next(f"{op.name}.d0" for op in block.ops if op.inputs == (block.carry_in,))
            wanted[last] = self.carried_gradient
        alike = {f"{name}.sum": name for name in self.captured.parameters}
        pairs: dict[str, tuple[Array, Array]] = {}
        for name, tensor in wanted.items():
            source = alike.get(name) or (name if name in self.traced.dims else block.carry_in)
            pairs[name] = found[name], self._laid_out(str(source), tensor)
        # Some gradients are zero but for rounding, as those of keys' biases: the largest of all is the measure.
        largest = {name: float(np.abs(own).max(initial=0.0)) for name, (_, own) in pairs.items()}
        of_all = max((size for name, size in largest.items() if name != self.traced.result), default=0.0)
        return [
            ComparedTensor(name=name, error=float(np.abs(ours - own).max(initial=0.0)) / (measure or 1.0))
            for name, (ours, own) in pairs.items()
            for measure in [largest[name] if name == self.traced.result else of_all]
        ]

    def _laid_out(self, name: str, tensor: torch.Tensor) -> Array:
        """Lay a tensor of torch out along the dims of the block's tensor of that name."""
        positions = self.traced.dims[name]
        dims = [dim for position in positions for dim in position]
        array = tensor.detach().numpy().reshape([self.traced.sizes[dim] for dim in dims])
        return array.transpose([dims.index(dim) for dim in self.traced.block.tensors[name].dims])


def _node_values(
    module: torch.nn.Module, exported: Any, flat: Mapping[str, Any], captured: Captured
) -> dict[str, torch.Tensor]:
    """Return the values of the nodes that are inputs of the program."""
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers()),
        **exported.constants,
    }
    found: dict[str, torch.Tensor] = {}

    class Runner(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if n.name in captured.inputs:
                found[n.name] = value.detach()
            return value

    arguments = [
        flat[spec.arg.name] if spec.kind.name == "USER_INPUT" else state[spec.target]
        for spec in exported.graph_signature.input_specs
    ]
    with torch.no_grad():
        Runner(exported.graph_module).run(*arguments)
    return found
