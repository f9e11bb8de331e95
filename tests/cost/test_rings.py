from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.rings import Ring, axis_of_atoms, mesh_ring, send_ring
from autoshard.layout.collective import Collective
from autoshard.plan.build import mesh_of
from autoshard.plan.candidate import Candidate
from autoshard.spec.link import Link
from tests.cost.cases import cluster, model

TP = ("kv", "rep")
DP = ("edp", "ep", "cp")
EFFICIENCY = 0.7
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
    ring = mesh_ring(place, mesh("tp=8,dp=8", place), ("rep",), EFFICIENCY)
    assert ring.size == 1
    assert ring.sent_bytes(collective(kind), message_bytes) == 0
    assert ring.time_s(collective(kind), message_bytes) == 0


@given(SIZES, EVERYTHING)
def test_a_slice_is_free_and_a_maximum_goes_around_as_a_sum_does(size, message_bytes):
    ring = Ring(size=size, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    assert ring.time_s(collective("slice"), message_bytes) == ring.sent_bytes(collective("slice"), message_bytes) == 0
    for priced in (ring.time_s, ring.sent_bytes):
        assert priced(collective("all_reduce_max"), message_bytes) == priced(collective("all_reduce"), message_bytes)


def test_tp_32_fills_a_trn1_node_and_has_all_wires_of_the_torus_for_itself():
    place = cluster("trn1.32xlarge", 16)
    ring = mesh_ring(place, mesh("tp=32,pp=8,dp=2", place), TP, EFFICIENCY)
    # 192 GB/s leave a chip in one direction; 31 hops of 1.5 us
    assert (ring.size, ring.bandwidth_bytes_per_s) == (32, pytest.approx(192e9 * EFFICIENCY))
    assert ring.latency_s == pytest.approx(31 * 1.5e-6)


def test_32_data_parallel_groups_share_the_8_nics_of_a_trn1_node():
    place = cluster("trn1.32xlarge", 16)
    ring = mesh_ring(place, mesh("tp=32,pp=1,dp=16", place), DP, EFFICIENCY)
    assert (ring.size, ring.bandwidth_bytes_per_s) == (16, pytest.approx(8 * 12.5e9 / 32 * EFFICIENCY))
    assert ring.latency_s == pytest.approx(15 * 15e-6)


def test_a_ring_visits_the_members_of_a_node_before_it_leaves_it():
    place = cluster("trn1.32xlarge", 16)
    ring = mesh_ring(place, mesh("tp=8,pp=1,dp=64", place), DP, EFFICIENCY)
    # 4 members on each of 16 nodes: 3 hops inside each, 15 between; 8 groups share the NICs
    assert ring.latency_s == pytest.approx(16 * 3 * 1.5e-6 + 15 * 15e-6)
    assert ring.bandwidth_bytes_per_s == pytest.approx(8 * 12.5e9 / 8 * EFFICIENCY)


def test_a_send_to_the_next_stage_shares_the_nics_with_the_other_ranks_of_the_node():
    place = cluster("trn1.32xlarge", 16)
    ring = send_ring(place, mesh("tp=32,pp=8,dp=2", place), EFFICIENCY)
    piece = 8192 // 32 * 8192 * 2
    assert ring.send_s(piece) == pytest.approx(piece / (8 * 12.5e9 / 32 * EFFICIENCY) + 15e-6)


def test_without_a_pipeline_there_is_nobody_to_send_to():
    place = cluster("h100-80", 1)
    assert send_ring(place, mesh("tp=8,pp=1,dp=1", place), EFFICIENCY).send_s(1e9) == 0


@given(st.sampled_from([2.0, 3.0, 10.0]), st.sampled_from(["tp=8,pp=4,dp=4", "tp=32,pp=2,dp=2", "tp=8,pp=1,dp=16"]))
def test_faster_links_make_every_ring_as_much_faster(factor, text):
    place = cluster("trn1.32xlarge", 4)
    links = tuple(faster(link, factor) for link in place.links)
    quick = replace(place, links=links)
    for atoms in (TP, DP):
        before = mesh_ring(place, mesh(text, place), atoms, EFFICIENCY)
        after = mesh_ring(quick, mesh(text, quick), atoms, EFFICIENCY)
        assert after.bandwidth_bytes_per_s == pytest.approx(factor * before.bandwidth_bytes_per_s)
        assert after.latency_s == before.latency_s


def faster(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)


@pytest.mark.parametrize(
    ("atoms", "axis"),
    [(("edp",), "dp"), (("ep",), "ep"), (("cp",), "cp"), (("rep",), "tp"), (("kv", "rep"), "tp"), (("pp",), "pp")],
)
def test_traffic_is_counted_as_that_of_the_axis(atoms, axis):
    assert axis_of_atoms(atoms) == axis


@pytest.mark.parametrize(("tp", "share"), [(8, 0.5), (32, 1.0)])
def test_a_ring_over_a_part_of_the_torus_uses_one_of_its_two_cycles(tp, share):
    place = cluster("trn1.32xlarge", 1)
    ring = mesh_ring(place, mesh(f"tp={tp},pp=1", place), TP, EFFICIENCY)
    wires = next(link for link in place.links if link.kind == "torus").bandwidth_bytes_per_s
    assert ring.bandwidth_bytes_per_s == pytest.approx(wires * share * EFFICIENCY)


def test_where_there_is_a_switch_every_ring_uses_the_whole_port():
    place = cluster("a100-80", 1)
    ring = mesh_ring(place, mesh("tp=2,pp=1", place), TP, EFFICIENCY)
    wires = next(link for link in place.links if link.kind == "switch").bandwidth_bytes_per_s
    assert ring.bandwidth_bytes_per_s == pytest.approx(wires * EFFICIENCY)
