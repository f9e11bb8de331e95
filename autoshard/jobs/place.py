"""Where a job runs: the options of every scheduler, each of which says which of them it needs and takes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from posixpath import normpath
from typing import Literal

from autoshard.errors import require
from autoshard.jobs.quoting import path_faults

_TIME = "minutes, hours:minutes:seconds or days-hours, and not 0"
_TIMES = (
    (r"(\d+)(?::([0-5]\d))?", (60, 1)),
    (r"(\d+):([0-5]\d):([0-5]\d)", (3600, 60, 1)),
    (r"(\d+)-([01]?\d|2[0-3])(?::([0-5]\d))?(?::([0-5]\d))?", (86400, 3600, 60, 1)),
)
_PROFILES: Mapping[str, tuple[str, ...]] = {  # HyperPod starts jobs of Kubernetes again that are PyTorchJobs
    "slurm": ("plain", "hyperpod", "parallelcluster"),
    "k8s": ("trainjob", "pytorchjob", "hyperpod"),
    "torchrun": ("",),
}
FILES_AT, MEMORY_AT = "/job", "/dev/shm"  # where a container of Kubernetes has the job's files, and shared memory
_OF_CONTAINER = rf"/+(({FILES_AT[1:]}|dev|proc|sys)(/.*)?)?"  # a volume here would hide what it needs
_CLAIM = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"  # DNS-1123 subdomain
TO_SBATCH = ("account", "qos", "reservation", "exclude")  # options that go to sbatch under their own names
_TAKES: Mapping[str, tuple[str, ...]] = {
    "slurm": ("profile", "partition", "time", "on_failure", *TO_SBATCH, "container_image", "container_mounts"),
    "k8s": ("profile", "image", "claim", "mount"),
    "torchrun": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """Where a job runs, as its scheduler wants to be told.

    Args:
        scheduler: What starts the nodes; torchrun: you do.
        profile: What kind of cluster: slurm plain, hyperpod or parallelcluster; k8s trainjob (Kubeflow Trainer v2),
            pytorchjob (the operator before it) or hyperpod. Default: the first of the scheduler's.
        partition: Of slurm: the partition. Default: the cluster's own.
        time: Of slurm: the longest time of a job, e.g. 2-00:00:00; a run that needs more is queued again.
        on_failure: Of slurm: requeue, or replan: where fewer nodes are left than the plan needs, submit a plan for
            those. Default: requeue.
        account: Of slurm: who pays.
        qos: Of slurm: the quality of service.
        reservation: Of slurm: the reservation whose nodes are used.
        exclude: Of slurm: nodes that are not used, e.g. trn-3,trn-[7-8].
        container_image: Of slurm with pyxis: the container in which nodes work, with torchrun and autoshard in it.
        container_mounts: Of slurm with pyxis: what is mounted there besides the folder of the job, e.g. /fsx:/fsx.
        image: Of k8s: the container image, with torchrun and autoshard in it.
        claim: Of k8s: the persistent volume claim that all nodes share.
        mount: Of k8s: where that volume is mounted. Default: /fsx.
    """

    scheduler: Literal["slurm", "k8s", "torchrun"]
    profile: Literal["plain", "hyperpod", "parallelcluster", "trainjob", "pytorchjob"] | None = None
    partition: str | None = None
    time: str | None = None
    on_failure: Literal["requeue", "replan"] | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    container_image: str | None = None
    container_mounts: str | None = None
    image: str | None = None
    claim: str | None = None
    mount: str | None = None

    def __post_init__(self) -> None:
        """Refuse options that this scheduler has no use for, demand those that it needs, and check what is given."""
        given = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) is not None}
        needs = ("image", "claim") if self.scheduler == "k8s" else ()
        used = ("scheduler", *_TAKES[self.scheduler])
        require(
            *((name in given, name, f"missing, and {self.scheduler} needs it") for name in needs),
            *((name in used, name, f"says nothing to {self.scheduler}. Leave it out") for name in given),
        )
        profiles, whose = _PROFILES[self.scheduler], "Slurm's" if self.scheduler == "slurm" else "Kubernetes'"
        forms = {
            "claim": (_CLAIM, "the name of a claim"),
            "image": (r"\S+", "the name of an image"),
            "mount": ("/[^:]*", "a folder from / on, without a colon"),
            **dict.fromkeys(("partition", "account", "qos", "reservation"), (r"[\w.,+-]+", "a name")),
            "exclude": (r"[\w.,\[\]-]+", "names of nodes, like trn-3,trn-[7-8]"),
            "container_image": (r"[\w.,:/@#+-]+", "an image, like registry#name:tag, or a .sqsh file"),
            "container_mounts": (r"/[\w.,:/@+-]*", "folders, like /fsx:/fsx,/data"),
        }
        alone = self.container_mounts is None or self.container_image is not None
        minutes = self.time is None or limit_s(self.time) or 0
        mount = normpath(self.mount or "/fsx")
        replaces = self.on_failure == "replan" and self.profile == "hyperpod"
        require(
            (self.kind in profiles, "profile", f"{self.profile!r} is none of {whose}: {', '.join(profiles)}"),
            (bool(minutes), "time", f"must be {_TIME}, not {self.time!r}. Leave it out for the partition's own"),
            (alone, "container_mounts", "mounts into a container. Name that too: --container-image"),
            (not replaces, "on_failure", "hyperpod replaces nodes that are lost. Leave it out"),
            (not re.fullmatch(_OF_CONTAINER, mount), "mount", f"{mount} is the container's own. Choose one like /fsx"),
            *((False, "mount", message) for message in path_faults(given.get("mount", "/"))),
            *((bool(re.fullmatch(form, given.get(name, ""))), name, f"must be {what}, not {given.get(name)!r}")
              for name, (form, what) in forms.items() if name in given),
        )  # fmt: skip

    @property
    def limit_s(self) -> int | None:
        """The longest time of a job in seconds; None if nobody says."""
        return None if self.time is None else limit_s(self.time)

    @property
    def kind(self) -> str:
        """The profile: the one that is given, or the first of the scheduler's."""
        return self.profile or _PROFILES[self.scheduler][0]

    @property
    def volume(self) -> str | None:
        """Where the volume is mounted that all containers of a job share; None where there are no containers."""
        return (self.mount or "/fsx") if self.scheduler == "k8s" else None


def limit_s(text: str) -> int | None:
    """Return the seconds of a time limit as sbatch's manual writes it; None if it is none, or 0, which means no limit.

    >>> [limit_s(text) for text in ("90", "90:30", "2:00:00", "2-00", "1-12:30:00")]
    [5400, 5430, 7200, 172800, 131400]
    >>> [limit_s(text) for text in ("0", "0:00", "soon", "1-25:99:99", "1:60:00", "1-24")]
    [None, None, None, None, None, None]
    """
    for form, seconds in _TIMES:
        if match := re.fullmatch(form, text, re.ASCII):
            return sum(int(part or 0) * factor for part, factor in zip(match.groups(), seconds, strict=True)) or None
    return None
