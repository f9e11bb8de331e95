"""Rank groups and task lists of a plan are those that the real NxD makes, for clusters of up to 512 ranks."""

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.schedule.schedule import Schedule
from autoshard.spec.cluster import Cluster
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.mesh import Mesh
from tests.neuron.cases import as_started
from tests.neuron.nxd_ranks import on_nxd_ranks

pytestmark = [pytest.mark.nxd, pytest.mark.usefixtures("nxd")]
Groups = Sequence[Sequence[int]]
# tp sizes that the platform runs, and how KV heads are copied there.
LAYOUTS = [("trn1.32xlarge", None, tp, rep) for tp, rep in ((1, 1), (4, 1), (8, 1), (8, 2), (32, 1), (32, 4))] + [
    ("trn2.48xlarge", lnc, tp, rep)
    for lnc, tp, rep in ((2, 4, 1), (2, 16, 2), (2, 32, 4), (2, 64, 8), (1, 8, 1), (1, 32, 4), (1, 64, 8), (1, 128, 16))
]
MEASURES = ("tp", "dp", "cp", "pp")


def groups_of_nxd(cluster: Cluster, sizes: dict[str, int]) -> dict[str, Groups]:
    """What the real functions give, in a process that pretends to be the first of all ranks."""
    with as_started(cluster.ranks_per_node, cluster.name[:4]):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cluster.num_ranks)
        state = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
        hardware = importlib.import_module("neuronx_distributed.utils.utils").hardware(cluster.name[:4])
        found: Any = state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            context_parallel_size=sizes["cp"],
            lnc_size=cluster.lnc or 1,
            mesh_only=True,
        )
        copies = state.arrange_kv_groups(cluster.num_ranks // sizes["tp"], sizes["tp"], sizes["rep"], False, hardware)
    named = {name: [list(map(int, group)) for group in getattr(found, f"{name}_groups")] for name in MEASURES}
    return {**named, "rep": copies, "edp": [list(map(int, group)) for group in found.ep_data_groups]}


def as_sets(groups: Groups) -> set[frozenset[int]]:
    return {frozenset(group) for group in groups}


def in_order(groups: Groups) -> set[tuple[int, ...]]:
    return {tuple(group) for group in groups}


@pytest.mark.parametrize(("name", "lnc", "tp", "rep"), LAYOUTS)
def test_groups_are_those_of_nxd(name: str, lnc: int | None, tp: int, rep: int) -> None:
    compared = 0
    for num_nodes in (1, 2, 4, 8, 16):
        cluster = load_cluster(name, num_nodes=num_nodes, lnc=lnc)
        if not 64 <= cluster.num_ranks <= 512:
            continue
        for pp, cp in ((1, 1), (2, 1), (2, 2)):
            if cluster.num_ranks % (tp * pp * cp) or (tp == 4 and cp > 1):
                continue
            dp = cluster.num_ranks // (tp * pp * cp)
            if tp == 4 and name.startswith("trn1") and dp % (cluster.ranks_per_node // tp):
                continue  # NxD cannot lay these out: it asks for whole nodes of replicas
            sizes = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "rep": rep}
            mesh = Mesh.laid_on(cluster, sizes)
            (found,) = on_nxd_ranks(1, groups_of_nxd, cluster, sizes)
            compared += 1
            for axis in MEASURES:
                assert as_sets(found[axis]) == as_sets(mesh.groups(axis)), (sizes, axis)
            assert in_order(found["tp"]) == in_order(mesh.groups("tp")), sizes  # a rank's place in its group counts
            assert in_order(found["pp"]) == in_order(mesh.groups("pp")), sizes
            if rep > 1:
                assert as_sets(found["rep"]) == as_sets(mesh.groups("rep")), sizes
            paired = dp > 1 and tp in [rule.tp for rule in cluster.placements if rule.name == "paired"]
            differs = as_sets(found["edp"]) != as_sets(found["dp"])
            assert differs == (cp > 1 or paired), sizes  # Rule nxd-zero-groups
    assert compared >= 4


def test_tp_4_on_trn1_cannot_copy_keys() -> None:
    # NxD's groups of copies ignore that this tp takes every eighth rank, and mix replicas of the batch.
    cluster = load_cluster("trn1.32xlarge", num_nodes=2)
    sizes = {"tp": 4, "pp": 1, "cp": 1, "dp": 16, "rep": 2}
    (found,) = on_nxd_ranks(1, groups_of_nxd, cluster, sizes)
    assert as_sets(found["rep"]) != as_sets(Mesh.laid_on(cluster, sizes).groups("rep"))


def tasks_of_nxd(schedule: Schedule, rank: int) -> list[str]:
    """The passes of a rank in the order of NxD's scheduler, written as ours."""
    scheduler = importlib.import_module("neuronx_distributed.pipeline.scheduler")
    count, ranks = schedule.num_micro_batches, schedule.num_ranks
    made: Any
    if schedule.builder == "1f1b":
        made = scheduler.Train1F1BSchedule(count, ranks, rank)
    else:
        made = scheduler.TrainInterleavedSchedule(count, schedule.num_chunks, ranks, rank)
    passes = {scheduler.ForwardStepTask: "F", scheduler.BackwardStepTask: "B"}
    return [
        f"{passes[type(task)]}{task.model_chunk * ranks + rank}.{task.mb}"
        for tasks in made.steps()
        for task in tasks
        if type(task) in passes
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("builder", "num_chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
def test_task_lists_are_those_of_nxd(builder: str, num_chunks: int, num_ranks: int) -> None:
    for rounds in (1, 2, 3, 5):
        schedule = Schedule(
            builder=builder, num_ranks=num_ranks, num_chunks=num_chunks, num_micro_batches=rounds * num_ranks
        )
        for rank, actions in enumerate(schedule.action_lists()):
            assert [str(action) for action in actions] == tasks_of_nxd(schedule, rank), (rounds, rank)
