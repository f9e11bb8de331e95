"""A pipeline rank as a row of a drawn step, on a page and in a trace: where it lies, and which actions are drawn."""

from dataclasses import dataclass

from autoshard.cost.timeline import Pass, RankTimeline, StepTimeline
from autoshard.plan.plan import Plan
from autoshard.report.words import nodes_of
from autoshard.units import counted

PASSES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def rank_words(plan: Plan, number: int) -> str:
    """Say how many ranks do the same as one of a pipeline, and where they are."""
    nodes = nodes_of(plan, range(number, number + 1))
    where = nodes if nodes.endswith("nodes") else f"node{'s' if '-' in nodes else ''} {nodes}"
    return f"pipeline rank {number} ({counted(len(plan.mesh.ranks_of({'pp': number})), 'rank')} on {where})"


@dataclass(frozen=True, slots=True)
class RankRow:
    """The actions of a pipeline rank, of which ``keep`` at each end are drawn one by one."""

    step: StepTimeline
    number: int
    keep: int

    @property
    def rank(self) -> RankTimeline:
        """What the rank does."""
        return self.step.ranks[self.number]

    @property
    def left_out(self) -> range:
        """The positions between the ends; a single one is drawn as well."""
        total = len(self.rank.kinds)
        return range(self.keep, total - self.keep) if total - 2 * self.keep > 1 else range(0)

    @property
    def positions(self) -> list[int]:
        """The positions of the actions that are drawn."""
        left_out = self.left_out
        return [position for position in range(len(self.rank.kinds)) if position not in left_out]

    def action(self, position: int) -> tuple[str, int, int]:
        """Return the kind, the stage and the micro-batch of an action."""
        return self.rank.kinds[position], int(self.rank.stages[position]), int(self.rank.micro_batches[position])

    def pass_of(self, position: int) -> Pass:
        """Return what an action takes, and with which ranks it exchanges messages."""
        return self.step.passes[self.action(position)[:2]]
