"""``autoshard verify``: check that a plan can run, and prove that its sharding is right."""

from collections.abc import Iterator
from pathlib import Path

from autoshard.command_line.options import DEFAULT_PLAN
from autoshard.commands.output import print_answer
from autoshard.cost.predict import check_plan
from autoshard.errors import inside, require
from autoshard.plan.codec import load
from autoshard.plan.module_plan import is_module_plan, load_module_plan
from autoshard.plan.plan import Plan
from autoshard.plan.proof import Proof, prove
from autoshard.plan.rules.rule import Rejection
from autoshard.plan.verify import notices, unrun_code
from autoshard.report.plan_sheets import proof_sheet, rejections_sheet
from autoshard.report.structured import rejection_json
from autoshard.spec.record import encode


def verify(plan: Path = DEFAULT_PLAN, module: str | None = None, json: bool = False) -> int:
    """Print every reason why a plan file cannot run; if there is none, prove that its sharding computes the same.

    The proof executes a shrunk plan on virtual ranks, with the collectives of the plan's own table, and compares loss
    and every gradient with the unsharded model. Of a plan that executes a decoder's own code, so do the blocks of that
    code, as far as they are small enough. Exit code 1 if the plan cannot run, or if a result differs.

    Args:
        plan: The plan file.
        module: FILE.py:FUNCTION. For the plan of a torch module, which returns the module and its example inputs; for
            the plan of a decoder that was read off its code, the decoder: is its code still what was planned?
        json: Print one JSON object instead of text.
    """
    if is_module_plan(plan):
        return _verify_module(plan, module, json=json)
    checked = check_plan(load(plan), to_run=True)
    current = checked.plan
    rejections = (*checked.rejections, *(_code_rejections(current, module) if module else ()))
    remarks = [*([checked.remark] if checked.remark else []), *notices(current)]
    proof = prove(current) if current.strategies and not rejections else None
    of_code = _code_proof(current, remarks) if proof else None
    if json:
        more = {"code": encode(of_code)} if of_code else {}
        reasons = [rejection_json(entry) for entry in rejections]
        print_answer({"rejections": reasons, "notices": remarks, "proof": encode(proof), **more})
    else:
        may = "is legal" if unrun_code(current) else "may run"
        may_run = f"{plan}: {current.candidate} {may} on {current.cluster.name} with engine {current.engine}"
        print_answer([rejections_sheet(rejections)] if rejections else may_run)
        for shown in filter(None, (proof, of_code)):
            print_answer([proof_sheet(shown)])
        for remark in remarks:
            print(f"note: {remark}")
    return 1 if rejections or not all(entry.holds for entry in (proof, of_code) if entry) else 0


def _code_proof(plan: Plan, remarks: list[str]) -> Proof | None:
    """Prove the layouts of the code that a run executes; where that is too large, add a remark."""
    if plan.code is None or plan.code.unrun:
        return None
    from autoshard.modules.training.proving import prove_code

    proof = prove_code(plan)
    if isinstance(proof, Proof):
        return proof
    remarks.append(f"code: its layouts are not proven here: {proof}")
    return None


def _code_rejections(plan: Plan, module: str) -> Iterator[Rejection]:
    """Say where a decoder's code is no longer what a plan was made for."""
    from autoshard.modules.decoder.reading import decoder_of

    source = "derived: a plan holds for the code that it was made for"
    for difference in plan.model.differences(decoder_of(module, plan.workload.seq_len)):
        message = f"model: the code of {module} has changed: {difference}. Plan again"
        yield Rejection(rule_id="plan-code", message=message, source=source)


def _verify_module(path: Path, module: str | None, *, json: bool) -> int:
    """Trace a module, execute the lines of its plan on virtual ranks in FP64, and compare with torch's own numbers."""
    from autoshard.modules.verifying import BAR, prove_module_plan

    require((module is not None, "--module", "is missing: FILE.py:FUNCTION that returns the module and its inputs"))
    with inside(path):
        proofs = prove_module_plan(load_module_plan(path), str(module))
    worst = max(proofs, key=lambda proof: proof.error)
    holds = worst.error <= BAR
    if json:
        print_answer({"holds": holds, "tensors": [encode(proof) for proof in proofs]})
    else:
        said = "equal those" if holds else "differ from those"
        most = f"{worst.name} differs by {worst.error:.1e}"
        print_answer(f"{path}: {len(proofs)} results and gradients {said} of the module; {most}")
    return 0 if holds else 1
