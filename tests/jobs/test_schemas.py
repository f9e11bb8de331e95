"""Manifests hold against the models that Kubeflow publishes: nothing is missing, unknown or of another type."""

import json
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autoshard.plan.plan import Plan
from tests.jobs.cases import FIRST, files_of, gpu_plan, job_of, plan_of
from tests.runtime.cases import tiny_plan

PLANS: Mapping[str, Callable[[], Plan]] = {
    "16 nodes": lambda: plan_of(FIRST),
    "gpus": gpu_plan,
    "one node": lambda: tiny_plan("tp=1,pp=1,dp=2"),
}


def documents(name: str, under: str) -> Iterator[dict[str, Any]]:
    for file, text in files_of(job_of(PLANS[name](), under)).texts.items():
        if file.endswith(".yaml") and file != "training.yaml":
            yield from yaml.safe_load_all(text)


def lost(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """What a model drops because it does not know it."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{where}.{key}"
            else:
                yield from lost(value, kept[key], f"{where}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from lost(value, kept[index], f"{where}[{index}]")
    elif given != kept:
        yield f"{where}: {given} became {kept}"


def checked(document: dict[str, Any]) -> list[str]:
    """What the model of a document's kind drops of it."""
    from kubeflow.training import models as operator  # here: these take a second in each process that collects tests
    from kubeflow_trainer_api import models
    from kubernetes.client import ApiClient, models as client_models

    if document["kind"] == "PyTorchJob":
        for model in vars(operator).values():  # where the client looks for models
            if isinstance(model, type) and model.__name__.startswith("KubeflowOrg"):
                setattr(client_models, model.__name__, model)
        api = ApiClient()
        job = api.deserialize(SimpleNamespace(data=json.dumps(document)), operator.KubeflowOrgV1PyTorchJob)
        return list(lost(document, api.sanitize_for_serialization(job)))
    read: Any = getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document)
    return list(lost(document, read.to_dict()))


@pytest.mark.parametrize("name", PLANS)
def test_train_jobs_hold_against_the_trainer_s_models(name: str) -> None:
    runtime, job = documents(name, "k8s trainjob")
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert not checked(runtime) and not checked(job)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    jobs = {one["name"]: one for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    compiles = PLANS[name]().engine == "nxd"
    assert list(jobs) == (["compile", "node"] if compiles else ["node"])
    assert jobs["node"].get("dependsOn") == ([{"name": "compile", "status": "Complete"}] if compiles else None)


@pytest.mark.parametrize("profile", ["pytorchjob", "hyperpod"])
@pytest.mark.parametrize("name", PLANS)
def test_pytorch_jobs_hold_against_the_operator_s_models(name: str, profile: str) -> None:
    from kubeflow_trainer_api import models

    found = list(documents(name, f"k8s {profile}"))
    assert len(found) == (2 if PLANS[name]().engine == "nxd" else 1)
    for document in found:
        assert not checked(document)
        specs = document["spec"]["pytorchReplicaSpecs"]
        assert sum(one["replicas"] for one in specs.values()) == PLANS[name]().cluster.num_nodes
        for one in specs.values():  # the operator's model says nothing of pods
            pod = models.IoK8sApiCoreV1PodTemplateSpec.from_dict(one["template"])
            assert pod and not list(lost(one["template"], pod.to_dict()))


def test_the_models_see_faults() -> None:
    (old,) = documents("one node", "k8s pytorchjob")
    old["spec"]["runPolicy"]["backoffLimits"] = 3
    assert checked(old) == [".spec.runPolicy.backoffLimits"]
    runtime, job = documents("16 nodes", "k8s trainjob")
    assert checked(job | {"spec": job["spec"] | {"numNodes": 16}}) == [".spec.numNodes"]
    runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = "16"
    with pytest.raises(ValueError, match="parallelism"):
        checked(runtime)
