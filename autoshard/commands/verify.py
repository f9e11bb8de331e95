"""``autoshard verify``: why a plan cannot run, and proof that its sharding is right."""

from pathlib import Path

from autoshard.commands.output import print_json


def verify(plan: Path, json: bool = False) -> int:
    """Say every reason why a plan file cannot run, and prove by execution that its sharding computes the same.

    A shrunk plan runs on virtual ranks, with the collectives of the plan's own table; loss and every gradient are
    compared with the unsharded model. Exit code 1 if there is a reason, or a difference.

    Args:
        plan: The plan file.
        json: Print one JSON object instead of text.
    """
    from autoshard.cost.checked import check_plan
    from autoshard.plan.codec import load
    from autoshard.plan.proof import prove
    from autoshard.plan.verify import notices
    from autoshard.report.structured import rejection_json
    from autoshard.report.terminal import make_console, proof_report, rejections_report
    from autoshard.spec.record import encode

    checked = check_plan(load(plan))
    current, rejections = checked.plan, checked.rejections
    remarks = [*([checked.remark] if checked.remark else []), *notices(current)]
    proof = prove(current) if current.strategies and not rejections else None
    failed = bool(rejections) or (proof is not None and not proof.holds)
    if json:
        reasons = [rejection_json(entry) for entry in rejections]
        print_json({"rejections": reasons, "notices": remarks, "proof": encode(proof)})
        return 1 if failed else 0
    if rejections:
        make_console().print(rejections_report(rejections))
    else:
        print(f"{plan}: {current.candidate} may run on {current.cluster.name} with engine {current.engine}")
    if proof:
        make_console().print(proof_report(proof))
    for remark in remarks:
        print(f"note: {remark}")
    return 1 if failed else 0
