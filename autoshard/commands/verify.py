"""``autoshard verify``: check that a plan can run, and prove that its sharding is right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from autoshard.report.sheet import Fact, Sheet, Words
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
    checked = check_plan(load(plan), to_run=True, place=plan)
    current = checked.plan
    rejections = (*checked.rejections, *(_code_rejections(current, module) if module else ()))
    verdict = verdict_of(current, rejections, checked.remark)
    if json:
        print_answer(verdict.figures)
    else:
        print_answer(verdict.sheets(str(plan)))
    return 0 if verdict.holds else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan may run, and what of it was proven."""

    plan: Plan
    rejections: Sequence[Rejection]
    notices: Sequence[str]
    proof: Proof | None
    of_code: Proof | None

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the plan, and all that was executed computes the same."""
        return not self.rejections and all(proof.holds for proof in (self.proof, self.of_code) if proof)

    @property
    def figures(self) -> dict[str, Any]:
        """All that is said, as JSON data."""
        more = {"code": encode(self.of_code)} if self.of_code else {}
        reasons = [rejection_json(entry) for entry in self.rejections]
        proof = encode(self.proof)
        return {"holds": self.holds, "rejections": reasons, "notices": [*self.notices], "proof": proof, **more}

    def sheets(self, name: str) -> Iterator[Sheet]:
        """Yield why a plan, by its name, cannot run, or that it may; and what was proven."""
        plan = self.plan
        if self.rejections:
            yield rejections_sheet(self.rejections)
        else:
            may = "is legal on" if unrun_code(plan) else "may run on"
            place = (
                f"{plan.cluster.num_nodes} x {plan.cluster.name} with engine {plan.engine}: no Rule speaks against it"
            )
            yield Sheet(
                title=(Words(name, "strong"), f" {may} {place}"),
                facts=[Fact("layout", Words(str(plan.candidate), "code"))],
            )
        yield from map(proof_sheet, filter(None, (self.proof, self.of_code)))
        yield Sheet(notes=[Words(f"note: {remark}", "warning") for remark in self.notices])


def verdict_of(plan: Plan, rejections: Sequence[Rejection], remark: str = "") -> Verdict:
    """Prove a plan against which nothing speaks, and its code as far as that is small enough."""
    remarks = [*([remark] if remark else []), *notices(plan)]
    proof = prove(plan) if plan.strategies and not rejections else None
    of_code = _code_proof(plan, remarks) if proof else None
    return Verdict(plan=plan, rejections=rejections, notices=remarks, proof=proof, of_code=of_code)


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
