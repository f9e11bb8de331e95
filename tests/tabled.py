"""Plans with their tables and blocks with their sharding, as the planner makes them, for tests of every floor."""

import functools

from autoshard.blocks.cutting import Terms, solved_cutting
from autoshard.cost.calibration import uncalibrated
from autoshard.cost.predict import question_of
from autoshard.cost.setting import Question
from autoshard.cost.sharded import CutBlocks
from autoshard.layout.layout import Cutting
from autoshard.plan.build import cut_atoms
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Engine
from autoshard.plan.tables import with_tables


@functools.cache
def cutting_of(question: Question, candidate: Candidate, engine: Engine) -> Cutting:
    """The best cutting of a candidate."""
    return solved_cutting(question, candidate, Terms.of(candidate, engine))


def blocks_of(question: Question, candidate: Candidate, engine: Engine) -> CutBlocks:
    """The blocks of a candidate with its best cutting."""
    cutting, atoms = cutting_of(question, candidate, engine), cut_atoms(candidate, question.model)
    return CutBlocks(step=question.step, cutting=cutting, atoms=atoms)


def tabled(plan: Plan) -> Plan:
    """The plan with the tables of its best cutting."""
    question = question_of(plan, uncalibrated())
    return with_tables(plan, cutting_of(question, plan.candidate, plan.engine))
