"""The order of the machines of the catalogue, and what a machine that is better or only named otherwise must not do.

Constants are those that come with autoshard for each machine, and each machine cuts a layout as is best on it: what
somebody gets who asks about another machine. ``test_metamorphic.py`` has constants of any size, and keeps the cut.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoshard.cost.departures import chip_family
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Prediction
from autoshard.search.bound.request import Request
from autoshard.spec.cluster import LOCAL, Cluster, Domain
from autoshard.spec.cluster_catalogue import cluster_names, load_node_type
from autoshard.spec.model import ModelSpec
from autoshard.spec.workload import Precision, Workload
from tests.cost.cases import cluster, model
from tests.slower import rest_is_slow

MACHINES = tuple(name for name in cluster_names() if name != LOCAL)
NETWORKED = tuple(name for name in MACHINES if load_node_type(name).max_nodes > 1)
# Five models, each in four layouts: every axis alone and with others, ZeRO, schedules, kinds of recompute.
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "llama3-8b": ("tp=1,zero=3", "tp=8", "tp=2,pp=4", "tp=4,cp=2,cp_order=zigzag"),
    "llama3-70b": ("tp=1,zero=3,recompute=full", "tp=8,pp=2", "tp=4,pp=4", "tp=4,pp=2,cp=2,cp_order=zigzag"),
    "gpt2-xl": ("tp=1", "tp=1,pp=4", "tp=1,pp=2,zero=3", "tp=1,pp=8,schedule=zb_h1"),
    "mixtral-8x7b": ("tp=1,ep=8", "tp=2,pp=2,ep=4", "tp=8,pp=2", "tp=1,pp=4,ep=2,vp=2,schedule=interleaved"),
    "qwen3-8b": ("tp=1,zero=3,mbs=2", "tp=4,mbs=2", "tp=2,pp=2,recompute=full", "tp=1,pp=4,schedule=gpipe"),
}  # fmt: skip
CASES = tuple((name, text) for name, texts in LAYOUTS.items() for text in texts)
USUAL = ("trn1.32xlarge", "trn2.48xlarge", "h100-80")
SAME = 1e-9


def prediction(spec: ModelSpec, place: Cluster, text: str, global_batch: int = 64) -> Prediction:
    """Predict a step of a layout on a machine, with the constants that come with autoshard for it."""
    workload = Workload(
        seq_len=min(4096, spec.max_positions), global_batch=global_batch, precision=Precision.named("bf16")
    )
    request = Request(model=spec, cluster=place, workload=workload, engines=(place.engine,))
    plan = request.plan(Candidate.parse(text, place.num_ranks), place.engine, tables=False)
    assert plan.prediction
    return plan.prediction


@functools.cache
def on(name: str, machine: str, text: str, nodes: int = 2, global_batch: int = 64) -> Prediction:
    """Predict a step on a machine of the catalogue."""
    return prediction(model(name), cluster(machine, nodes), text, global_batch)


def place_of(machine: str) -> Cluster:
    """Return two nodes of a machine, or the one that it can have."""
    return cluster(machine, 2 if machine in NETWORKED else 1)


def first_usual(machines: Sequence[str]) -> list[Any]:
    """Return parameters of which the usual machines are fast, and few others slow."""
    usual = sorted(machines, key=lambda name: name not in USUAL)
    return rest_is_slow(usual, len(USUAL), 5)


def text_for(machine: str) -> str:
    """Return a layout that sends something over every link of a machine."""
    return "tp=8,pp=2" if place_of(machine).num_ranks >= 16 else "tp=2"


def seconds(place: Cluster, text: str, global_batch: int = 64) -> float:
    """Return the seconds of a step of llama3-8b."""
    return prediction(model("llama3-8b"), place, text, global_batch).step_time_s


@functools.cache
def seconds_on(machine: str) -> float:
    """Return the same on a machine of the catalogue as it stands."""
    return seconds(place_of(machine), text_for(machine))


def with_chip(place: Cluster, **changes: object) -> Cluster:
    """Return a machine with another chip."""
    return replace(place, chip=replace(place.chip, **changes))  # pyright: ignore[reportArgumentType]


def with_link(place: Cluster, domain: Domain, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
    """Return a machine with so many times the bandwidth, and the latency, of one of its links."""
    links = (
        replace(
            link,
            bandwidth_bytes_per_s=bandwidth * link.bandwidth_bytes_per_s,
            latency_s=latency * link.latency_s,
        )
        if link.domain == domain
        else link
        for link in place.links
    )
    return replace(place, links=tuple(links))


def network_bytes_per_s(place: Cluster) -> float:
    """Return what a node gets of the network, all of its ports together."""
    link = place.links[-1]
    return link.bandwidth_bytes_per_s / link.ranks_per_port * place.ranks_per_node


def faster_chips(place: Cluster) -> Mapping[str, Cluster]:
    """Return a machine with each rate of its chip half as large again."""
    chip = place.chip
    products = {name: 1.5 * rate for name, rate in chip.matrix_flops_per_s.items()}
    return {
        "products": with_chip(place, matrix_flops_per_s=products),
        "vectors": with_chip(place, vector_flops_per_s=1.5 * chip.vector_flops_per_s),
        "memory": with_chip(place, memory_bandwidth_bytes_per_s=1.5 * chip.memory_bandwidth_bytes_per_s),
    }


class TestOrder:
    @pytest.mark.parametrize(
        ("name", "text"), rest_is_slow(sorted(CASES, key=lambda case: case not in CASES[2::4]), 2, 4)
    )
    def test_a_later_generation_is_faster_and_more_memory_beside_the_same_chip_not_slower(self, name: str, text: str):
        b200, h200, h100, a100 = (on(name, one, text).step_time_s for one in ("b200", "h200", "h100-80", "a100-80"))
        assert b200 < h200 <= h100 < a100

    @pytest.mark.parametrize(
        ("one", "other"),
        rest_is_slow([
            ("trn2.48xlarge", "trn2u.48xlarge"), ("h100-80", "p5.48xlarge"), ("h200", "p5en.48xlarge"),
            ("b200", "p6-b200.48xlarge"), ("a100-80", "p4de.24xlarge"),
        ], 1, 4),
    )  # fmt: skip
    def test_inside_a_node_only_the_chip_counts_whoever_lets_the_machine(self, one: str, other: str):
        for name, text in (("llama3-8b", "tp=1,zero=3"), ("llama3-70b", "tp=8"), ("mixtral-8x7b", "tp=2,pp=2")):
            assert on(name, one, text, nodes=1).time_parts == on(name, other, text, nodes=1).time_parts


@pytest.mark.parametrize("machine", first_usual(MACHINES))
class TestEveryMachine:
    def test_a_faster_chip_makes_no_step_longer_and_faster_products_make_it_shorter(self, machine: str):
        place, text = place_of(machine), text_for(machine)
        before, after = seconds_on(machine), {name: seconds(one, text) for name, one in faster_chips(place).items()}
        assert after["products"] < before
        assert max(after.values()) <= before * (1 + SAME), after

    def test_a_better_link_makes_no_step_longer_and_all_of_them_make_it_shorter(self, machine: str):
        place, text = place_of(machine), text_for(machine)
        before, every = seconds_on(machine), place
        for link in place.links:
            every = with_link(every, link.domain, bandwidth=2, latency=0.25)
            assert seconds(with_link(place, link.domain, latency=0.25), text) <= before * (1 + SAME), link.domain
        assert seconds(every, text) < before

    def test_names_and_prices_take_no_time(self, machine: str):
        place, spec = place_of(machine), replace(model("llama3-8b"), name="a-model-of-somebody")
        chips = {load_node_type(one).chip.name for one in MACHINES}
        alike = sorted(one for one in chips if chip_family(one) == chip_family(place.chip.name))
        price = {"price_usd_per_node_hour": 1.0, "price_date": None, "sources": {"default": "a contract"}}
        other = replace(place, name="a-machine-of-somebody", **price)
        for name in alike:  # of one family: their rates are those of the machine here
            renamed = prediction(spec, with_chip(other, name=name), text_for(machine))
            assert renamed.step_time_s == seconds_on(machine)


@pytest.mark.parametrize("machine", first_usual(NETWORKED))
class TestNetwork:
    def test_a_step_follows_what_the_network_is_said_to_have(self, machine: str):
        units = load_node_type(machine).nodes_per_ultraserver
        place, text = cluster(machine, 2 * units), "tp=8,zero=1"
        batch, rate = place.num_ranks, network_bytes_per_s(place)
        slower, same = (seconds(place.with_network(one * rate), text, batch) for one in (0.25, 1.0))
        assert same == pytest.approx(seconds(place, text, batch), rel=SAME)
        assert same < slower

    def test_twice_the_nodes_for_twice_the_batch_take_no_less_but_for_an_update_over_more_ranks(self, machine: str):
        text = text_for(machine)
        few, many = (on("llama3-8b", machine, text, nodes, 128 * nodes) for nodes in (2, 4))
        few_s, many_s = (one.step_time_s - one.time_parts["update"] for one in (few, many))
        assert few_s * (1 - SAME) <= many_s < 2 * few_s


@pytest.mark.parametrize("mbs", [1, 4, 16])
def test_fewer_starts_queue_where_tp_leaves_the_node_and_what_queues_has_room(mbs: int):
    """Hosts of nanotron start 700 kernels ahead of a device in a node, and 140 over nodes."""
    place = replace(place_of("h100-80"), num_nodes=4)
    queued = dict[int, int]()
    for tp in (8, 16):
        found = prediction(model("llama3-8b"), place, f"tp={tp},pp=1,dp={32 // tp},mbs={mbs},kernels=nanotron", 512)
        (memory,) = found.stage_memory
        queued[tp] = memory.parts["queued"]
        assert queued[tp] > 0 and memory.total <= place.rank_memory_bytes
    assert mbs == 16 or queued[16] < 0.4 * queued[8], "a fifth; over nodes devices are further behind"
