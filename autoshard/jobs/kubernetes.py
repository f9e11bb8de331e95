"""A job under Kubernetes: a TrainJob of Kubeflow Trainer v2, or a PyTorchJob of the training operator before it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.errors import require
from autoshard.extensions import EXTENSIONS
from autoshard.jobs.job import NODE, PLAN, SUBMIT, TRAINING, Files, Job, common_texts, yaml_text
from autoshard.jobs.shell import FIRST, HERE, STRICT, meeting_of, node_text

FILES_AT = "/job"  # where the files of the job lie in a container
_TRAINER = "trainer.kubeflow.org"
_MOST_RESTARTS = 20  # of all pods, in a job's life; autoshard refuses a sixth start without a newer checkpoint
# EFA devices of a node. cited: trn1 and trn1n: AWS Neuron docs 2.29, setup-trn1-multi-node-execution.rst; trn2:
# derived, 16 chips with 200 Gb/s each (neuron-runtime/about/collectives.rst); p4, p5, p6: aws-samples,
# awsome-distributed-training 7217859, 4.validation_and_observability/2.gpu-cluster-healthcheck/README.md.
_EFA: Mapping[str, int] = {
    "trn1.32xlarge": 8, "trn1n.32xlarge": 16, "trn2.48xlarge": 16, "trn2u.48xlarge": 16,
    "p4d.24xlarge": 4, "p4de.24xlarge": 4, "p5.48xlarge": 32, "p5en.48xlarge": 16, "p6-b200.48xlarge": 8,
}  # fmt: skip
# cited: awsome-distributed-training 7217859, 1.architectures/7.sagemaker-hyperpod-eks/task-governance, and for the
# names of instance types 3.test_cases/pytorch/neuronx-distributed/llama3/kubernetes.
_HYPERPOD = {
    "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
    "sagemaker.amazonaws.com/job-max-retry-count": str(_MOST_RESTARTS),
}
PROFILES = ("trainjob", "pytorchjob", "hyperpod")  # HyperPod starts jobs again that are PyTorchJobs


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesWants:
    """What the user says of the Kubernetes cluster."""

    image: str  # has torchrun and autoshard
    claim: str  # of the volume that all nodes share
    mount: str  # where it is mounted
    profile: str = "trainjob"

    def __post_init__(self) -> None:
        """Refuse what Kubernetes would not take."""
        named = re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", self.claim)
        require(
            (self.profile in PROFILES, "--profile", f"{self.profile!r} is none of Kubernetes': {', '.join(PROFILES)}"),
            (bool(named), "--claim", f"must be the name of a claim, not {self.claim!r}"),
            (self.mount.startswith("/"), "--mount", f"must be a folder from / on, not {self.mount!r}"),
            (not re.search(r"\s", self.image), "--image", f"must be the name of an image, not {self.image!r}"),
        )


def kubernetes_files(job: Job, wants: KubernetesWants) -> Files:
    """Return the files of a job under Kubernetes."""
    kind = "trainjob" if wants.profile == "trainjob" else "pytorchjob"
    texts = {**common_texts(job), NODE: node_text(job, meeting_of(job, "k8s", kind))}
    if kind == "trainjob":
        texts["job.yaml"] = _documents(job, "The job.", _runtime(job, wants), _train_job(job))
        submit = _submit(job, ["kubectl apply -f job.yaml"], "trainjob")
    else:
        if job.compiles:
            texts["compile.yaml"] = _documents(job, "The compile job.", _pytorch_job(job, wants, "compile"))
        texts["train.yaml"] = _documents(job, "The training job.", _pytorch_job(job, wants, "train"))
        first = list(_compiled_first(job)) if job.compiles else []
        submit = _submit(job, [*first, "kubectl apply -f train.yaml"], "pytorchjob")
    return Files(texts={**texts, SUBMIT: "\n".join(submit) + "\n"}, submitter="kubectl")


def _documents(job: Job, what: str, *documents: Mapping[str, Any]) -> str:
    return "\n".join([*job.title(what), "---\n".join(yaml_text(one) for one in documents)])


def _runtime(job: Job, wants: KubernetesWants) -> dict[str, Any]:
    """Say how pods look, and that training waits for compiling; node.sh needs no framework's environment."""

    def work(name: str, stage: str, **more: int) -> dict[str, Any]:
        pod = _pod(job, wants, stage, {"MASTER_ADDR": f"{job.name}-{name}-0-0.{job.name}"})
        return {"backoffLimit": 0, **more, "template": {"spec": {"restartPolicy": "Never", **pod}}}

    labels = {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}
    jobs: list[dict[str, Any]] = [
        {"name": "node", "template": {"metadata": {"labels": labels}, "spec": work("node", "train")}}
    ]
    if job.compiles:
        compiling = work("compile", "compile", parallelism=job.num_nodes, completions=job.num_nodes)
        jobs[0]["dependsOn"] = [{"name": "compile", "status": "Complete"}]
        jobs.insert(0, {"name": "compile", "template": {"spec": compiling}})
    spec = {"failurePolicy": {"maxRestarts": _MOST_RESTARTS}, "replicatedJobs": jobs}
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": {f"{_TRAINER}/framework": "torch"}},
        "spec": {"mlPolicy": {"numNodes": job.num_nodes}, "template": {"spec": spec}},
    }


def _train_job(job: Job) -> dict[str, Any]:
    reference = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": job.name}
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": job.num_nodes}},
    }


def _pytorch_job(job: Job, wants: KubernetesWants, stage: str) -> dict[str, Any]:
    name = f"{job.name}-compile" if stage == "compile" else job.name
    template = {"spec": _pod(job, wants, stage, {})}
    replicas = {"Master": 1, "Worker": job.num_nodes - 1}
    specs = {
        role: {"replicas": count, "restartPolicy": "OnFailure", "template": template}
        for role, count in replicas.items()
        if count
    }
    notes = {"annotations": _HYPERPOD} if wants.profile == "hyperpod" else {}
    policy = {"backoffLimit": _MOST_RESTARTS, "cleanPodPolicy": "Running"}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, **notes},
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": specs},
    }


def _pod(job: Job, wants: KubernetesWants, stage: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Describe the pod of a node: all of the node's accelerators, the files of the job, and the shared volume."""
    mounts = {"files": FILES_AT, "shared": wants.mount, "memory": "/dev/shm"}
    container = {
        "name": "node" if wants.profile == "trainjob" else "pytorch",
        "image": wants.image,
        "command": ["bash", f"{FILES_AT}/{NODE}", stage],
        **({"env": [{"name": name, "value": value} for name, value in variables.items()]} if variables else {}),
        "resources": {"limits": _devices(job)},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    volumes = [
        {"name": "files", "configMap": {"name": job.name}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": wants.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    kind = f"ml.{job.instance_type}" if wants.profile == "hyperpod" else job.instance_type
    selector = {"nodeSelector": {"node.kubernetes.io/instance-type": kind}} if job.instance_type else {}
    return {**selector, "containers": [container], "volumes": volumes}


def _devices(job: Job) -> dict[str, str]:
    """Count what device plugins hand out; nodes with one of them all belong to the job."""
    resource = {"neuron": "aws.amazon.com/neuron", "gpu": "nvidia.com/gpu", "none": "cpu"}[job.accelerator]
    found = {resource: str(job.plan.cluster.chips_per_node)}
    devices = _EFA.get(job.plan.cluster.name)
    if job.num_nodes > 1 and devices:
        found["vpc.amazonaws.com/efa"] = str(devices)
    return found


def _submit(job: Job, steps: list[str], kind: str) -> Iterator[str]:
    yield FIRST
    yield from job.title(f"Submits the job: bash {SUBMIT}. The files of the job go into a ConfigMap.")
    yield STRICT
    yield HERE
    sources = " ".join(
        f"--from-file={name}" for name in (NODE, PLAN, TRAINING, *(path.name for path in EXTENSIONS.files))
    )
    yield f"kubectl create configmap {job.name} {sources} --dry-run=client -o yaml | kubectl apply -f -"
    yield from steps
    label = "jobset.sigs.k8s.io/jobset-name" if kind == "trainjob" else "training.kubeflow.org/job-name"
    yield f'echo "training job: {kind}/{job.name}"'
    yield f'echo "watch: kubectl get {kind} {job.name} --watch"'
    yield f'echo "log: kubectl logs --follow --prefix --selector {label}={job.name} --max-log-requests {job.num_nodes}"'


def _compiled_first(job: Job) -> Iterator[str]:
    """Yield the wait for the compile job: a PyTorchJob cannot depend on another."""
    name = f"{job.name}-compile"
    state = '{.status.conditions[?(@.status=="True")].type}'
    yield "kubectl apply -f compile.yaml"
    yield f'echo "compile job: pytorchjob/{name}; the training job follows when it has ended well: leave this running"'
    yield "while true; do"
    yield f"  case $(kubectl get pytorchjob {name} -o jsonpath='{state}') in"
    yield "    *Succeeded*) break ;;"
    yield f'    *Failed*) echo "{name} failed: kubectl logs {name}-master-0" >&2; exit 1 ;;'
    yield "  esac"
    yield "  sleep 10"
    yield "done"
