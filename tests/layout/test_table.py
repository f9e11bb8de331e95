"""Edited lines of a table change what is executed, with equal results, or are refused with the right line."""

import dataclasses

import numpy as np
import pytest

from autoshard.errors import InputError
from autoshard.graph.decoder import decoder_graph
from autoshard.layout.interpret import Interpreter
from autoshard.layout.redistribute import bytes_price
from autoshard.layout.table import Strategy, TableSetting, program_of, strategies, strategy_lines, table_for_sizes
from autoshard.plan.candidate import boundary_cuts
from autoshard.plan.proof import random_inputs
from autoshard.spec.kernels import load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.workload import Precision, Workload
from tests.kit import tiny
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
