"""A plan file checked: every reason against it, with a prediction that is about it."""

from dataclasses import dataclass, replace

from autoshard.cost.calibration import Calibration
from autoshard.cost.predict import predicted
from autoshard.cost.provenance import calibration_entries, term_entries, term_seconds
from autoshard.cost.terms import outer_point, user_terms
from autoshard.plan.codec import fingerprint
from autoshard.plan.plan import Plan
from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.rule import Rejection
from autoshard.plan.verify import verify

_EDITED = "prediction: the plan was edited after it was made, so it was predicted again here"
_OTHER = "prediction: the numbers in the file are not what this version predicts; its own are used here"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """A plan with its prediction, if it has a shape; the reasons against it; and what became of the stored numbers."""

    plan: Plan
    rejections: tuple[Rejection, ...]
    remark: str = ""


def check_plan(read: Plan, calibration: Calibration | None = None) -> CheckedPlan:
    """Check a plan with the constants that it carries, or with others, which it carries from then on.

    It gets a new prediction where the plan or its numbers were edited.
    """
    if calibration:
        others = {key: entry for key, entry in read.provenance.items() if not key.startswith("calibration")}
        read = replace(read, provenance={**others, **calibration_entries(calibration)}, prediction=None)
    known = [term for term in user_terms() if term.part in read.provenance]
    if known and read.prediction and read.prediction.of != fingerprint(read):  # edited: so are the seconds of its terms
        facts = read.model, read.cluster, read.workload, read.engine
        own = term_entries(known, Columns.of(outer_point(read.candidate), *facts))
        read = replace(read, provenance={**read.provenance, **own})
    bare, stored = replace(read, prediction=None), read.prediction
    reasons = verify(bare)
    if reasons:
        return CheckedPlan(plan=bare, rejections=reasons)
    current, remarks = predicted(bare), list[str]()
    if stored is None or stored.of != fingerprint(read):
        remarks.append(_EDITED)
    elif stored != current.prediction:
        remarks.append(_OTHER)
    unknown = term_seconds(current.provenance).keys() - {term.part for term in user_terms()}
    names = ", ".join(sorted(unknown))
    if names:
        remarks.append(f"{names}: not known here, so its seconds are those that the plan states")
    return CheckedPlan(plan=current, rejections=verify(current), remark="; ".join(remarks))
