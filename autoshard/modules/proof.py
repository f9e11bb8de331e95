"""The proof of a traced block: on virtual ranks it gives the module's own results and all of its gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten  # as torch.export lays inputs out

from autoshard.errors import require
from autoshard.graph.op import Array
from autoshard.layout.interpret import Interpreter
from autoshard.layout.program import Program
from autoshard.modules.blocks import TracedBlock
from autoshard.modules.capture import Captured
from autoshard.modules.region import Positions
from autoshard.spec.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTensor:
    """The largest difference of a tensor from the module's own, relative to the largest number in it."""

    name: str
    error: float


class ModuleRun:
    """A module run once on its example inputs in float64, with the gradients that autograd gives."""

    def __init__(
        self,
        module: torch.nn.Module,
        inputs: Sequence[Any] | Mapping[str, Any],
        captured: Captured,
        traced: TracedBlock,
    ) -> None:
        self.captured, self.traced, exported = captured, traced, captured.exported
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        call = exported.flat(*((), inputs) if isinstance(inputs, Mapping) else (inputs, {}), exact=True)
        arguments: dict[str, Any] = {}
        for name, value in call.items():
            is_taken = isinstance(value, torch.Tensor) and name in traced.block.takes
            arguments[name] = value.detach().clone().requires_grad_() if is_taken else value
        args, kwargs = tree_unflatten(list(arguments.values()), exported.call.layout)
        self.arguments, self.parameters = arguments, dict(module.named_parameters())
        key = torch.tensor(0)  # of the only call
        if exported.random:  # the module's own numbers come from torch's generator
            outputs = exported.values(
                exported.part([node for _, node, _ in exported.returned()]), arguments, buffers, key, self.parameters
            )
        else:
            flat = iter(tree_flatten(module.forward(*args, **kwargs))[0])  # hooks of the module itself are not traced
            changed = {name: buffer.clone() for name, buffer in module.named_buffers()}
            outputs = [changed[place] if is_buffer else next(flat) for place, _, is_buffer in exported.returned()]
        self.results = {
            result.name: output for result, output in zip(captured.program.results, outputs, strict=True) if result.read
        }
        random = torch.Generator().manual_seed(0)
        self.seeds = {
            result.name: torch.randn(self.results[result.name].shape, dtype=torch.float64, generator=random)
            for result in captured.program.results
            if result.is_seeded
        }
        sources = {name: self.parameters[captured.parameters[name]] for name in self._trained()}
        sources |= {name: arguments[name] for name in traced.block.takes}
        seeded = [self.results[name] for name in self.seeds]
        ends = [*sources.values()], [*self.seeds.values()]
        gradients = (
            torch.autograd.grad(seeded, *ends, allow_unused=True) if seeded and sources else [None] * len(sources)
        )
        finite = all(bool(tensor.isfinite().all()) for tensor in (*seeded, *gradients) if tensor is not None)
        require((finite, "inputs", "make the module give NaN or infinity, which cannot be compared"))
        pairs = zip(sources.items(), gradients, strict=True)
        self.gradients = {
            name: torch.zeros_like(tensor) if gradient is None else gradient for (name, tensor), gradient in pairs
        }
        for name, buffer in module.named_buffers():  # a proof leaves nothing behind
            buffer.copy_(buffers[name])
        nodes = [*captured.inputs.values()]
        values = exported.values(exported.part(nodes), arguments, buffers, key)
        self.inputs = dict(zip(captured.inputs, values, strict=True))

    def _trained(self) -> Iterator[str]:
        return (tensor.name for tensor in self.traced.block.parameters)

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that the block reads: weights, inputs, and the gradients of the results."""
        dims, laid_out = self.traced.dims, dict[str, Array]()
        tensors = {name: self.parameters[path] for name, path in self.captured.parameters.items()}
        tensors |= {**self.inputs, **{name: self.arguments[name] for name in dims if name in self.arguments}}
        for name, tensor in tensors.items():
            laid_out[name] = self._laid_out(name, dims[name], tensor)
        for place, seed in self.seeds.items():
            tensor, positions = self.traced.results[place]
            array = self._laid_out(tensor, positions, seed)
            laid_out[f"d.{tensor}"] = laid_out.get(f"d.{tensor}", 0) + array
        return {**laid_out, **{f"{name}.grad": np.zeros_like(laid_out[name]) for name in self._trained()}}

    def compare(self, program: Program, mesh: Mesh) -> list[ComparedTensor]:
        """Run a program of the block on virtual ranks; compare results and gradients with the module's own."""
        block = self.traced.block
        values = Interpreter(block=block, mesh=mesh, sizes=self.traced.sizes).run(program, self.arrays())
        # Some gradients are zero but for rounding, as those of keys' biases: the largest of all is the measure.
        largest = max(
            (float(gradient.abs().max()) for gradient in self.gradients.values() if gradient.numel()), default=0.0
        )
        compared: list[ComparedTensor] = []
        for place, (tensor, positions) in self.traced.results.items():
            expected = self._laid_out(tensor, positions, self.results[place])
            compared.append(_compared(place, values[tensor], expected, float(np.abs(expected).max(initial=0.0))))
        for name, gradient in self.gradients.items():
            whose = block.given_back(name) if name in block.takes else f"{name}.sum"
            compared.append(
                _compared(whose, values[whose], self._laid_out(name, self.traced.dims[name], gradient), largest)
            )
        return compared

    def _laid_out(self, name: str, positions: Positions, tensor: torch.Tensor) -> Array:
        """Lay a tensor of torch out along the dims of the block's tensor of that name."""
        dims = [dim for position in positions for dim in position]
        array = tensor.detach().numpy().reshape([self.traced.sizes[dim] for dim in dims])
        return array.transpose([dims.index(dim) for dim in self.traced.block.tensors[name].dims])


def _compared(name: str, ours: Array, expected: Array, measure: float) -> ComparedTensor:
    return ComparedTensor(name=name, error=float(np.abs(ours - expected).max(initial=0.0)) / (measure or 1.0))
