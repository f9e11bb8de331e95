"""Lines of a table read back as printed; edited, they change what is executed, with equal results, or are refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.graph.decoder import decoder_graph
from autoshard.layout.interpret import Interpreter
from autoshard.layout.layout import Collective, Layout
from autoshard.layout.legal import cut_operations, faults
from autoshard.layout.lower import lower
from autoshard.layout.redistribute import bytes_price
from autoshard.layout.table import Strategy, TableSetting, program_of, strategies, strategy_lines, table_for_sizes
from autoshard.plan.candidate import boundary_cuts
from autoshard.plan.proof import random_inputs
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.workload import Precision, Workload
from tests.kit import TINY, tiny
from tests.layout.meaning import cuts_by_meaning

ATOMS = {"edp": 2, "ep": 1, "cp": 1, "kv": 2, "rep": 2}
WORKLOAD = Workload(seq_len=8, global_batch=4, precision=Precision.named("fp32"))
GRAPH = decoder_graph(tiny(num_layers=1), WORKLOAD, load_kernels("torch_cuda"), micro_batch=2)


def setting(atoms=ATOMS):
    boundary = boundary_cuts(None, sequence_parallel=True)
    return TableSetting(atoms=atoms, price=bytes_price(1.0, atoms), boundary=boundary, keeps_gathered=True)


def lowered(kind, atoms=ATOMS):
    block = GRAPH.block(kind)
    return setting(atoms).lowered(block, cuts_by_meaning(block, atoms, sequence_parallel=True))


def table(kind="layer", atoms=ATOMS):
    return dict(strategy_lines(strategies(lowered(kind, atoms), GRAPH.block(kind)), atoms))


def results(program, kind="layer"):
    block = GRAPH.block(kind)
    given = random_inputs(block, GRAPH.sizes, np.random.default_rng(0))
    whole = dict(given)
    block.run(block.select("micro_batch"), GRAPH.sizes, whole)
    mesh = Mesh.virtual(**{atom: size for atom, size in ATOMS.items() if size > 1})
    made = Interpreter(block=block, mesh=mesh, sizes=GRAPH.sizes).run(program, given)
    largest = max(np.abs(whole[name]).max() for name in made)
    return max(np.abs(made[name] - whole[name]).max() / largest for name in made)


def kinds(program):
    return [change.collective.kind for change in program.collectives()]


@pytest.mark.parametrize("kind", ["embed", "layer", "head"])
def test_a_table_lists_the_program_that_it_was_made_from(kind):
    block = GRAPH.block(kind)
    program = program_of(block, table(kind), setting())
    assert kinds(program) == kinds(lowered(kind))
    assert results(program, kind) < 1e-12


def test_every_deliver_that_reduces_can_be_edited_to_reduce_and_slice():
    edited = 0
    for name, line in table().items():
        changed = line.replace("F reduce_scatter seq/tp", "F all_reduce /tp, slice seq/kv, slice seq/rep")
        changed = changed.replace("I reduce_scatter seq/tp", "I all_reduce /tp, slice seq/kv, slice seq/rep")
        if changed != line:
            program = program_of(GRAPH.block("layer"), {**table(), name: changed}, setting())
            assert kinds(program).count("slice") == 2
            assert results(program) < 1e-12
            edited += 1
    assert edited == 4  # attention's and the MLP's output, and the gradients of their inputs


def test_no_line_can_be_dropped_or_added():
    for name in table():
        lines = {entry: line for entry, line in table().items() if entry != name}
        with pytest.raises(InputError, match=name):
            program_of(GRAPH.block("layer"), lines, setting())
    with pytest.raises(InputError, match="mlp_in"):
        program_of(GRAPH.block("layer"), {**table(), "zzz": table()["q"]}, setting())


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("attn_out", "F reduce_scatter seq/tp", "F all_gather seq/tp", "cannot follow"),
        ("attn_out", "F reduce_scatter seq/tp", "F reduce_scatter hidden/tp", "ends in"),
        ("attn_in", " | F all_gather seq/tp", "", "does not fit"),
        ("q", "kv_heads/kv", "kv_heads", "does not fit"),
        ("q", "->", "=>", "is not a strategy"),
        ("attn_norm", "[hidden]", "[hidden/tp]", "hidden"),
    ],
)
def test_a_line_that_cannot_be_executed_is_refused(name, old, new, said):
    line = table()[name]
    assert old in line
    with pytest.raises(InputError, match=said) as caught:
        program_of(GRAPH.block("layer"), {**table(), name: line.replace(old, new)}, setting())
    assert any(fault.where for fault in caught.value.faults)


def test_a_refusal_names_the_line_to_paste_and_pasting_it_works():
    broken = {**table(), "attn_out": table()["attn_out"].replace("reduce_scatter", "all_gather")}
    with pytest.raises(InputError) as caught:
        program_of(GRAPH.block("layer"), broken, setting())
    (fault,) = caught.value.faults
    pasted = {**broken, fault.where: fault.message.split("write: ")[1]}
    assert results(program_of(GRAPH.block("layer"), pasted, setting())) < 1e-12


def test_a_ring_is_counted_anew_for_other_sizes():
    lines = table(atoms={**ATOMS, "cp": 4})
    ring = Strategy.parse(lines["attend"]).ring
    assert ring is not None and ring.repeat == 3
    halved = Strategy.parse(table_for_sizes(lines, {**ATOMS, "cp": 2})["attend"])
    assert halved.ring is not None and halved.ring.repeat == 1
    assert [chain[0].repeat for chain in halved.backward] == [2]
    assert Strategy.parse(table_for_sizes(lines, {**ATOMS, "cp": 1})["attend"]).ring is None
    assert table_for_sizes(lines, {**ATOMS, "cp": 2})["q"] == lines["q"]


def test_the_hops_of_a_ring_cannot_be_chosen():
    atoms = {**ATOMS, "cp": 4}
    lines = table(atoms=atoms)
    for hops in ("5 x permute kv_seq/cp", "all_gather kv_seq/cp", "permute kv_seq/kv"):
        edited = lines["attend"].replace("I 4 x permute kv_seq/cp", f"I {hops}")
        with pytest.raises(InputError, match=r"^attend: the hops of a ring") as caught:
            program_of(GRAPH.block("layer"), {**lines, "attend": edited}, setting(atoms))
        assert str(caught.value).endswith(f"write: {lines['attend']}")


def test_every_collective_of_every_line_that_gets_another_count_is_refused():
    block, atoms = GRAPH.block("layer"), {**ATOMS, "cp": 4}
    lines = table(atoms=atoms)
    for name, text in lines.items():
        line = Strategy.parse(text)
        for part in ("forward", "backward", "weights"):
            chains = getattr(line, part)
            for number, chain in enumerate(chains):
                longer = tuple(dataclasses.replace(step, repeat=step.repeat + 1) for step in chain)
                changed = {part: (*chains[:number], longer, *chains[number + 1 :])}
                with pytest.raises(InputError, match=f"(?s)^{name}: .*write: "):
                    program_of(block, {**lines, name: str(dataclasses.replace(line, **changed))}, setting(atoms))


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
