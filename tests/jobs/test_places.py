"""What clusters ask for besides nodes: accounts and containers of Slurm, requests and retries of Kubernetes."""

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autoshard.errors import InputError
from autoshard.jobs.job import Job
from autoshard.jobs.kubernetes import _HOSTS
from autoshard.jobs.place import JobPlace
from autoshard.plan.environment import environment
from autoshard.spec.training import DataSpec, Training
from tests.jobs.cases import FIRST, files_of, gpu_plan, job_of, plan_of

SBATCH = {"account": "llm", "qos": "high", "reservation": "week.47", "exclude": "trn-3,trn-[7-8]"}
PYXIS = {"container_image": "registry#autoshard:1", "container_mounts": "/fsx:/fsx,/data"}


def placed(**options: Any) -> Job:
    job = job_of(plan_of(FIRST), "slurm plain", replans=True)
    return replace(job, place=replace(job.place, **options))


def test_both_jobs_of_slurm_say_who_pays_and_which_nodes_are_meant() -> None:
    texts = files_of(placed(**SBATCH)).texts
    for name in ("train.sbatch", "compile.sbatch"):
        assert all(f"#SBATCH --{option}={value}\n" in texts[name] for option, value in SBATCH.items())
    train = texts["train.sbatch"]
    assert "--account=llm --qos=high --reservation=week.47 '--exclude=trn-3,trn-[7-8]'" in train, (
        "and one planned again"
    )
    assert "account" not in "".join(files_of(placed()).texts.values())


def test_a_job_that_is_planned_again_keeps_the_name_that_was_chosen() -> None:
    assert "--name=mine" in files_of(replace(placed(), name="mine")).texts["train.sbatch"]
    assert "--name" not in files_of(placed()).texts["train.sbatch"].replace("--job-name", "")


def test_nodes_work_in_a_container_that_has_the_folder_of_the_job() -> None:
    texts = files_of(placed(**PYXIS)).texts
    where = "--container-image='registry#autoshard:1' --container-mounts=\"$PWD:$PWD\",/fsx:/fsx,/data"
    for name in ("train", "compile"):
        line = f'srun --kill-on-bad-exit=1 --cpu-bind=none {where} --container-workdir="$PWD" bash node.sh {name}'
        assert line in texts[f"{name}.sbatch"]
    assert "scontrol" not in texts["node.sh"] and "first_node('$SLURM_STEP_NODELIST')" in texts["node.sh"]
    assert "container" not in "".join(files_of(placed()).texts.values())
    bare = files_of(placed(container_image="a.sqsh")).texts["train.sbatch"]
    assert '--container-mounts="$PWD:$PWD" --container-workdir' in bare


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"account": "a b"}, "account: must be a name"),
        ({"qos": "a\n#SBATCH --uid=0"}, "qos: must be a name"),
        ({"reservation": ""}, "reservation: must be a name"),
        ({"exclude": "trn 1"}, "exclude: must be names of nodes"),
        ({"container_image": "a b"}, "container_image: must be an image"),
        ({"container_image": "a", "container_mounts": "fsx"}, "container_mounts: must be folders"),
        ({"container_mounts": "/fsx"}, "container_mounts: mounts into a container. Name that too"),
    ],
)
def test_what_sbatch_would_read_otherwise_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        placed(**options)
    with pytest.raises(InputError, match="says nothing to torchrun"):
        JobPlace(scheduler="torchrun", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(({"mount": path}, "mount: ") for path in ("/", "//", "/job", "/job/", "/job/./", "/job/data", "/dev/shm")),
        ({"mount": "/fsx:/fsx"}, "mount: must be a folder from / on, without a colon"),
        *(({"claim": name}, "claim: must be the name of a claim") for name in ("a..b", "a.-b", "a" * 254, "")),
    ],
)
def test_a_volume_that_kubernetes_would_not_mount_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        JobPlace(**{"scheduler": "k8s", "image": "a", "claim": "a", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"mount": "/jobs"}, {"mount": "/mnt/job"}, {"claim": "a-1.b"}, {"claim": "0"}])
def test_any_other_volume_is_mounted(options: dict[str, str]) -> None:
    JobPlace(**{"scheduler": "k8s", "image": "a", "claim": "a", **options})  # type: ignore[arg-type]


def pods(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def look(node: Any) -> None:
        if isinstance(node, dict):
            found.extend([node] if "containers" in node else [])
            for one in node.values():
                look(one)
        for one in node if isinstance(node, list) else ():
            look(one)

    for name, text in files_of(job).texts.items():
        if name in ("job.yaml", "train.yaml", "compile.yaml"):
            look(list(yaml.safe_load_all(text)))
    return found


@pytest.mark.parametrize("under", ["k8s trainjob", "k8s pytorchjob"])
def test_pods_ask_for_processors_and_memory_so_that_they_are_not_evicted_first(under: str) -> None:
    for plan in (plan_of(FIRST), gpu_plan()):
        host = _HOSTS[plan.cluster.name]
        for pod in pods(job_of(plan, under)):
            (container,) = pod["containers"]
            asked = container["resources"]["requests"]
            assert host.num_cpus * 0.85 < int(asked["cpu"]) < host.num_cpus
            assert host.memory_gib * 0.75 < int(asked["memory"].removesuffix("Gi")) < host.memory_gib


def test_failures_that_all_nodes_share_count_once_for_each_node() -> None:
    (job,) = yaml.safe_load_all(files_of(job_of(plan_of(FIRST), "k8s pytorchjob")).texts["train.yaml"])
    assert job["spec"]["runPolicy"]["backoffLimit"] == 20 * 16


def test_gpus_on_efa_fork_and_meet_as_its_scripts_do() -> None:
    found = environment(gpu_plan())
    assert (found["FI_EFA_USE_HUGE_PAGE"], found["NCCL_SOCKET_IFNAME"]) == ("0", "^docker,lo,veth")
    assert "FI_EFA_USE_HUGE_PAGE" not in environment(plan_of(FIRST))


def test_files_that_no_config_map_holds_are_refused() -> None:
    large = Training(steps=9, data=DataSpec(sets={f"sets/{number:0100}": 1.0 for number in range(10_000)}))
    says = "ConfigMap holds 1,048,576 bytes, and the files of the job have 1,.*, most of them training.yaml. Shorten"
    with pytest.raises(InputError, match=says):
        files_of(job_of(plan_of(FIRST), "k8s trainjob", training=large))
