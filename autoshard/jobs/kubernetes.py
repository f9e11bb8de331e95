"""A job under Kubernetes: a TrainJob of Kubeflow Trainer v2, or a PyTorchJob of the training operator before it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.errors import require
from autoshard.extensions import EXTENSIONS
from autoshard.jobs.job import FIRST, HERE, NODE, PLAN, STRICT, SUBMIT, TRAINING, Files, Job, yaml_text
from autoshard.jobs.place import FILES_AT, MEMORY_AT
from autoshard.jobs.quoting import shell_words
from autoshard.jobs.shell import node_text

_TRAINER = "trainer.kubeflow.org"
# In a job's life; autoshard refuses a sixth start that takes no step. The training operator counts each pod's own.
_MOST_RESTARTS = 20
_CONFIG_MAP_BYTES = 1 << 20  # cited: kubernetes.io/docs/concepts/configuration/configmap, "cannot exceed 1 MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """What a node has besides accelerators."""

    num_efa: int
    num_cpus: int
    memory_gib: int

    @property
    def requests(self) -> dict[str, str]:
        """What a pod asks for: most of the node, as what the system and its daemons need is not handed out.

        A pod that asks for nothing is the first to be evicted where a node runs out of memory.
        """
        return {"cpu": str(self.num_cpus * 9 // 10), "memory": f"{self.memory_gib * 8 // 10}Gi"}


# EFA devices. cited: trn1 and trn1n: AWS Neuron docs 2.29, setup-trn1-multi-node-execution.rst; trn2: derived, 16 chips
# with 200 Gb/s each (neuron-runtime/about/collectives.rst); p4, p5, p6: aws-samples, awsome-distributed-training
# 7217859, 4.validation_and_observability/2.gpu-cluster-healthcheck/README.md. Processors and memory. cited:
# docs.aws.amazon.com/ec2/latest/instancetypes/ac.html, 2026-11; p6-b300: derived, 6400 Gb/s over devices of 400 Gb/s.
_TRN1, _TRN2 = {"num_cpus": 128, "memory_gib": 512}, {"num_cpus": 192, "memory_gib": 2048}
_P4, _P5 = {"num_cpus": 96, "memory_gib": 1152}, {"num_cpus": 192, "memory_gib": 2048}
_HOSTS: Mapping[str, _Host] = {
    "trn1.32xlarge": _Host(num_efa=8, **_TRN1),
    "trn1n.32xlarge": _Host(num_efa=16, **_TRN1),
    "trn2.48xlarge": _Host(num_efa=16, **_TRN2),
    "trn2u.48xlarge": _Host(num_efa=16, **_TRN2),
    "p4d.24xlarge": _Host(num_efa=4, **_P4),
    "p4de.24xlarge": _Host(num_efa=4, **_P4),
    "p5.48xlarge": _Host(num_efa=32, **_P5),
    "p5en.48xlarge": _Host(num_efa=16, **_P5),
    "p6-b200.48xlarge": _Host(num_efa=8, **_P5),
    "p6-b300.48xlarge": _Host(num_efa=16, num_cpus=192, memory_gib=4096),
}
# cited: awsome-distributed-training 7217859, 1.architectures/7.sagemaker-hyperpod-eks/task-governance, and for the
# names of instance types 3.test_cases/pytorch/neuronx-distributed/llama3/kubernetes.
_HYPERPOD = {
    "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
    "sagemaker.amazonaws.com/job-max-retry-count": str(_MOST_RESTARTS),
}


def kubernetes_files(job: Job) -> Files:
    """Return the files of a job under Kubernetes."""
    kind = "trainjob" if job.place.kind == "trainjob" else "pytorchjob"
    texts = {**job.common_texts(), NODE: node_text(job, kind)}
    steps: list[str] = []
    if kind == "trainjob":
        texts["job.yaml"] = _documents(job, "The job.", _runtime(job), _train_job(job))
    elif job.compiles:
        texts["compile.yaml"] = _documents(job, "The compile job.", _pytorch_job(job, "compile"))
        steps = _compiled_first(job)
    if kind == "pytorchjob":
        texts["train.yaml"] = _documents(job, "The training job.", _pytorch_job(job, "train"))
    names = NODE, PLAN, TRAINING, *(path.name for path in EXTENSIONS.files)
    rule = "a ConfigMap takes names of letters, digits, dots, - and _ only. Rename the file"
    require(*((bool(re.fullmatch(r"[-.\w]+", name, re.ASCII)), f"--extend {name}", rule) for name in names))
    sizes = {name: len(texts[name].encode()) for name in names}
    held, largest = f"a ConfigMap holds {_CONFIG_MAP_BYTES:,} bytes", max(sizes, key=lambda name: sizes[name])
    large = f"{held}, and the files of the job have {sum(sizes.values()):,}, most of them {largest}"
    require((sum(sizes.values()) <= _CONFIG_MAP_BYTES, "--scheduler k8s", f"{large}. Shorten that file"))
    sources = shell_words(f"--from-file={name}" for name in names)
    label = "jobset.sigs.k8s.io/jobset-name" if kind == "trainjob" else "training.kubeflow.org/job-name"
    selector = f"--selector {label}={job.name} --max-log-requests {job.num_nodes}"
    lines = [
        FIRST,
        *job.title(f"Submits the job: bash {SUBMIT}. The files of the job go into a ConfigMap."),
        STRICT,
        HERE,
        *_not_there_yet(f"{kind}/{job.name}"),
        # Not by the client: it would keep a copy in an annotation, which holds 256 KiB.
        f"kubectl create configmap {job.name} {sources} --dry-run=client -o yaml |",
        "  kubectl apply --server-side --force-conflicts -f -",
        *steps,
        f"kubectl apply -f {'job' if kind == 'trainjob' else 'train'}.yaml",
        f'echo "training job: {kind}/{job.name}"',
        f'echo "watch: kubectl get {kind} {job.name} --watch"',
        f'echo "to save and stop: kubectl delete {kind} {job.name}"',
        f'echo "log: kubectl logs --follow --prefix {selector}"',
    ]
    return Files(texts={**texts, SUBMIT: "\n".join(lines) + "\n"}, submitter="kubectl")


def _documents(job: Job, what: str, *documents: Mapping[str, Any]) -> str:
    return "\n".join([*job.title(what), "---\n".join(yaml_text(document) for document in documents)])


def _runtime(job: Job) -> dict[str, Any]:
    """Say how pods look, and that training waits for compiling; node.sh needs no framework's environment."""

    def work(name: str, stage: str, **more: int) -> dict[str, Any]:
        pod = _pod(job, stage, {"MASTER_ADDR": f"{job.name}-{name}-0-0.{job.name}"})
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


def _pytorch_job(job: Job, stage: str) -> dict[str, Any]:
    name = f"{job.name}-compile" if stage == "compile" else job.name
    replicas = {"Master": 1, "Worker": job.num_nodes - 1}
    specs = {
        role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": _pod(job, stage, {})}}
        for role, count in replicas.items()
        if count
    }
    notes = {"annotations": _HYPERPOD} if job.place.kind == "hyperpod" else {}
    policy = {"backoffLimit": _MOST_RESTARTS * job.num_nodes, "cleanPodPolicy": "Running"}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, **notes},
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": specs},
    }


def _pod(job: Job, stage: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Describe the pod of a node: all of the node's accelerators, the files of the job, and the shared volume."""
    place = job.place
    resource = {"neuron": "aws.amazon.com/neuron", "gpu": "nvidia.com/gpu", "none": "cpu"}[job.accelerator]
    devices = {resource: str(job.plan.cluster.chips_per_node)}  # nodes with one of them all belong to the job
    host = _HOSTS.get(job.plan.cluster.name)
    if job.num_nodes > 1 and host:
        devices["vpc.amazonaws.com/efa"] = str(host.num_efa)
    mounts = {"files": FILES_AT, "shared": place.volume, "memory": MEMORY_AT}
    container = {
        "name": "node" if place.kind == "trainjob" else "pytorch",
        "image": place.image,
        "command": ["bash", f"{FILES_AT}/{NODE}", stage],
        **({"env": [{"name": name, "value": value} for name, value in variables.items()]} if variables else {}),
        "resources": {"limits": devices, **({"requests": host.requests} if host else {})},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    volumes = [
        {"name": "files", "configMap": {"name": job.name}},
        {"name": "shared", "persistentVolumeClaim": {"claimName": place.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    kind = f"ml.{job.instance_type}" if place.kind == "hyperpod" else job.instance_type
    selector = {"nodeSelector": {"node.kubernetes.io/instance-type": kind}} if job.instance_type else {}
    ends = {"terminationGracePeriodSeconds": job.notice_s} if stage == "train" else {}
    return {**selector, **ends, "containers": [container], "volumes": volumes}


def _not_there_yet(training: str) -> list[str]:
    """Refuse a job that is there: kubectl apply would change files under its pods, and start none that has ended."""
    return [
        f"there=$(kubectl get {training} --ignore-not-found --output name)",
        'if [[ -n "$there" ]]; then',
        f'  echo "{training} is there already. To start it again, from its newest checkpoint:" >&2',
        f'  echo "kubectl delete {training}, and then this script" >&2',
        "  exit 1",
        "fi",
    ]


def _compiled_first(job: Job) -> list[str]:
    """Return the wait for the compile job: a PyTorchJob cannot depend on another."""
    name = f"{job.name}-compile"
    state = '{.status.conditions[?(@.status=="True")].type}'
    return [
        "# One that has ended, of this plan or another, would pass for the new one.",
        f"case $(kubectl get pytorchjob {name} --ignore-not-found -o jsonpath='{state}') in",
        f"  *Succeeded* | *Failed*) kubectl delete pytorchjob {name} ;;",
        "esac",
        "kubectl apply -f compile.yaml",
        f'echo "compile job: pytorchjob/{name}; the training job follows when it has ended well: leave this running"',
        "while true; do",
        f"  case $(kubectl get pytorchjob {name} -o jsonpath='{state}') in",
        "    *Succeeded*) break ;;",
        "    *Failed*)",
        f'      echo "{name} failed: kubectl logs {name}-master-0; to try again, this script" >&2',
        "      exit 1 ;;",
        "  esac",
        "  sleep 10",
        "done",
    ]
