"""A shrunk plan keeps the shape of the large one, and names what it gave up."""

from dataclasses import replace

import pytest

from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import dump, load
from autoshard.plan.plan import Plan
from autoshard.plan.shrink import shrink
from autoshard.plan.tables import plan_programs
from autoshard.search.planner import Request, plan_at
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload


def large(text: str, cluster: str = "trn1.32xlarge", engine: str = "nxd") -> Plan:
    candidate = Candidate.parse(text)
    place = load_cluster(cluster)
    place = load_cluster(cluster, num_nodes=candidate.num_ranks // place.num_ranks)
    workload = Workload(seq_len=8192, global_batch=256, precision=Precision.named("bf16"))
    request = Request(model=load_model("llama3-70b"), cluster=place, workload=workload, engines=("nxd", "torch"))
    return plan_at(request, candidate)


@pytest.mark.parametrize("max_ranks", [2, 3, 4, 8, 16])
def test_few_ranks_suffice_though_more_share_a_port(max_ranks: int) -> None:
    small = shrink(large("tp=8,pp=8,dp=8,recompute=full:8/none*7"), max_ranks).plan
    assert small.mesh.num_ranks <= max_ranks and small.mesh.size("tp") == 2
    assert plan_programs(small) and load(dump(small)) == small
    assert all(small.mesh.num_ranks % link.ranks_per_port == 0 for link in small.cluster.links)


def test_what_has_no_effect_without_a_pipeline_is_given_up_by_name() -> None:
    plan = large("tp=8,pp=4,dp=4,vp=4,schedule=interleaved,recompute=full:2", "h100-80")
    kept, lost = shrink(plan, 8), shrink(plan, 2)
    assert kept.plan.candidate.vp == 4 and not kept.lost
    assert lost.plan.candidate.vp == 1 and lost.plan.candidate.schedule == "1f1b"
    assert lost.lost == (
        "pp=4: no room for it on 2 ranks",
        "dp=4: no room for it on 2 ranks",
        "schedule=interleaved: there is only one pipeline rank",
    )
    assert plan_programs(lost.plan)


def test_what_has_no_effect_without_context_parallelism_is_given_up_with_it() -> None:
    plan = large("tp=8,pp=1,cp=2,dp=1,cp_order=zigzag", "h100-80")
    small = shrink(replace(plan, prediction=None), 2).plan
    assert small.cp_order == "contiguous" and small.mesh.size("cp") == 1 and plan_programs(small)
