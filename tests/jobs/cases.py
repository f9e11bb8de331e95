"""Jobs to write: what the vendor documents, in its own layout, by --fix, and as autoshard chooses."""

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from autoshard.command_line import Pins
from autoshard.commands.options import QuestionOptions, SearchOptions
from autoshard.commands.plan import searched
from autoshard.jobs.job import PLAN, Files, Job, JobPlace, default_name
from autoshard.jobs.kubernetes import kubernetes_files
from autoshard.jobs.shell import torchrun_files
from autoshard.jobs.slurm import slurm_files
from autoshard.plan.plan import Plan
from autoshard.spec.training import Training
from tests.engine.nxd.test_lowering import DOCUMENTED
from tests.plan.nxd.test_match import planned

Way = Literal["vendor", "fixed", "chosen"]
# What the vendor pins of each documented case; the rest of its layout is the planner's where it is only fixed.
FIXED: Mapping[str, str] = {
    "llama3-70b-16-trn1": "tp=32,pp=8,dp=2",
    "llama3-70b-16-trn1-cp2": "tp=32,pp=8,cp=2",
    "llama3-70b-8-trn2": "tp=32,pp=4,lnc=2",
    "llama2-70b-32-trn1-tp8": "tp=8,pp=8,dp=16",
    "llama2-70b-32-trn1-tp32": "tp=32,pp=4,dp=8",
    "llama2-13b-32-trn1": "tp=8,pp=4",
}
SLURM = ("slurm plain", "slurm hyperpod", "slurm parallelcluster")
SCHEDULERS = (*SLURM, "k8s trainjob", "k8s pytorchjob", "k8s hyperpod", "torchrun")
FIRST = "llama3-70b-16-trn1"


@cache
def plan_of(case: str, way: Way = "vendor") -> Plan:
    """The plan of a documented case, its ranks laid out in one of three ways."""
    vendor = planned(*DOCUMENTED[case])
    if way == "vendor":
        return vendor
    model, cluster, _, seq_len = DOCUMENTED[case][:4]
    options_of_question: dict[str, Any] = {"model": model, "cluster": cluster, "nodes": (vendor.cluster.num_nodes,)}
    fix = Pins(FIXED[case]) if way == "fixed" else Pins("cp=2") if "cp" in case else None
    options = SearchOptions()
    question = QuestionOptions(**options_of_question, seq_len=seq_len, global_batch=1024, fix=fix)
    return searched(question.requests(options)[0], 1, options).preferred


@cache
def gpu_plan() -> Plan:
    """A plan for two nodes of GPUs that EFA joins."""
    options = SearchOptions()
    question = QuestionOptions(
        model="llama3-8b", cluster="p5.48xlarge", nodes=(2,), global_batch=64, fix=Pins("tp=8,mbs=1")
    )
    return searched(question.requests(options)[0], 1, options).preferred


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
    hidden = re.compile(rf"{name[-6:]}\w*")
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
