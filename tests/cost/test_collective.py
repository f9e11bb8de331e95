from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.cost.calibration import uncalibrated
from autoshard.cost.collective import Ring, efficiency, mesh_ring
from autoshard.layout.layout import Collective
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.spec.cluster import Link
from tests.cost.cases import cluster, model

PP = ("pp",)
TP = ("kv", "rep")
DP = ("edp", "ep", "cp")
NEAR, FAR = 0.6, 0.8  # told apart from each other and from 1
REACHED = replace(uncalibrated(), near_link_efficiency=NEAR, far_link_efficiency=FAR)
SIZES = st.integers(1, 9)
EVERYTHING = st.floats(1, 1e12)


def collective(kind):
    return Collective(kind=kind, dim=None, atoms=("kv",))


def mesh(text, place):
    return mesh_of(Candidate.parse(text, place.num_ranks), model("llama3-70b"), place)


def step_by_step(kind, size):
    """Play a ring literally: in every step each rank sends one piece; return steps and pieces of 1/size sent by one."""
    if kind == "permute":
        return size - 1, (size - 1) * size  # in each round a rank hands its neighbour a whole tensor
    if kind == "all_to_all":
        return size - 1, size - 1  # one piece for each of the others
    steps = sent = 0
    if kind in ("reduce_scatter", "all_reduce"):
        summed = {(rank, piece): {rank} for rank in range(size) for piece in range(size)}
        while not any(len(summed[0, piece]) == size for piece in range(size)):
            moving = {(rank, (rank - steps) % size) for rank in range(size)}
            arriving = {((rank + 1) % size, piece): summed[rank, piece] for rank, piece in moving}
            summed = {key: parts | arriving.get(key, set()) for key, parts in summed.items()}
            steps, sent = steps + 1, sent + 1
    if kind in ("all_gather", "all_reduce"):
        have = [{rank} for rank in range(size)]
        newest = list(range(size))
        while any(len(pieces) < size for pieces in have):
            newest = [newest[rank - 1] for rank in range(size)]
            have = [pieces | {piece} for pieces, piece in zip(have, newest, strict=True)]
            steps, sent = steps + 1, sent + 1
    return steps, sent


@given(SIZES, EVERYTHING, st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]))
def test_a_collective_sends_and_takes_what_a_ring_played_step_by_step_does(size, message_bytes, kind):
    hop_s, bandwidth = 1e-6, 1e9
    ring = Ring(size=size, bandwidth_bytes_per_s=bandwidth, latency_s=(size - 1) * hop_s)
    steps, pieces = step_by_step(kind, size)
    sent = pieces * message_bytes / size
    assert ring.sent_bytes(collective(kind), message_bytes) == pytest.approx(sent, rel=1e-12)
    assert ring.time_s(collective(kind), message_bytes) == pytest.approx(sent / bandwidth + steps * hop_s, rel=1e-12)


@given(EVERYTHING, st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]))
def test_a_group_of_one_sends_nothing_and_takes_no_time(message_bytes, kind):
    place = cluster("trn1.32xlarge", 2)
    ring = mesh_ring(place, mesh("tp=8,dp=8", place), ("rep",), REACHED)
    assert ring.size == 1
    assert ring.sent_bytes(collective(kind), message_bytes) == 0
    assert ring.time_s(collective(kind), message_bytes) == 0


@given(SIZES, EVERYTHING)
def test_a_slice_is_free_and_a_maximum_goes_around_as_a_sum_does(size, message_bytes):
    ring = Ring(size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    assert ring.time_s(collective("slice"), message_bytes) == ring.sent_bytes(collective("slice"), message_bytes) == 0
    for priced in (ring.time_s, ring.sent_bytes):
        assert priced(collective("all_reduce_max"), message_bytes) == priced(collective("all_reduce"), message_bytes)


def test_tp_32_fills_a_trn1_node_and_is_as_fast_as_the_dma_engines_of_a_core():
    place = cluster("trn1.32xlarge", 16)
    ring = mesh_ring(place, mesh("tp=32,pp=8,dp=2", place), TP, REACHED)
    # 16 engines of 17 GB/s move every byte twice, less than the 192 GB/s that leave a chip; 31 hops of 1.5 us
    assert (ring.size, ring.bandwidth_bytes_per_s) == (32, pytest.approx(16 * 17e9 / 2 * NEAR))
    assert ring.latency_s == pytest.approx(31 * 1.5e-6)


def test_32_data_parallel_groups_share_the_8_nics_of_a_trn1_node():
    place = cluster("trn1.32xlarge", 16)
    ring = mesh_ring(place, mesh("tp=32,pp=1,dp=16", place), DP, REACHED)
    assert (ring.size, ring.bandwidth_bytes_per_s) == (16, pytest.approx(8 * 12.5e9 / 32 * FAR))
    assert ring.latency_s == pytest.approx(15 * 15e-6)


def test_a_ring_visits_the_members_of_a_node_before_it_leaves_it():
    place = cluster("trn1.32xlarge", 16)
    ring = mesh_ring(place, mesh("tp=8,pp=1,dp=64", place), DP, REACHED)
    # 4 members on each of 16 nodes: 3 hops inside each, 15 between; 8 groups share the NICs
    assert ring.latency_s == pytest.approx(16 * 3 * 1.5e-6 + 15 * 15e-6)
    assert ring.bandwidth_bytes_per_s == pytest.approx(8 * 12.5e9 / 8 * FAR)


def test_a_send_to_the_next_stage_shares_the_nics_with_the_other_ranks_of_the_node():
    place = cluster("trn1.32xlarge", 16)
    ring = mesh_ring(place, mesh("tp=32,pp=8,dp=2", place), PP, REACHED)
    piece = 8192 // 32 * 8192 * 2
    assert ring.send_s(piece) == pytest.approx(piece / (8 * 12.5e9 / 32 * FAR) + 15e-6)


def test_without_a_pipeline_there_is_nobody_to_send_to():
    place = cluster("h100-80", 1)
    assert mesh_ring(place, mesh("tp=8,pp=1,dp=1", place), PP, REACHED).send_s(1e9) == 0


@given(st.sampled_from([2.0, 3.0, 10.0]), st.sampled_from(["tp=8,pp=4,dp=4", "tp=32,pp=2,dp=2", "tp=8,pp=1,dp=16"]))
def test_faster_links_make_every_ring_as_much_faster(factor, text):
    place = cluster("trn1.32xlarge", 4)
    links = tuple(faster(link, factor) for link in place.links)
    quick = replace(place, links=links)
    for atoms in (TP, DP):
        before = mesh_ring(place, mesh(text, place), atoms, REACHED)
        after = mesh_ring(quick, mesh(text, quick), atoms, REACHED)
        assert after.bandwidth_bytes_per_s == pytest.approx(factor * before.bandwidth_bytes_per_s)
        assert after.latency_s == before.latency_s


def faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)


# Of trn1, 4 chips make a ring of one cycle, 96 GB/s; 16 have both, where the DMA engines of a core, 136, are the limit.
# Of trn2, a rank is two of eight cores: the chip's memory gives it 1450 / 4 GB/s, and its links 512, or half.
@pytest.mark.parametrize(
    ("name", "tp", "bandwidth"),
    [
        ("trn1.32xlarge", 8, 192e9 / 2),
        ("trn1.32xlarge", 32, 136e9),
        ("trn2.48xlarge", 16, 512e9 / 2),
        ("trn2.48xlarge", 64, 1450e9 / 4),
    ],
)
def test_a_ring_over_a_part_of_the_torus_uses_one_of_its_two_cycles(name, tp, bandwidth):
    place = cluster(name, 1)
    ring = mesh_ring(place, mesh(f"tp={tp},pp=1", place), TP, REACHED)
    assert ring.bandwidth_bytes_per_s == pytest.approx(bandwidth * NEAR)


@pytest.mark.parametrize(("tp", "wires"), [(8, 0.5), (32, 1.0)])
def test_with_memory_as_fast_as_may_be_all_of_the_torus_is_both_of_its_cycles(tp, wires):
    place = cluster("trn1.32xlarge", 1)
    quick = replace(place, links=(faster(place.links[0], 100), *place.links[1:]))
    ring = mesh_ring(quick, mesh(f"tp={tp},pp=1", quick), TP, REACHED)
    assert ring.bandwidth_bytes_per_s == pytest.approx(192e9 * wires * NEAR)


def test_the_memory_of_a_chip_is_no_torus_so_that_all_of_it_serves_a_ring_of_part_of_the_node():
    # Wires so wide that a core's DMA engines are the limit: whatever share of the wires is used, theirs is whole.
    place = cluster("trn1.32xlarge", 1)
    wide = replace(place, links=(place.links[0], *(faster(link, 100) for link in place.links[1:])))
    for tp in (2, 8, 32):
        mesh_here = mesh(f"tp={tp},pp=1,dp={32 // tp}", wide)
        assert mesh_ring(wide, mesh_here, TP, REACHED).bandwidth_bytes_per_s == pytest.approx(136e9 * NEAR)


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn2u.48xlarge", "h100-80", "p4d.24xlarge"])
def test_an_efficiency_is_that_of_links_inside_a_node_or_between_nodes(name):
    links = {link.domain: efficiency(link, REACHED) for link in cluster(name, 2).links}
    assert links.pop("cluster") == FAR
    assert set(links.values()) == {NEAR}


class TestHops:
    """What goes to single others has one port, not all ports of a node."""

    place = cluster("h100-80", 4)  # 8 ranks a node, each with 450 GB/s inside and a 50 GB/s port of its own outside

    def test_an_exchange_over_nodes_is_as_slow_as_what_leaves_a_node(self):
        ring = mesh_ring(self.place, mesh("tp=1,pp=1,dp=32", self.place), DP, REACHED)
        found = ring.time_s(Collective(kind="all_to_all", dim="slots", to_dim="experts", atoms=DP), 1e9)
        assert found == pytest.approx(24 / 32 * 1e9 / (50e9 * FAR) + 14e-6)

    def test_an_exchange_inside_a_node_never_leaves_it(self):
        ring = mesh_ring(self.place, mesh("tp=8,pp=1,dp=4", self.place), TP, REACHED)
        found = ring.time_s(Collective(kind="all_to_all", dim="slots", to_dim="experts", atoms=TP), 1e9)
        assert found == pytest.approx(7 / 8 * 1e9 / (450e9 * NEAR) + 3.4e-6)

    def test_a_ring_of_keys_waits_for_its_hop_between_nodes_in_every_round(self):
        ring = mesh_ring(self.place, mesh("tp=1,pp=1,cp=32,dp=1", self.place), ("cp",), REACHED)
        found = ring.time_s(Collective(kind="permute", dim="kv_seq", atoms=("cp",)), 1e8)
        assert found == pytest.approx(31 * (1e8 / (50e9 * FAR) + 14e-6))

    def test_stages_of_one_node_send_over_its_links_and_others_over_the_network(self):
        near = mesh_ring(self.place, mesh("tp=1,pp=4,dp=8", self.place), PP, REACHED)
        assert near.send_s(1e9) == pytest.approx(1e9 / (50e9 * FAR) + 14e-6), "dp is inside pp: stages are nodes"
        place = cluster("h100-80", 1)
        inside = mesh_ring(place, mesh("tp=1,pp=8,dp=1", place), PP, REACHED)
        assert inside.send_s(1e9) == pytest.approx(1e9 / (450e9 * NEAR), rel=1e-3)

    def test_a_hop_on_a_torus_has_the_wire_to_one_neighbour(self):
        place = cluster("trn1.32xlarge", 1)
        ring = mesh_ring(place, mesh("tp=8,pp=4,dp=1", place), PP, REACHED)
        assert ring.send_s(1e9) == pytest.approx(1e9 * 2 / (192e9 / 4 * NEAR), rel=1e-3), "both ranks of a chip send"


class TestRoutes:
    """Ways beside the ring, as the platform's library documents them."""

    def test_between_the_nodes_of_an_ultraserver_takes_time(self):
        place = cluster("trn2u.48xlarge", 4)
        group = mesh("tp=64,pp=1,dp=4", place)
        ring = mesh_ring(place, group, DP, REACHED)
        gathered = Collective(kind="all_gather", dim=None, atoms=DP)
        assert ring.time_s(gathered, 1e9) > 3 / 4 * 1e9 / 100e9

    @pytest.mark.parametrize("size", [2**10, 2**19, 2**25, 2**28])
    def test_trn2_never_takes_the_flat_ring(self, size):
        place = cluster("trn2.48xlarge", 4)
        ring = mesh_ring(place, mesh("tp=4,pp=1,dp=64", place), DP, REACHED)
        gathered = Collective(kind="all_gather", dim=None, atoms=DP)
        assert not ring.is_flat and len(ring.routes) == 3
        taken = [route for route in ring.routes if route.up_to_bytes is None or size <= route.up_to_bytes]
        assert ring.time_s(gathered, size) == pytest.approx(taken[-1].time_s(size))

    @given(st.floats(1, 1e10), st.sampled_from(["tp=8,pp=1,dp=16", "tp=2,pp=1,dp=64", "tp=32,pp=1,dp=4"]))
    def test_trn1_takes_the_faster_of_ring_and_nodes(self, size, text):
        place = cluster("trn1.32xlarge", 4)
        ring = mesh_ring(place, mesh(text, place), DP, REACHED)
        flat = replace(ring, routes=())
        (route,) = ring.routes
        gathered = Collective(kind="all_gather", dim=None, atoms=DP)
        assert ring.time_s(gathered, size) == pytest.approx(min(flat.time_s(gathered, size), route.time_s(size)))


STARTED = {"all_gather": 1, "all_reduce": 1, "all_to_all": 1, "slice": 0}  # each hop of a permutation besides


@given(SIZES, EVERYTHING, st.floats(0, 1e-2), st.sampled_from([*STARTED, "permute"]))
def test_each_send_and_each_collective_has_a_start_whatever_its_size(size, message_bytes, start_s, kind):
    free = Ring(size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    ring, one = replace(free, start_s=start_s), collective(kind)
    starts_s = STARTED.get(kind, size - 1) * start_s
    assert ring.time_s(one, message_bytes) == pytest.approx(starts_s + free.time_s(one, message_bytes), rel=1e-12)
    assert ring.send_s(message_bytes) == pytest.approx(start_s + free.send_s(message_bytes), rel=1e-12)
    assert ring.sent_bytes(one, message_bytes) == free.sent_bytes(one, message_bytes)


def test_who_is_alone_starts_nothing():
    place, slow = cluster("trn1.32xlarge", 2), replace(REACHED, collective_s=1e-3)
    here = mesh("tp=8,pp=2,dp=4", place)
    assert mesh_ring(place, here, TP, slow).start_s == mesh_ring(place, here, PP, slow).start_s == 1e-3
    assert mesh_ring(place, here, ("rep",), slow).start_s == 0
    alone = mesh("tp=8,pp=1,dp=8", place)
    assert mesh_ring(place, alone, PP, slow).start_s == mesh_ring(place, alone, PP, slow).send_s(1e6) == 0


@given(st.lists(st.tuples(SIZES, EVERYTHING, st.floats(1e6, 1e12), st.floats(0, 1e-3)), min_size=1, max_size=5))
def test_columns_of_rings_give_what_single_rings_give(rows):
    sizes, messages, bandwidths, latencies = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    many = Ring(size=sizes, bandwidth_bytes_per_s=bandwidths, latency_s=latencies, start_s=1e-4)
    for kind in ("all_gather", "all_reduce", "permute", "all_to_all", "slice"):
        times, sent = many.time_s(collective(kind), messages), many.sent_bytes(collective(kind), messages)
        for row, (size, message, bandwidth, latency) in enumerate(rows):
            one = Ring(size=size, bandwidth_bytes_per_s=bandwidth, latency_s=latency, start_s=1e-4)
            assert np.broadcast_to(times, sizes.shape)[row] == pytest.approx(one.time_s(collective(kind), message))
            assert np.broadcast_to(sent, sizes.shape)[row] == pytest.approx(one.sent_bytes(collective(kind), message))
