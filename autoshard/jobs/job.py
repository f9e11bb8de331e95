"""A job: a plan, what the run does beside it, and where it runs; its files are text made of these."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard.errors import require
from autoshard.extensions import EXTENSIONS
from autoshard.plan.codec import dump, fingerprint
from autoshard.plan.nxd.environment import between_nodes, environment
from autoshard.plan.plan import Plan
from autoshard.spec.cluster import LOCAL
from autoshard.spec.record import encode
from autoshard.spec.training import Training

Scheduler = Literal["slurm", "k8s", "torchrun"]
PLAN, TRAINING, NODE, SUBMIT = "plan.json", "training.yaml", "node.sh", "submit.sh"
_LONGEST_NAME = 40  # Kubernetes adds to it, and a host's name has 63 characters
_DIGITS = 12  # of the plan's hash, where it is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the files of every scheduler are made of."""

    name: str
    plan: Plan
    training: Training
    run: str  # the folder of the run, as the nodes see it; relative to the folder of the job
    setup: str = ""  # a line of shell that makes torchrun and autoshard known on a node

    def __post_init__(self) -> None:
        """Refuse names that a scheduler would not take, and shell of several lines."""
        named = re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) and len(self.name) <= _LONGEST_NAME
        rule = f"must have small letters, digits and dashes, begin with a letter, and at most {_LONGEST_NAME} of them"
        require(
            (bool(named), "--name", f"{rule}, not {self.name!r}"),
            ("\n" not in self.setup, "--setup", "must be one line. Put several commands into a script, and name that"),
            (not re.search(r"[\"$`\\\s]", self.run), "--run-folder", f"must be a plain path, not {self.run!r}"),
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
        return fingerprint(self.plan)

    @property
    def instance_type(self) -> str | None:
        """What the cloud calls a node; None where the cluster does not say."""
        name = self.plan.cluster.name
        return name if re.fullmatch(r"(trn|p)\d\w*(-\w+)?\.\d+xlarge", name) else None

    @property
    def accelerator(self) -> Literal["neuron", "gpu", "none"]:
        """What computes on a node."""
        if self.plan.cluster.engine == "nxd":
            return "neuron"
        return "none" if self.plan.cluster.chip.name == "cpu" else "gpu"

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment of a node: what the engine sets too, so that nothing depends on who sets it."""
        if self.plan.engine == "nxd":
            return environment(self.plan)
        return between_nodes(self.plan) if self.plan.cluster.links[-1].name.startswith("efa") else {}

    def title(self, what: str) -> Iterator[str]:
        """Yield the comment that every file begins with."""
        plan, cluster = self.plan, self.plan.cluster
        nodes = "this machine" if cluster.name == LOCAL else f"{cluster.num_nodes} x {cluster.name}"
        yield f"# {what} Made by autoshard launch."
        yield f"# {plan.model.name} on {nodes}, {cluster.ranks_per_node} ranks on a node: {plan.candidate}"
        yield f"# Plan {self.hash[:_DIGITS]}, of which plan.json in this folder has the rest."


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files of a job by their names, and what is typed next."""

    texts: Mapping[str, str] = field(hash=False)
    submitter: str | None  # the program that SUBMIT calls, if there is something to submit


def default_name(plan: Plan) -> str:
    """Name a job after its model and its plan, so that two plans of a model do not meet."""
    model = re.sub("[^a-z0-9]+", "-", plan.model.name.lower()).strip("-")
    return f"{model[: _LONGEST_NAME - 7].rstrip('-')}-{fingerprint(plan)[:6]}"


def common_texts(job: Job) -> dict[str, str]:
    """Return the files that jobs have under every scheduler: the plan, the options of the run, the user's own code."""
    extensions = {path.name: path.read_text(encoding="utf-8") for path in EXTENSIONS.files}
    return {PLAN: dump(job.plan), TRAINING: _training_text(job), **extensions}


def _training_text(job: Job) -> str:
    """Write what differs from the defaults of ``autoshard run``, as the options that it takes from a file."""
    options = {"steps": job.training.steps, **_differing(encode(job.training), encode(Training()))}
    options |= {"extend": [path.name for path in EXTENSIONS.files]} if EXTENSIONS.files else {}
    return "\n".join([*job.title("What the run does beside its plan: options of autoshard run."), yaml_text(options)])


def yaml_text(data: object) -> str:
    """Write YAML in the order given, without aliases."""
    import yaml

    plain: Any = json.loads(json.dumps(data))  # what is written twice is two objects
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=110)


def _differing(options: Any, usual: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict) and isinstance(usual[name], dict) and usual[name]:
            inside = _differing(value, usual[name])
            found |= {name: inside} if inside else {}
        elif value != usual[name]:
            found[name] = value
    return found
