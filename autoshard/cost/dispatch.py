"""How many copies of a token are sent where each node, and each rank, with experts of its choice gets one."""

from dataclasses import dataclass
from math import comb

from autoshard.spec.kernels import Kernels
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_parts import Router


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoices:
    """How many experts a token chooses, of how many; all are equally likely. It may choose within a few groups only."""

    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1

    @classmethod
    def of(cls, model: ModelSpec) -> "ExpertChoices":
        """Return how a model's router chooses."""
        router = model.router or Router()
        return cls(
            experts=model.num_experts,
            chosen=model.experts_per_token,
            groups=router.groups,
            chosen_groups=router.chosen_groups,
        )

    def reach(self, parts: int) -> float:
        """Return the chance that a token chooses an expert of the first part, where all lie in so many equal parts.

        >>> ExpertChoices(experts=4, chosen=1).reach(2), ExpertChoices(experts=4, chosen=2).reach(4)
        (0.5, 0.5)
        >>> ExpertChoices(experts=8, chosen=2, groups=4, chosen_groups=1).reach(4)
        0.25
        """
        size = self.experts // self.groups
        whole, rest = divmod(max(1, self.experts // parts), size)  # groups in the part, and experts beside them
        split = min(1, rest)  # whether a group lies in two parts
        others, candidates = self.groups - whole - split, self.chosen_groups * size
        missed = 0
        for of_whole in range(min(whole, self.chosen_groups) + 1):
            for of_split in range(split + 1):
                if (of_others := self.chosen_groups - of_whole - of_split) >= 0:
                    ways = comb(whole, of_whole) * comb(split, of_split) * comb(others, of_others)
                    missed += ways * comb(candidates - of_whole * size - of_split * rest, self.chosen)
        return 1 - missed / (comb(self.groups, self.chosen_groups) * comb(candidates, self.chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSends:
    """How a library sends tokens to experts: once to each node, and from there once to each rank with some of them."""

    choices: ExpertChoices
    near_efficiency: float  # of the links inside a node
    far_efficiency: float

    @classmethod
    def of(cls, model: ModelSpec, kernels: Kernels) -> "TokenSends | None":
        """Return how a program sends a model's tokens; None if it sends each row alone."""
        if not (model.num_experts and kernels.sends_tokens):
            return None
        near, far = kernels.token_links["node"], kernels.token_links["cluster"]
        return cls(choices=ExpertChoices.of(model), near_efficiency=near, far_efficiency=far)

    def shares(self, nodes: int, per_node: int) -> tuple[float, float]:
        """Return what a rank sends inside its node, and to other nodes, as shares of the rows of its tokens.

        Inside its node it sends its own tokens, and those that it has received from other nodes.
        """
        near = nodes * (per_node - 1) * self.choices.reach(nodes * per_node)
        return near / self.choices.chosen, (nodes - 1) * self.choices.reach(nodes) / self.choices.chosen
