"""``autoshard verify``: check that a plan can run, and prove that its sharding is right."""

from pathlib import Path

from autoshard.commands.output import print_answer
from autoshard.cost.predict import check_plan
from autoshard.plan.codec import load
from autoshard.plan.proof import prove
from autoshard.plan.verify import notices
from autoshard.report.structured import rejection_json
from autoshard.report.terminal import proof_report, rejections_report
from autoshard.spec.record import encode


def verify(plan: Path, json: bool = False) -> int:
    """Print every reason why a plan file cannot run; if there is none, prove that its sharding computes the same.

    The proof executes a shrunk plan on virtual ranks, with the collectives of the plan's own table, and compares loss
    and every gradient with the unsharded model. Exit code 1 if the plan cannot run, or if a result differs.

    Args:
        plan: The plan file.
        json: Print one JSON object instead of text.
    """
    checked = check_plan(load(plan))
    current, rejections = checked.plan, checked.rejections
    remarks = [*([checked.remark] if checked.remark else []), *notices(current)]
    proof = prove(current) if current.strategies and not rejections else None
    if json:
        reasons = [rejection_json(entry) for entry in rejections]
        print_answer({"rejections": reasons, "notices": remarks, "proof": encode(proof)})
    else:
        may_run = f"{plan}: {current.candidate} may run on {current.cluster.name} with engine {current.engine}"
        print_answer(rejections_report(rejections) if rejections else may_run)
        if proof:
            print_answer(proof_report(proof))
        for remark in remarks:
            print(f"note: {remark}")
    return 1 if rejections or (proof and not proof.holds) else 0
