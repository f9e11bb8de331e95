"""Clusters as values: what they refuse, who shares what, and which bandwidth is left for each group."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.spec.cluster import Chip, Cluster, Link
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster, load_node_type
from autoshard.spec.placement import Placement, PlacementRule
from autoshard.spec.ports import level_bandwidths_bytes_per_s
from autoshard.spec.record import decode, encode

SOURCES = {"default": "test"}


def chip(**changes: Any) -> Chip:
    fields: dict[str, Any] = {"name": "c", "memory_bytes": 64, "memory_bandwidth_bytes_per_s": 8.0}
    fields |= {"matrix_flops_per_s": {"bf16": 100.0}, "vector_flops_per_s": 4.0, "sources": SOURCES}
    return Chip(**(fields | changes))


def link(**changes: Any) -> Link:
    fields: dict[str, Any] = {"name": "l", "kind": "switch", "domain": "node", "bandwidth_bytes_per_s": 100.0}
    fields |= {"ranks_per_port": 1, "latency_s": 1e-6, "sources": SOURCES}
    return Link(**(fields | changes))


def cluster(**changes: Any) -> Cluster:
    network = link(domain="cluster", kind="network", bandwidth_bytes_per_s=10.0, ranks_per_port=2)
    fields: dict[str, Any] = {"name": "x", "chip": chip(), "num_nodes": 2, "chips_per_node": 4}
    fields |= {"ranks_per_chip": 1, "lnc": None, "links": (link(), network), "engine": "torch"}
    fields |= {"kernels": "te", "sources": SOURCES}
    return Cluster(**(fields | changes))


def faults_of(build: Any, **changes: Any) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        build(**changes)
    return {fault.where: fault.message for fault in caught.value.faults}


def test_a_rank_owns_its_share_of_the_chip():
    halves = cluster(ranks_per_chip=2, links=(link(ranks_per_port=2), cluster().links[1]))
    assert (halves.ranks_per_node, halves.num_ranks, halves.rank_memory_bytes) == (8, 16, 32)
    assert halves.rank_matrix_flops_per_s("bf16") == 50
    assert (halves.rank_vector_flops_per_s, halves.rank_memory_bandwidth_bytes_per_s) == (2, 4)
    assert [halves.node_of(rank) for rank in (0, 7, 8)] == [0, 0, 1]


def test_a_dtype_without_a_rate_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"no fp64 matrix rate. Did you mean|no fp64 matrix rate. Known: bf16"):
        cluster().rank_matrix_flops_per_s("fp64")


def test_a_chip_lists_all_its_faults():
    found = faults_of(
        chip, memory_bytes=0, vector_flops_per_s=-1.0, matrix_flops_per_s={"bf61": 1.0}, sources={}, name=" "
    )
    assert set(found) == {"name", "memory_bytes", "vector_flops_per_s", "matrix_flops_per_s.bf61", "sources"}
    assert "Did you mean bf16" in found["matrix_flops_per_s.bf61"]
    assert "at least one dtype" in faults_of(chip, matrix_flops_per_s={})["matrix_flops_per_s"]


def test_every_number_needs_a_source():
    with pytest.raises(InputError) as caught:
        chip(sources={"memory_bytes": "sheet", "vector_flops_per_s": "", "matrix_flops_per_s.fp32": "sheet"})
    assert [fault.message.split(":")[0] for fault in caught.value.faults] == [
        "no source for memory_bandwidth_bytes_per_s",
        "no source for vector_flops_per_s",
        "no source for matrix_flops_per_s.bf16",
    ]
    by_field = ("memory_bytes", "memory_bandwidth_bytes_per_s", "matrix_flops_per_s", "vector_flops_per_s")
    assert chip(sources=dict.fromkeys(by_field, "sheet"))
    assert (
        "no source for ranks_per_port"
        in faults_of(link, sources={"bandwidth_bytes_per_s": "sheet", "latency_s": "sheet"})["sources"]
    )
    assert (
        "price"
        in faults_of(cluster, price_usd_per_node_hour=1.0, sources={"chips_per_node": "s", "ranks_per_chip": "s"})[
            "sources"
        ]
    )


def test_a_link_lists_all_its_faults():
    found = faults_of(link, name="", bandwidth_bytes_per_s=0.0, ranks_per_port=0, latency_s=-1.0)
    assert set(found) == {"name", "bandwidth_bytes_per_s", "ranks_per_port", "latency_s"}


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"num_nodes": 0}, "num_nodes", "at least 1, not 0"),
        ({"lnc": 0}, "lnc", "at least 1"),
        ({"name": ""}, "name", "empty"),
        ({"kernels": ""}, "kernels", "Kernels table"),
        ({"price_usd_per_node_hour": 0.0}, "price_usd_per_node_hour", "positive"),
        ({"price_date": "2026-11-09"}, "price_date", "give price_usd_per_node_hour"),
        ({"price_usd_per_node_hour": 1.0, "price_date": "9 November 2026"}, "price_date", "YYYY-MM-DD"),
        ({"links": ()}, "links", "innermost first"),
        ({"links": (link(domain="cluster"), link())}, "links", "innermost first"),
        ({"links": (link(), link())}, "links", "innermost first"),
        ({"links": (link(),)}, "num_nodes", "no link joins 2 nodes"),
        ({"links": (link(domain="chip"),)}, "links", "add one of domain node"),
        ({"nodes_per_ultraserver": 4}, "nodes_per_ultraserver", "only when"),
        ({"links": (link(ranks_per_port=3), link(domain="cluster"))}, "links[0].ranks_per_port", "evenly"),
        ({"links": (link(), link(domain="cluster", ranks_per_port=3))}, "links[1].ranks_per_port", "evenly"),
    ],
)
def test_a_cluster_refuses_what_cannot_be(changes: dict[str, Any], where: str, says: str):
    assert says in faults_of(cluster, **changes)[where]


def test_a_cluster_refuses_placements_that_do_not_fit_its_nodes():
    rules = tuple(PlacementRule(name="p", tp=3, placement=Placement.linear(size), source="test") for size in (4, 5))
    assert set(faults_of(cluster, placements=rules)) == {
        "placements",
        "placements[1].placement",
        "placements[0].tp",
        "placements[1].tp",
    }


@given(st.sampled_from(cluster_names()), st.data())
def test_more_ranks_never_talk_over_a_smaller_domain(name: str, data: st.DataObject):
    some = load_cluster(name, int(min(6, load_node_type(name).max_nodes)))
    ranks = data.draw(st.lists(st.integers(0, some.num_ranks - 1), min_size=1, max_size=5))
    more = data.draw(st.lists(st.integers(0, some.num_ranks - 1), max_size=5))
    assert some.links.index(some.link_of(ranks)) <= some.links.index(some.link_of([*ranks, *more]))
    assert some.link_of(ranks) is some.link_of(ranks[::-1])


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_survives_json_and_can_be_a_key(name: str):
    some = load_cluster(name)
    assert decode(Cluster, json.loads(json.dumps(encode(some)))) == some
    assert hash(dataclasses.replace(some)) == hash(some)


def slowest(some: Cluster, groups: Sequence[Sequence[int]]) -> float:
    """What each group gets of the link that gives it least."""
    return min(level_bandwidths_bytes_per_s(some, groups))


def across(num_nodes: int, per_node: int, node: int, step: int = 1, start: int = 0) -> tuple[int, ...]:
    """A group with the same local ranks on every node."""
    return tuple(base + start + step * index for base in range(0, num_nodes * node, node) for index in range(per_node))


@pytest.mark.parametrize(
    ("name", "groups", "bandwidth"),
    [
        # NVLink alone: each GPU sends with all of its links.
        ("h100-80", [range(8)], 450e9),
        # All 8 GPUs of both nodes in one group: 8 adapters of 50 GB/s leave each node, below NVLink's 450.
        ("h100-80", [range(16)], 400e9),
        # One GPU a node, all 8 groups at once: one adapter each.
        ("h100-80", [across(2, 1, 8, start=gpu) for gpu in range(8)], 50e9),
        # Two groups of 4 a node: half of the adapters each.
        ("h100-80", [across(2, 4, 8), across(2, 4, 8, start=4)], 200e9),
        # p4d has a port for every two GPUs: alone a GPU has it for itself, together they share.
        ("p4d.24xlarge", [across(2, 1, 8)], 12.5e9),
        ("p4d.24xlarge", [across(2, 1, 8, start=gpu) for gpu in range(8)], 6.25e9),
        # A whole trn1 node: 16 DMA engines of 17 GB/s a core move every byte of a hop twice, 136 GB/s; NeuronLink's
        # 192 GB/s a chip are more.
        ("trn1.32xlarge", [range(32)], 16 * 17e9 / 2),
        # tp 4 as NxD lays it: every group has one core of four chips, so two groups share each chip's links, and get
        # less than a core's DMA engines move.
        ("trn1.32xlarge", [tuple(range(local, 32, 8)) for local in range(8)], 96e9),
        # The two cores of one chip.
        ("trn1.32xlarge", [(0, 1)], 16 * 17e9 / 2),
        # One core a node, all 32 groups at once: four share a port of 100 Gb/s.
        ("trn1.32xlarge", [across(2, 1, 32, start=core) for core in range(32)], 12.5e9 / 4),
        # 50 Gb/s a rank at lnc 2, as the documentation says.
        ("trn2.48xlarge", [across(2, 1, 64, start=core) for core in range(64)], 6.25e9),
        # Between two instances of an UltraServer no network is needed: 128 GB/s a chip for 4 ranks.
        ("trn2u.48xlarge", [across(2, 1, 64, start=core) for core in range(64)], 32e9),
        ("local", [range(4)], 1e9),
    ],
)
def test_ports_are_shared_by_the_groups_that_leave_through_them(
    name: str, groups: list[range | tuple[int, ...]], bandwidth: float
):
    some = load_cluster(name, 1 if name == "local" else 2)
    assert math.isclose(slowest(some, groups), bandwidth)


def test_a_port_may_serve_several_chips():
    shared = cluster(links=(link(ranks_per_port=2), cluster().links[1]))
    assert slowest(shared, [(0, 1)]) == 50
    assert slowest(shared, [(0, 2)]) == 100
    assert slowest(shared, [(0, 2), (1, 3)]) == 50


def test_without_a_link_inside_the_chip_its_ranks_talk_through_the_port_of_the_chip():
    wide = cluster(ranks_per_chip=2, links=(link(ranks_per_port=2), cluster().links[1]))
    assert slowest(wide, [(0, 1)]) == 100
    assert slowest(wide, [range(8)]) == 100
    assert wide.link_of((0, 1)).domain == "node"


def test_groups_of_one_rank_send_nothing():
    assert slowest(cluster(), [(rank,) for rank in range(8)]) == math.inf


@given(st.sampled_from(("trn1.32xlarge", "trn2u.48xlarge", "p4d.24xlarge", "h200")), st.data())
def test_company_never_makes_a_group_faster(name: str, data: st.DataObject):
    some = load_cluster(name, 5)
    ranks = data.draw(st.permutations(range(some.num_ranks)))
    size = data.draw(st.integers(2, 12))
    groups = [ranks[start : start + size] for start in range(0, 5 * size, size)][: some.num_ranks // size]
    alone = min(slowest(some, [group]) for group in groups)
    together = slowest(some, groups)
    assert 0 < together <= alone
