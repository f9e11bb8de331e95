"""Through which sums an operation lets pass, so that one Collective later sums them all."""

from dataclasses import dataclass

from autoshard.blocks.problem import OperatorProblem
from autoshard.graph.kinds.linear import Deliver
from autoshard.graph.op import Differentiable, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRule:
    """Through which sums an operation lets pass: its first input's, its result's gradient's; and on to which inputs."""

    forward: bool
    backward: bool
    into: frozenset[int]  # inputs whose gradients await what passed forward

    @classmethod
    def of(cls, op: Op, problem: OperatorProblem) -> "PassRule":
        """Read it off the kind and the kinds of its gradient."""
        assert isinstance(op.kind, Differentiable), f"{op.name}: {op.kind.label} stands in a forward pass"
        inputs = [problem.block.tensors[name] for name in op.inputs]
        roles = ("activation", "parameter")
        needed = [number for number, one in enumerate(inputs) if one.role in roles and one.dtype != "int64"]
        steps = [(step.kind, step) for step in op.kind.gradient(inputs, needed) if step.kind is not None]
        linear = [step for kind, step in steps if 0 in kind.linear_through() and step.reads[0] == "d0"]
        readers = [step for _, step in steps if "d0" in step.reads]
        into = {
            step.gives[output]
            for kind, step in steps
            for read, outputs in kind.linear_through().items()
            for output in outputs
            if step.reads[read] == "in0"
        }
        return cls(
            forward=0 in op.kind.linear_through() and inputs[0].role == "activation",
            backward=bool(linear) and len(linear) == len(readers) and not _settles(op, problem),
            into=frozenset(number for number in into if number is not None),
        )


def _settles(op: Op, problem: OperatorProblem) -> bool:
    """Whether the gradient of what an operation makes is summed before it comes back."""
    readers = (one for one in problem.block.select("micro_batch", "F") if one.inputs[0] in op.outputs)
    return any(isinstance(one.kind, Deliver) and one.kind.settles for one in readers)
