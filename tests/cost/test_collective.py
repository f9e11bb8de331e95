"""What collectives send and take: rings played step by step, links counted by hand, and other ways through a group."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.calibration import uncalibrated
from autoshard.cost.collective import Ring, mesh_ring
from autoshard.layout.layout import Collective
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.spec.cluster import Algorithm
from tests.cost.cases import cluster, model

PP, TP, DP = ("pp",), ("kv", "rep"), ("edp", "ep", "cp")
NEAR, FAR = 0.6, 0.8  # told apart from each other and from 1
REACHED = replace(uncalibrated(), near_link_efficiency=NEAR, far_link_efficiency=FAR)
SIZES, EVERYTHING = st.integers(1, 9), st.floats(1, 1e12)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")


def collective(kind, atoms=("kv",)):
    return Collective(kind=kind, dim=None, atoms=atoms)


def mesh(text, place):
    return mesh_of(Candidate.parse(text, place.num_ranks), model("llama3-70b"), place)


def ring_of(text, atoms, place, calibration=REACHED):
    return mesh_ring(place, mesh(text, place), atoms, calibration)


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


@given(SIZES, EVERYTHING, st.floats(0, 1e-2), st.sampled_from(KINDS))
def test_a_collective_sends_and_takes_what_a_ring_played_step_by_step_does(size, message_bytes, start_s, kind):
    hop_s, bandwidth = 1e-6, 1e9
    ring = Ring(size=size, bandwidth_bytes_per_s=bandwidth, latency_s=(size - 1) * hop_s, start_s=start_s)
    steps, pieces = step_by_step(kind, size)
    sent = pieces * message_bytes / size
    starts_s = (size - 1 if kind == "permute" else 1) * start_s  # of hosts, for each send
    assert ring.sent_bytes(collective(kind), message_bytes) == pytest.approx(sent, rel=1e-12)
    found = ring.time_s(collective(kind), message_bytes)
    assert found == pytest.approx(starts_s + sent / bandwidth + steps * hop_s, rel=1e-12)
    assert ring.send_s(message_bytes) == start_s + message_bytes / bandwidth + ring.latency_s


@given(SIZES, EVERYTHING)
def test_a_slice_is_free_and_a_maximum_goes_around_as_a_sum_does(size, message_bytes):
    ring = Ring(size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6, start_s=1e-4)
    assert ring.time_s(collective("slice"), message_bytes) == ring.sent_bytes(collective("slice"), message_bytes) == 0
    for priced in (ring.time_s, ring.sent_bytes):
        assert priced(collective("all_reduce_max"), message_bytes) == priced(collective("all_reduce"), message_bytes)


def test_who_is_alone_sends_nothing_and_starts_nothing():
    place, slow = cluster("trn1.32xlarge", 2), replace(REACHED, collective_s=1e-3)
    assert [ring_of("tp=8,pp=2,dp=4", atoms, place, slow).start_s for atoms in (TP, PP, ("rep",))] == [1e-3, 1e-3, 0]
    ring = ring_of("tp=8,pp=1,dp=8", ("rep",), place, slow)
    for kind in KINDS:
        assert ring.sent_bytes(collective(kind), 1e6) == ring.time_s(collective(kind), 1e6) == 0
    assert ring_of("tp=8,pp=1,dp=8", PP, place, slow).send_s(1e6) == 0


@pytest.mark.parametrize(
    ("text", "atoms", "size", "bandwidth", "latency_s"),
    [
        # 16 DMA engines of 17 GB/s move every byte twice, less than the 192 GB/s that leave a chip; 31 hops of 1.5 us
        ("tp=32,pp=8,dp=2", TP, 32, 16 * 17e9 / 2 * NEAR, 31 * 1.5e-6),
        # 32 groups share the 8 NICs of a node
        ("tp=32,pp=1,dp=16", DP, 16, 8 * 12.5e9 / 32 * FAR, 15 * 15e-6),
        # 4 members on each of 16 nodes: 3 hops inside each, 15 between; 8 groups share the NICs
        ("tp=8,pp=1,dp=64", DP, 64, 8 * 12.5e9 / 8 * FAR, 16 * 3 * 1.5e-6 + 15 * 15e-6),
    ],
)
def test_rings_on_16_trn1_nodes_by_hand(text, atoms, size, bandwidth, latency_s):
    ring = ring_of(text, atoms, cluster("trn1.32xlarge", 16))
    assert (ring.size, ring.bandwidth_bytes_per_s) == (size, pytest.approx(bandwidth))
    assert ring.latency_s == pytest.approx(latency_s)


def faster(link, factor):
    return replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)


# Of trn1, 4 chips make a ring of one cycle, 96 GB/s; 16 have both, where the DMA engines of a core, 136, are the limit.
# Of trn2, a rank is two of eight cores: the chip's memory gives it 1450 / 4 GB/s, and its links 512, or half.
@pytest.mark.parametrize(
    ("name", "tp", "quick", "bandwidth"),
    [
        ("trn1.32xlarge", 8, None, 192e9 / 2),
        ("trn1.32xlarge", 32, None, 136e9),
        ("trn2.48xlarge", 16, None, 512e9 / 2),
        ("trn2.48xlarge", 64, None, 1450e9 / 4),
        ("trn1.32xlarge", 8, "memory", 192e9 / 2),
        ("trn1.32xlarge", 32, "memory", 192e9),
        # The memory of a chip is no torus, so that all of it serves a ring of part of the node.
        ("trn1.32xlarge", 8, "wires", 136e9),
    ],
)
def test_a_ring_over_a_part_of_the_torus_uses_one_of_its_two_cycles(name, tp, quick, bandwidth):
    place = cluster(name, 1)
    memory, *wires = place.links
    links = {
        None: place.links,
        "memory": (faster(memory, 100), *wires),
        "wires": (memory, *(faster(link, 100) for link in wires)),
    }[quick]
    ring = ring_of(f"tp={tp},pp=1", TP, replace(place, links=links))
    assert ring.bandwidth_bytes_per_s == pytest.approx(bandwidth * NEAR)


class TestHops:
    """What goes to single others has one port, not all ports of a node."""

    place = cluster("h100-80", 4)  # 8 ranks a node, each with 450 GB/s inside and a 50 GB/s port of its own outside

    def test_an_exchange_is_as_slow_as_what_leaves_a_node_if_anything_does(self):
        outside = ring_of("tp=1,pp=1,dp=32", DP, self.place).time_s(collective("all_to_all", DP), 1e9)
        assert outside == pytest.approx(24 / 32 * 1e9 / (50e9 * FAR) + 14e-6)
        inside = ring_of("tp=8,pp=1,dp=4", TP, self.place).time_s(collective("all_to_all", TP), 1e9)
        assert inside == pytest.approx(7 / 8 * 1e9 / (450e9 * NEAR) + 3.4e-6)
        # 32 ranks leave a node of trn1 at once, by 8 ports of 12.5 GB/s.
        exchange = ring_of("tp=1,pp=1,dp=64", DP, cluster("trn1.32xlarge", 2)).exchange
        assert exchange and exchange.seconds_per_byte == pytest.approx(32 / 64 / (8 * 12.5e9 / 32 * FAR))

    def test_a_ring_of_keys_waits_for_its_hop_between_nodes_in_every_round(self):
        found = ring_of("tp=1,pp=1,cp=32,dp=1", ("cp",), self.place).time_s(collective("permute", ("cp",)), 1e8)
        assert found == pytest.approx(31 * (1e8 / (50e9 * FAR) + 14e-6))

    def test_stages_send_over_the_links_between_them(self):
        near = ring_of("tp=1,pp=4,dp=8", PP, self.place)
        assert near.send_s(1e9) == pytest.approx(1e9 / (50e9 * FAR) + 14e-6), "dp is inside pp: stages are nodes"
        inside = ring_of("tp=1,pp=8,dp=1", PP, cluster("h100-80", 1))
        assert inside.send_s(1e9) == pytest.approx(1e9 / (450e9 * NEAR), rel=1e-3)
        torus = ring_of("tp=8,pp=4,dp=1", PP, cluster("trn1.32xlarge", 1))
        assert torus.send_s(1e9) == pytest.approx(1e9 * 2 / (192e9 / 4 * NEAR), rel=1e-3), "two ranks, one of 4 wires"
        nodes = ring_of("tp=32,pp=8,dp=2", PP, cluster("trn1.32xlarge", 16))
        assert nodes.send_s(1e6) == pytest.approx(1e6 / (8 * 12.5e9 / 32 * FAR) + 15e-6), "all ranks share the NICs"


class TestRoutes:
    """Ways beside the ring, as the platform's library documents them."""

    @pytest.mark.parametrize("size", [2**10, 2**19, 2**25, 2**28])
    def test_trn2_never_takes_the_flat_ring(self, size):
        ring = ring_of("tp=4,pp=1,dp=64", DP, cluster("trn2.48xlarge", 4))
        assert not ring.is_flat and len(ring.routes) == 3
        taken = [route for route in ring.routes if route.up_to_bytes is None or size <= route.up_to_bytes]
        assert ring.time_s(collective("all_gather", DP), size) == pytest.approx(taken[-1].time_s(size))

    @given(st.floats(1, 1e10), st.sampled_from(["tp=8,pp=1,dp=16", "tp=2,pp=1,dp=64", "tp=32,pp=1,dp=4"]))
    def test_trn1_takes_the_faster_of_ring_and_nodes(self, size, text):
        ring, gathered = ring_of(text, DP, cluster("trn1.32xlarge", 4)), collective("all_gather", DP)
        flat_s, (route,) = replace(ring, routes=()).time_s(gathered, size), ring.routes
        assert ring.time_s(gathered, size) == pytest.approx(min(flat_s, route.time_s(size)))


def test_a_collective_in_a_pipeline_over_nodes_starts_later_for_each_rank_that_has_to_join_it():
    starts = replace(REACHED, collective_s=1e-4, joined_s=1e-5)
    two, one = cluster("h100-80", 2), cluster("h100-80", 1)

    def starts_s(text, atoms, kind="all_reduce", place=two):
        return ring_of(text, atoms, place, starts).starts_s(collective(kind, atoms))

    assert starts_s("tp=8,pp=2,dp=1", TP) == pytest.approx(1e-4 + 8e-5)
    assert starts_s("tp=2,pp=2,dp=4", TP) == pytest.approx(1e-4 + 2e-5)
    assert starts_s("tp=8,pp=1,dp=2", TP) == starts_s("tp=4,pp=2,dp=1", TP, place=one) == 1e-4, "no pipeline or network"
    assert starts_s("tp=1,pp=2,dp=8", TP) == 0.0, "nobody to join"
    gathers = [starts_s("tp=1,pp=2,cp=4,dp=2", ("cp",), kind) for kind in KINDS]
    assert gathers == pytest.approx([1e-4 + 4e-5] * 4 + [3e-4]), (
        "hops of a ring of keys are sends, which two ranks join"
    )
    sends = ring_of("tp=8,pp=2,dp=1", PP, two, starts)
    assert sends.send_s(0) == pytest.approx(1e-4 + 14e-6), "so is what goes to the next stage"


@pytest.mark.parametrize("text", ["tp=2,pp=2,cp=4,dp=1", "tp=1,pp=4,cp=2,ep=2,dp=2"])
def test_atoms_along_which_there_is_but_one_rank_change_no_price(text):
    starts, two = replace(REACHED, collective_s=1e-4, joined_s=1e-5), cluster("h100-80", 2)
    longer = tuple(atom for atom in DP if mesh(text, two).size(atom) > 1)
    assert 0 < len(longer) < len(DP)
    whole, part = (ring_of(text, atoms, two, starts) for atoms in (DP, longer))
    for kind in set(KINDS) - {"permute"}:  # a ring of keys never goes along replicas
        assert whole.time_s(collective(kind), 1e8) == part.time_s(collective(kind), 1e8)


def test_hosts_that_start_kernels_start_a_collective_while_the_device_works():
    ring = Ring(size=4, bandwidth_bytes_per_s=1e9, latency_s=1e-5, start_s=1e-3)
    busy = ring.busy_s(collective("all_gather"), 1e6, eager=True)
    assert busy == ring.wire_s(collective("all_gather"), 1e6)
    assert ring.busy_s(collective("all_gather"), 1e6, eager=False) == pytest.approx(busy + 1e-3)


@pytest.mark.parametrize("atoms", [TP, DP])
def test_a_node_without_a_link_of_its_own_sends_over_the_network_as_over_a_link_like_it(atoms: tuple[str, ...]):
    place, calibration = cluster("h100-80", 2), replace(REACHED, near_link_efficiency=FAR)
    network, tree = place.links[-1], Algorithm(kind="hierarchical", hops="log", source="made for this test")
    alone = replace(place, links=(network,), algorithms=(tree,))
    linked = replace(alone, links=(replace(network, domain="node"), network))
    assert ring_of("tp=8,pp=1", atoms, alone, calibration) == ring_of("tp=8,pp=1", atoms, linked, calibration)
