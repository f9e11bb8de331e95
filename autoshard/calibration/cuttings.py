"""How the blocks of measured runs are cut: the layouts of one question at once, as columns of one problem.

A sweep asks the same about hundreds of layouts, and solving each on its own takes most of the time of a validation.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from autoshard.blocks.cutting import Meshes, Terms, shared_cuttings
from autoshard.calibration.measured_run import MeasuredRun
from autoshard.cost.calibration import Calibration
from autoshard.cost.collective import Ring
from autoshard.cost.setting import Question
from autoshard.errors import InputError
from autoshard.layout.layout import Cutting
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.lowering import ATOMS
from autoshard.search.bound.mesh_columns import ring_column
from autoshard.search.bound.request import Request

CalibratedRun = tuple[MeasuredRun, Calibration]
_MOST_COLUMNS = 64  # of one problem: its tables have an entry for each, so that more of them take more memory


def run_request(run: MeasuredRun, calibration: Calibration) -> Request:
    """Return the question whose answer a run was."""
    return Request(
        model=run.model,
        cluster=run.cluster,
        workload=run.workload,
        engines=(run.cluster.engine,),
        calibration=calibration,
    )


def run_cuttings(questions: Iterable[CalibratedRun]) -> Mapping[CalibratedRun, Cutting]:
    """Return the cheapest cutting of every run under its constants, but of runs that have none."""
    groups: dict[tuple[Question, Terms, object], list[CalibratedRun]] = defaultdict(list)
    for run, calibration in dict.fromkeys(questions):
        question = run_request(run, calibration).question(run.candidate)
        # Slots of experts may be cut otherwise where ep, or cp, cuts something.
        kind = (run.candidate.ep > 1, run.candidate.cp > 1) if run.model.num_experts else ()
        groups[question, Terms.of(run.candidate, run.cluster.engine), kind].append((run, calibration))
    cuttings: dict[CalibratedRun, Cutting] = {}
    for (question, terms, _), members in groups.items():
        for start in range(0, len(members), _MOST_COLUMNS):
            batch = members[start : start + _MOST_COLUMNS]
            with suppress(InputError):  # whoever predicts the runs one by one says of which, and why
                meshes = _columns(question, [run.candidate for run, _ in batch])
                for cutting, columns in shared_cuttings(question, meshes, (terms, 0.0), lambda: None):
                    cuttings |= {batch[column]: cutting for column in columns.tolist()}
    return cuttings


def _columns(question: Question, candidates: list[Candidate]) -> Meshes:
    meshes = [mesh_of(candidate, question.model, question.cluster) for candidate in candidates]
    at_once = np.array([candidate.mbs * candidate.dp for candidate in candidates])

    def ring(atoms: tuple[str, ...]) -> Ring:
        return ring_column([question.ring(mesh, atoms) for mesh in meshes])

    return Meshes(
        atoms={atom: np.array([mesh.size(atom) for mesh in meshes]) for atom in ATOMS},
        num_sequences=at_once,
        num_micro_batches=np.maximum(1, question.workload.global_batch // at_once),
        ring=ring,
    )
