"""Jobs to write: the cases that the vendor documents, each in three layouts."""

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args

from autoshard.jobs.job import PLAN, Files, Job, default_name
from autoshard.jobs.kubernetes import kubernetes_files
from autoshard.jobs.place import JobPlace
from autoshard.jobs.shell import torchrun_files
from autoshard.jobs.slurm import slurm_files
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.search.bound.request import plan_at
from autoshard.spec.training import Training
from tests.engine.nxd.test_lowering import DOCUMENTED
from tests.plan.nxd.test_match import planned
from tests.search.brute_force import ask

Way = Literal["vendor", "even", "uneven"]
# Layouts for the documented cases that are not the vendor's; no search chooses them, so that only jobs are compared.
OTHERS: Mapping[str, tuple[str, str]] = {
    "llama3-70b-16-trn1": (
        "tp=32,pp=8,dp=2,recompute=selective[LlamaRMSNorm]",
        "tp=8,pp=8,dp=8,recompute=full*5/selective[LlamaMLP,LlamaRMSNorm]*3,stages=9*2/10*4/11*2",
    ),
    "llama3-70b-16-trn1-cp2": (
        "tp=32,pp=8,cp=2,dp=1,recompute=selective[LlamaRMSNorm]",
        "tp=8,pp=16,cp=2,dp=2,recompute=selective[LlamaMLP,LlamaRMSNorm]*10/none*6",
    ),
    "llama3-70b-8-trn2": (
        "tp=32,pp=4,dp=4,recompute=selective[LlamaRMSNorm],lnc=2",
        "tp=16,pp=4,dp=8,recompute=selective[ActivationMultiplyMLP,LlamaRMSNorm],stages=18/21*2/20,lnc=2",
    ),
    "llama2-70b-32-trn1-tp8": (
        "tp=8,pp=8,dp=16,recompute=selective[LlamaMLP,LlamaRMSNorm]",
        "tp=8,pp=8,dp=16,recompute=selective[LlamaMLP,LlamaRMSNorm]*5/selective[LlamaRMSNorm]*3,stages=9/10*4/9/11*2",
    ),
    "llama2-70b-32-trn1-tp32": (
        "tp=32,pp=4,dp=8,recompute=selective[LlamaRMSNorm]",
        "tp=32,pp=4,dp=8,stages=19/21*2/19",
    ),
    "llama2-13b-32-trn1": ("tp=8,pp=4,dp=32", "tp=8,pp=4,dp=32,vp=2,schedule=interleaved,stages=4/5*2/6*2/5*2/4"),
}
SLURM = ("slurm plain", "slurm hyperpod", "slurm parallelcluster")
SCHEDULERS = (*SLURM, "k8s trainjob", "k8s pytorchjob", "k8s hyperpod", "torchrun")
FIRST = "llama3-70b-16-trn1"


@cache
def plan_of(case: str, way: Way = "vendor") -> Plan:
    """The plan of a documented case, its ranks laid out in one of three ways."""
    model, cluster, vendor, *more = DOCUMENTED[case]
    return planned(model, cluster, dict(zip(get_args(Way), (vendor, *OTHERS[case]), strict=True))[way], *more)


@cache
def gpu_plan() -> Plan:
    """A plan for two nodes of GPUs that EFA joins."""
    request = ask("llama3-8b", "p5.48xlarge", 2, global_batch=64)
    return plan_at(request, Candidate.parse("tp=8,pp=1,dp=2"))


def job_of(plan: Plan, under: str = "torchrun", *, replans: bool = False, **more: Any) -> Job:
    scheduler, _, profile = under.partition(" ")
    options: Mapping[str, Any] = {
        "slurm": {"time": "2-00:00:00", "partition": "training", "on_failure": "replan" if replans else None},
        "k8s": {"image": "registry.example/autoshard:1", "claim": "fsx"},
    }.get(scheduler, {})
    place: Any = {"scheduler": scheduler, "profile": profile or None, **options}
    usual = {"name": default_name(plan), "training": Training(steps=100), "place": JobPlace(**place), "run": "run"}
    return Job(**{"plan": plan, **usual, **more})


def files_of(job: Job) -> Files:
    return {"slurm": slurm_files, "k8s": kubernetes_files, "torchrun": torchrun_files}[job.place.scheduler](job)


def folder_text(files: Files, plan: Plan) -> dict[str, list[str]]:
    """The lines of a job's files, without the plan, whose own golden file is elsewhere, and without its hash."""
    name, texts = default_name(plan), {name: text for name, text in files.texts.items() if name != PLAN}
    hidden = re.compile(rf"{name[-6:]}\w*|\b[0-9a-f]{{64}}\b")
    return {file: hidden.sub("HASH", text).splitlines() for file, text in texts.items()}


def shown(folder: Mapping[str, list[str]]) -> str:
    return "\n".join(line for name, lines in folder.items() for line in (f"==== {name}", *lines, ""))


def difference(old: Mapping[str, list[str]], new: Mapping[str, list[str]]) -> str:
    """What one job has otherwise than another: only the lines that differ, and whole files that are new.

    What changes in every file is shown in the first.
    """
    seen = set[str]()

    def lines() -> Iterator[str]:
        for name in dict.fromkeys([*old, *new]):
            if name not in new:
                yield f"==== no {name}"
            elif name not in old:
                yield from (f"==== {name}", *new[name])
            elif old[name] != new[name]:
                yield f"==== {name}"
                for line in difflib.unified_diff(old[name], new[name], n=0, lineterm=""):
                    if not line.startswith(("---", "+++", "@@")) and line not in seen:
                        yield line
                        seen.update({line} if line[1:].startswith("# ") else ())

    return "\n".join(lines()) + "\n"
