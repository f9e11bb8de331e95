import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.graph.decoder import decoder_graph
from autoshard.layout.layout import Collective, Layout
from autoshard.layout.legal import cut_operations, faults
from autoshard.layout.lower import lower
from autoshard.layout.redistribute import bytes_price
from autoshard.layout.table import Strategy, strategies
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.kit import TINY

LAYOUTS = st.sampled_from(
    ["[]", "[batch/dp, seq/cp.tp, hidden]", "[seq] +edp", "[batch, kv_seq] ^kv", "[ffn/tp] +dp ^cp"]
)
COLLECTIVES = st.sampled_from(
    ["all_gather seq/tp", "all_reduce /kv", "all_to_all seq>kv_heads/cp", "4 x permute seq/cp"]
)
CHAINS = st.lists(st.lists(COLLECTIVES.map(Collective.parse), min_size=1).map(tuple), max_size=3).map(tuple)
MESHES = [(("edp", 2), ("kv", 2)), (("edp", 2), ("ep", 2), ("cp", 2)), (("cp", 2), ("kv", 2), ("rep", 2))]
any_strategy = st.builds(
    Strategy,
    inputs=st.lists(LAYOUTS.map(Layout.parse)).map(tuple),
    outputs=st.lists(LAYOUTS.map(Layout.parse), min_size=1).map(tuple),
    ring=st.none() | st.just(Collective.parse("3 x permute kv_seq/cp")),
    forward=CHAINS,
    backward=CHAINS,
    saved=st.sampled_from([(), ("in",), ("out",), ("in", "out")]),
    weights=CHAINS,
)


@given(any_strategy)
def test_a_strategy_reads_back_what_it_prints(strategy):
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[seq]", "is not a strategy. Write it like"),
        ("[seq] -> ", "is not a strategy. Write it like"),
        ("[seq] -> seq", "is not a list of layouts"),
        ("seq -> [seq]", "is not a list of layouts"),
        ("[seq] -> [seq] | B all_gather seq/tp", r"has parts \['B'\]; known: ring, F, I, save, W"),
        ("[seq] -> [seq] | F all_gather seq/tp | F slice seq/tp", "has parts twice"),
        ("[seq] -> [seq] | F gather", "is not a collective"),
        ("[seq] -> [seq] | save out, in", "is none of 'save in'"),
        ("[seq] -> [seq] | ring tp, 3 x permute seq/cp", "write 'ring cp, 3 x permute seq/cp'"),
        ("[seq] -> [seq] | ring cp, 3 x all_gather seq/cp", "a ring passes blocks on by permute"),
    ],
)
def test_what_is_no_strategy_is_refused_with_what_to_write(text, message):
    with pytest.raises(InputError, match=message):
        Strategy.parse(text)
    with pytest.raises(InputError) as caught:
        Strategy(inputs=(), outputs=(), forward=((),))
    assert len(caught.value.faults) == 2


def _lowered(uncut, natural_cuts, options, kind, atoms, **more):
    case = uncut(options, kind, even=True, batch=4, seq=8, **more)
    cuts = natural_cuts(case.block, dict(atoms), sequence_parallel=True)
    return case.block, case.lower(cuts, Mesh.virtual(**dict(atoms)), {"batch": ("edp",)}, keeps_gathered=False)


@pytest.mark.parametrize(
    ("options", "kind"), [*((one, "layer") for one in TINY), ("gpt of documents", "embed"), ("gpt", "head")]
)
@pytest.mark.parametrize("atoms", MESHES)
def test_every_operation_and_every_collective_of_a_program_is_told(uncut, natural_cuts, options, kind, atoms):
    block, program = _lowered(uncut, natural_cuts, options, kind, atoms)
    found = strategies(program, block)
    assert [op.name for op in block.select("micro_batch", "F")] == list(found)[: len(block.select("micro_batch", "F"))]
    assert all(Strategy.parse(str(strategy)) == strategy for strategy in found.values())
    listed = [
        (entry, pass_, collective)
        for entry, strategy in found.items()
        for pass_, chains in (("F", strategy.forward), ("I", strategy.backward), ("W", strategy.weights))
        for chain in (chains if not strategy.ring else ())
        for collective in chain
    ]
    sent = [(entry.entry, entry.pass_, entry.collective) for entry in program.collectives()]
    assert sorted(map(str, listed)) == sorted(map(str, sent))


def test_what_is_computed_again_and_the_way_home_of_a_ring_are_told(uncut, natural_cuts):
    block, program = _lowered(uncut, natural_cuts, "llama", "layer", (("edp", 2), ("kv", 4)), again=None)
    found = strategies(program, block)
    assert str(found["attn_in"]).endswith("| I all_gather seq/kv; reduce_scatter seq/kv | W all_gather seq/kv")
    assert not [name for name in found if name.endswith(".again")]
    block, program = _lowered(uncut, natural_cuts, "llama", "layer", (("cp", 4),))
    ring = "| ring cp, 3 x permute kv_seq/cp | I 4 x permute kv_seq/cp"
    assert str(strategies(program, block)["attend"]).endswith(ring)


def test_a_deliver_tells_one_chain_per_layout_that_it_hands_on(uncut):
    case = uncut("llama", even=True)
    cuts = {op.name: {} for op in cut_operations(case.block)}
    cuts |= {"attn_norm": {"seq": ("kv",)}, "q": {"head_dim": ("kv",)}, "k": {"batch": ("kv",)}, "v": {"seq": ("kv",)}}
    program = case.lower(cuts, Mesh.virtual(kv=2), {}, keeps_gathered=True)
    assert str(strategies(program, case.block)["attn_in"]).startswith(
        "[batch, seq/kv, hidden] -> [batch, seq, hidden], [batch/kv, seq, hidden]"
        " | F all_gather seq/kv; all_to_all seq>batch/kv"
    )


def test_the_table_of_a_real_model_is_the_one_that_people_know(natural_cuts, golden):
    atoms = {"edp": 2, "ep": 1, "kv": 2, "rep": 2}
    workload = Workload(seq_len=8192, global_batch=8, precision=Precision.named("bf16"))
    graph = decoder_graph(load_model("llama3-8b"), workload, load_kernels("te"), micro_batch=2)
    boundary = {"batch": ("edp", "ep"), "seq": ("kv", "rep")}
    lines = []
    for block in graph.blocks:
        cuts = natural_cuts(block, atoms, sequence_parallel=True)
        assert not faults(block, cuts, atoms)
        program = lower(block, cuts, atoms, bytes_price(1e6, atoms), boundary=boundary, keeps_gathered=False)
        lines += [f"{block.kind}.{name}: {strategy}" for name, strategy in strategies(program, block).items()]
    golden("layout/llama3-8b_tp4_dp2.txt", "\n".join(lines) + "\n")
