"""A job: a plan, what the run does beside it, and where it runs; its files are text made of these."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard.cost.storage import stopping
from autoshard.errors import require
from autoshard.extensions import EXTENSIONS
from autoshard.jobs.place import JobPlace
from autoshard.jobs.quoting import folder_word, path_faults, remark, shell_faults
from autoshard.plan.codec import dump, plan_hash
from autoshard.plan.plan import Plan
from autoshard.spec.cluster import LOCAL
from autoshard.spec.files import yaml_of
from autoshard.spec.record import encode
from autoshard.spec.training import Training
from autoshard.units import counted

PLAN, TRAINING, NODE, SUBMIT = "plan.json", "training.yaml", "node.sh", "submit.sh"
FIRST, STRICT = "#!/usr/bin/env bash", "set -euo pipefail"  # of scripts
HERE = """CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")\""""  # a CDPATH would lead to a folder of the same name
_LONGEST_NAME = 40  # Kubernetes adds to it, and a host's name has 63 characters
_ENDING_S = 60  # for torchrun, srun or a pod to end when its ranks have
_DIGITS = 12  # of the plan's hash, where it is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A plan with its training and its place: all that the files of any scheduler are made of."""

    name: str
    plan: Plan
    training: Training
    place: JobPlace
    run: str  # the folder of the run, as the nodes see it; relative to the folder of the job
    setup: str = ""  # a line of shell that makes torchrun and autoshard known on a node

    def __post_init__(self) -> None:
        """Refuse names that a scheduler would not take, and shell of several lines."""
        named = re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) and len(self.name) <= _LONGEST_NAME
        rule = f"must have small letters, digits and dashes, begin with a letter, and at most {_LONGEST_NAME} of them"
        require((bool(named), "--name", f"{rule}, not {self.name!r}"))  # alone: the folder of the run may hold it
        require(
            *((False, "--setup", message) for message in shell_faults(self.setup)),
            *((False, "--run-folder", message) for message in path_faults(self.run)),
        )

    @property
    def compiles(self) -> bool:
        """Whether graphs are compiled before the run: Neuron's are, of the torch engine none."""
        return self.plan.engine == "nxd"

    @property
    def num_nodes(self) -> int:
        """Nodes of the plan's cluster."""
        return self.plan.cluster.num_nodes

    @property
    def hash(self) -> str:
        """The plan's hash, as its own prediction carries it."""
        return plan_hash(self.plan)

    @property
    def stopping_s(self) -> int:
        """How long the ranks may take to end a step and save it, after SIGTERM."""
        grace_s = self.training.checkpoint.grace_seconds
        return stopping(self.plan).reserved_s if grace_s is None else math.ceil(grace_s)

    @property
    def notice_s(self) -> int:
        """Seconds that the processes of the ranks need between SIGTERM and their kill."""
        return self.stopping_s + _ENDING_S

    @property
    def run_word(self) -> str:
        """The folder of the run as a word of a script that runs in the folder of the job."""
        return folder_word(self.run)

    @property
    def instance_type(self) -> str | None:
        """The name of the node type at the cloud; None if the cluster does not state it."""
        name = self.plan.cluster.name
        return name if re.fullmatch(r"(trn|p)\d\w*(-\w+)?\.\d+xlarge", name) else None

    @property
    def accelerator(self) -> Literal["neuron", "gpu", "none"]:
        """The kind of accelerator of a node."""
        if self.plan.cluster.platform:
            return "neuron"
        return "none" if self.plan.cluster.chip.name == "cpu" else "gpu"

    def title(self, what: str) -> Iterator[str]:
        """Yield the comment that every file begins with."""
        plan, cluster = self.plan, self.plan.cluster
        nodes = "this machine" if cluster.name == LOCAL else f"{cluster.num_nodes} x {cluster.name}"
        yield f"# {what} Made by autoshard launch."
        line = f"{plan.model.name} on {nodes}, {counted(cluster.ranks_per_node, 'rank')} on a node: {plan.candidate}"
        yield f"# {remark(line)}"  # a plan may have been edited
        yield f"# Plan {self.hash[:_DIGITS]}, of which plan.json in this folder has the rest."

    def common_texts(self) -> dict[str, str]:
        """Return the files under every scheduler: the plan, the options of the run, the user's own code."""
        options = {"steps": self.training.steps, **_differing(encode(self.training), encode(Training()))}
        options |= {"extend": [path.name for path in EXTENSIONS.files]} if EXTENSIONS.files else {}
        title = self.title("What the run does beside its plan: options of autoshard run.")
        extensions = {path.name: path.read_text(encoding="utf-8") for path in EXTENSIONS.files}
        return {PLAN: dump(self.plan), TRAINING: "\n".join([*title, yaml_text(options)]), **extensions}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of a job by their names, and what is typed next."""

    texts: Mapping[str, str] = field(hash=False)
    submitter: str | None = None  # the program that SUBMIT calls, if there is something to submit


def default_name(plan: Plan) -> str:
    """Name a job after its model and its plan, so that two plans of a model do not meet."""
    model = re.sub("[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    name = model if model[:1].isalpha() else f"model-{model}"  # of 01-yi, or without a Latin letter
    return f"{name[: _LONGEST_NAME - 7].rstrip('-')}-{plan_hash(plan)[:6]}"


def yaml_text(data: object) -> str:
    """Write YAML in short lines."""
    return yaml_of(json.loads(json.dumps(data)), width=110, flow=None)


def _differing(options: Any, usual: Any) -> dict[str, Any]:
    """Return the options that are not at their default; of sections, those inside."""
    differing: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict) and isinstance(usual[name], dict) and usual[name]:
            inside = _differing(value, usual[name])
            differing |= {name: inside} if inside else {}
        elif value != usual[name]:
            differing[name] = value
    return differing
