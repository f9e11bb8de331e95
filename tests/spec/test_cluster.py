"""Clusters as values: what they refuse, who shares what, which bandwidth is left for each group, and placements."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.spec.cluster import Chip, Cluster, Link, Placement, PlacementRule
from autoshard.spec.cluster_catalogue import cluster_names, load_cluster, load_node_type
from autoshard.spec.mesh import level_bandwidths_bytes_per_s
from autoshard.spec.record import decode, encode

SOURCES = {"default": "test"}
FIVE = PlacementRule(name="p", tp=3, placement=Placement.linear(5), source="test")


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


def test_a_rank_owns_its_share_of_the_chip():
    halves = cluster(ranks_per_chip=2, links=(link(ranks_per_port=2), cluster().links[1]))
    assert (halves.ranks_per_node, halves.num_ranks, halves.rank_memory_bytes) == (8, 16, 32)
    assert halves.rank_matrix_flops_per_s("bf16") == 50
    assert (halves.rank_vector_flops_per_s, halves.rank_memory_bandwidth_bytes_per_s) == (2, 4)
    with pytest.raises(InputError, match=r"no fp64 matrix rate. Did you mean|no fp64 matrix rate. Known: bf16"):
        cluster().rank_matrix_flops_per_s("fp64")


@pytest.mark.parametrize(
    ("build", "changes", "faults"),
    [
        (chip, {"memory_bytes": 0, "vector_flops_per_s": -1.0, "name": " "},
         {"memory_bytes": "positive, not 0", "vector_flops_per_s": "positive", "name": "empty"}),
        (chip, {"matrix_flops_per_s": {"bf61": 1.0}}, {"matrix_flops_per_s.bf61": "Did you mean bf16"}),
        (chip, {"matrix_flops_per_s": {}}, {"matrix_flops_per_s": "at least one dtype"}),
        (chip, {"sources": {"memory_bytes": "s", "vector_flops_per_s": "s", "matrix_flops_per_s": "s"}},
         {"sources": "no source for memory_bandwidth_bytes_per_s"}),
        (chip, {"sources": {"memory_bytes": "s", "memory_bandwidth_bytes_per_s": "s", "vector_flops_per_s": "s",
                            "matrix_flops_per_s.fp32": "s"}}, {"sources": "no source for matrix_flops_per_s.bf16"}),
        (link, {"name": "", "bandwidth_bytes_per_s": 0.0, "ranks_per_port": 0, "latency_s": -1.0},
         {"name": "", "bandwidth_bytes_per_s": "", "ranks_per_port": "at least 1", "latency_s": "at least 0"}),
        (link, {"sources": {"bandwidth_bytes_per_s": "s", "latency_s": "s"}}, {"sources": "ranks_per_port"}),
        (cluster, {"num_nodes": 0, "lnc": 0, "name": "", "kernels": ""},
         {"num_nodes": "at least 1, not 0", "lnc": "at least 1", "name": "empty", "kernels": "Kernels table"}),
        (cluster, {"price_usd_per_node_hour": 0.0}, {"price_usd_per_node_hour": "positive"}),
        (cluster, {"price_usd_per_node_hour": 1.0, "sources": {"chips_per_node": "s", "ranks_per_chip": "s"}},
         {"sources": "no source for price"}),
        (cluster, {"price_date": "2026-11-09"}, {"price_date": "give price_usd_per_node_hour"}),
        (cluster, {"price_usd_per_node_hour": 1.0, "price_date": "9 November 2026"}, {"price_date": "YYYY-MM-DD"}),
        (cluster, {"links": ()}, {"links": "cluster. Add one of domain node; a node of a single chip"}),
        (cluster, {"links": (link(domain="cluster"), link())}, {"links": "innermost first"}),
        (cluster, {"links": (link(), link())}, {"links": "innermost first"}),
        (cluster, {"links": (link(),)}, {"num_nodes": "no link joins 2 nodes"}),
        (cluster, {"links": (link(domain="chip"),)}, {"links": "add one of domain node"}),
        (cluster, {"nodes_per_ultraserver": 4}, {"nodes_per_ultraserver": "only when"}),
        (cluster, {"links": (link(ranks_per_port=3), link(domain="cluster"))}, {"links[0].ranks_per_port": "evenly"}),
        (cluster, {"links": (link(), link(domain="cluster", ranks_per_port=3))}, {"links[1].ranks_per_port": "evenly"}),
        (cluster, {"placements": (FIVE, FIVE)},
         {"placements": "two", "placements[0].placement": "places 5 ranks, but a node has 4", "placements[0].tp": "",
          "placements[1].placement": "places 5", "placements[1].tp": "3 does not divide 4"}),
        (PlacementRule, {"name": "", "tp": 0, "placement": Placement.linear(2), "source": " "},
         {"name": "empty", "tp": "at least 1", "source": "where this placement comes from"}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_all_its_faults(
    build: Callable[..., object], changes: dict[str, Any], faults: dict[str, str]
):
    with pytest.raises(InputError) as caught:
        build(**changes)
    found = {fault.where: fault.message for fault in caught.value.faults}
    assert found.keys() == faults.keys()
    assert all(words in found[where] for where, words in faults.items())


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


# -- the bandwidth that is left for each group ----------------------------------------------------------


def slowest(some: Cluster, groups: Sequence[Sequence[int]]) -> float:
    """What each group gets of the link that gives it least."""
    return min(level_bandwidths_bytes_per_s(some, groups))


def across(node: int, per_node: int = 1, start: int = 0) -> tuple[int, ...]:
    """A group with the same local ranks on both of two nodes."""
    return tuple(base + start + index for base in (0, node) for index in range(per_node))


@pytest.mark.parametrize(
    ("name", "groups", "bandwidth"),
    [
        # NVLink alone: each GPU sends with all of its links.
        ("h100-80", [range(8)], 450e9),
        # All 8 GPUs of both nodes in one group: 8 adapters of 50 GB/s leave each node, below NVLink's 450.
        ("h100-80", [range(16)], 400e9),
        # One GPU a node, all 8 groups at once: one adapter each. Two groups of 4 a node: half of the adapters each.
        ("h100-80", [across(8, start=gpu) for gpu in range(8)], 50e9),
        ("h100-80", [across(8, 4), across(8, 4, start=4)], 200e9),
        # p4d has a port for every two GPUs: alone a GPU has it for itself, together they share.
        ("p4d.24xlarge", [across(8)], 12.5e9),
        ("p4d.24xlarge", [across(8, start=gpu) for gpu in range(8)], 6.25e9),
        # A whole trn1 node, and the two cores of a chip: 16 DMA engines of 17 GB/s a core move every byte of a hop
        # twice, 136 GB/s; NeuronLink's 192 GB/s a chip are more.
        ("trn1.32xlarge", [range(32)], 16 * 17e9 / 2),
        ("trn1.32xlarge", [(0, 1)], 16 * 17e9 / 2),
        # tp 4 as NxD lays it: every group has one core of four chips, so two groups share each chip's links, and get
        # less than a core's DMA engines move.
        ("trn1.32xlarge", [tuple(range(local, 32, 8)) for local in range(8)], 96e9),
        # One core a node, all 32 groups at once: four share a port of 100 Gb/s.
        ("trn1.32xlarge", [across(32, start=core) for core in range(32)], 12.5e9 / 4),
        # 50 Gb/s a rank at lnc 2, as the documentation says.
        ("trn2.48xlarge", [across(64, start=core) for core in range(64)], 6.25e9),
        # Between two instances of an UltraServer no network is needed: 128 GB/s a chip for 4 ranks.
        ("trn2u.48xlarge", [across(64, start=core) for core in range(64)], 32e9),
        ("local", [range(4)], 1e9),
    ],
)
def test_ports_are_shared_by_the_groups_that_leave_through_them(
    name: str, groups: list[range | tuple[int, ...]], bandwidth: float
):
    assert math.isclose(slowest(load_cluster(name, 1 if name == "local" else 2), groups), bandwidth)


def test_a_port_may_serve_several_chips_or_the_ranks_inside_one():
    shared = cluster(links=(link(ranks_per_port=2), cluster().links[1]))
    assert [slowest(shared, groups) for groups in ([(0, 1)], [(0, 2)], [(0, 2), (1, 3)])] == [50, 100, 50]
    wide = cluster(ranks_per_chip=2, links=(link(ranks_per_port=2), cluster().links[1]))
    assert slowest(wide, [(0, 1)]) == slowest(wide, [range(8)]) == 100
    assert wide.link_of((0, 1)).domain == "node"
    assert slowest(cluster(), [(rank,) for rank in range(8)]) == math.inf, "groups of one rank send nothing"


@given(st.sampled_from(("trn1.32xlarge", "trn2u.48xlarge", "p4d.24xlarge", "h200")), st.data())
def test_company_never_makes_a_group_faster(name: str, data: st.DataObject):
    some = load_cluster(name, 5)
    ranks = data.draw(st.permutations(range(some.num_ranks)))
    size = data.draw(st.integers(2, 12))
    groups = [ranks[start : start + size] for start in range(0, 5 * size, size)][: some.num_ranks // size]
    assert 0 < slowest(some, groups) <= min(slowest(some, [group]) for group in groups)


# -- placements -----------------------------------------------------------------------------------------


@given(st.integers(1, 70).flatmap(lambda size: st.permutations(range(size))))
def test_any_permutation_survives_its_text(order: list[int]):
    placement = Placement(local_ranks=tuple(order))
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(32), "0-31"),
        ([0], "0"),
        ([1, 0], "1-0"),
        ([3, 2, 1, 0], "3-0"),
        ([0, 2, 1, 3], "0/2-1/3"),
        ([*range(16), *range(48, 64), *range(16, 48)], "0-15/48-63/16-47"),
        ([row * 2 + column for column in range(2) for row in range(4)], "0-6:2/1-7:2"),
        ([6, 4, 2, 0, 7, 5, 3, 1], "6-0:2/7-1:2"),
    ],
)
def test_text_is_the_longest_runs_from_left_to_right(ranks: list[int], text: str):
    placement = Placement(local_ranks=tuple(ranks))
    assert str(placement) == text and Placement.parse(text) == placement


@pytest.mark.parametrize(
    ("says", "texts"),
    [
        ("not a run", ["", "0-3/", "a", "0 - 3", "-1", "٣"]),
        ("never reach", ["0-3:0", "0-3:2"]),
        ("not a permutation", ["0-3/3", "1-3"]),
        ("at most 4096", ["0-99999999", "0-4095/4096"]),
    ],
)
def test_wrong_text_is_refused(says: str, texts: list[str]):
    for text in texts:
        with pytest.raises(InputError, match=says):
            Placement.parse(text)
    with pytest.raises(InputError, match="at least one rank"):
        Placement(local_ranks=())
