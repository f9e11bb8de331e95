"""A plan file judged: every reason against it, with a prediction that is about it."""

from dataclasses import dataclass, replace

from autoshard.cost.calibration import Calibration
from autoshard.cost.predict import predicted
from autoshard.cost.terms import stated_s
from autoshard.cost.worth import carried
from autoshard.plan.codec import fingerprint
from autoshard.plan.plan import Plan
from autoshard.plan.rules.rule import Rejection
from autoshard.plan.verify import verify

_EDITED = "prediction: the plan was edited after it was made, so it was predicted again here"
_OTHER = "prediction: the numbers in the file are not what this version predicts; its own are used here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan with its prediction, if it has a shape; the reasons against it; and what became of the stored numbers."""

    plan: Plan
    rejections: tuple[Rejection, ...]
    remark: str = ""


def judged(read: Plan, calibration: Calibration | None = None) -> Judged:
    """Judge a plan with the constants that it carries, or with others, which it carries from then on.

    It gets a new prediction where the plan or its numbers were edited.
    """
    if calibration:
        others = {key: said for key, said in read.provenance.items() if not key.startswith("calibration")}
        read = replace(read, provenance={**others, **carried(calibration)}, prediction=None)
    bare, stored = replace(read, prediction=None), read.prediction
    reasons = verify(bare)
    if reasons:
        return Judged(plan=bare, rejections=reasons)
    current = predicted(bare)
    remark = ""
    if stored is None or stored.of != fingerprint(read):
        remark = _EDITED
    elif stored != current.prediction:
        remark = _OTHER
    remarks = [text for text in (remark, _terms_remark(current)) if text]
    return Judged(plan=current, rejections=verify(current), remark="; ".join(remarks))


def _terms_remark(plan: Plan) -> str:
    """Say which of the predicted seconds nobody can compute again here."""
    names = stated_s(plan.provenance)
    return f"{', '.join(names)}: not known here, so its seconds are those that the plan states" if names else ""
