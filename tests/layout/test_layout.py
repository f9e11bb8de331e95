import itertools
import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.graph.op import DIMS
from autoshard.layout.layout import Collective, CollectiveKind, Layout, local_sizes, show_atoms
from autoshard.spec.mesh import ATOMS

SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])


@st.composite
def layouts(draw):
    """Any layout: some dims, each cut over some of the atoms that are left."""
    left = draw(st.permutations(ATOMS))
    dims = []
    for dim in draw(st.lists(st.sampled_from(DIMS), unique=True, max_size=5)):
        count = draw(st.integers(0, min(3, len(left))))
        dims.append((dim, tuple(left[:count])))
        left = left[count:]
    sums, maxima = left[: draw(st.integers(0, 2))], left[2 : 2 + draw(st.integers(0, 2))]
    return Layout(dims=tuple(dims), sums=tuple(sums), maxima=tuple(maxima))


COMMON = {
    "dim": st.none() | st.sampled_from(DIMS),
    "atoms": st.lists(st.sampled_from(ATOMS), unique=True, min_size=1).map(tuple),
    "repeat": st.integers(1, 64),
}
collectives = st.builds(Collective, kind=st.sampled_from(get_args(CollectiveKind)), **COMMON) | st.builds(
    Collective, kind=st.just("all_to_all"), to_dim=st.sampled_from(DIMS), **COMMON
)


@given(layouts() | collectives)
def test_a_value_reads_back_what_it_prints(value):
    assert type(value).parse(str(value)) == value


def test_values_read_as_the_design_writes_them():
    assert str(Collective(kind="all_gather", dim="seq", atoms=("kv", "rep"))) == "all_gather seq/tp"
    assert str(Collective(kind="all_reduce", dim=None, atoms=("rep",))) == "all_reduce /rep"
    assert show_atoms(("rep", "kv")) == "rep.kv", "an atom out of order keeps its own name"


@given(st.lists(st.sampled_from(ATOMS), unique=True, min_size=1))
def test_whole_axes_are_printed_whole_and_read_back(atoms):
    text = show_atoms(atoms)
    assert Layout.parse(f"[seq/{text}]").dims == (("seq", tuple(atoms)),)
    assert ("edp.ep" not in text) and ("kv.rep" not in text)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (Layout, ["", "batch/dp", "[batch/dp", "[batch] + ep", "[batch] ep"]),
        (Collective, ["", "gather seq/tp", "all_gather seq", "x permute seq/cp", "all_gather seq/"]),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(kind, texts):
    for text in texts:
        with pytest.raises(InputError, match=rf"is not a {kind.__name__.lower()}\. Write it like"):
            kind.parse(text)


def test_what_cannot_be_is_refused_all_at_once():
    with pytest.raises(InputError, match=r"a dim stands twice .*\n.*an atom cuts twice"):
        Layout(dims=(("seq", ("cp",)), ("seq", ("cp",))))
    with pytest.raises(InputError) as caught:
        Collective(kind="permute", dim="seq", atoms=(), repeat=0, to_dim="hidden")
    assert [fault.where for fault in caught.value.faults] == ["atoms", "repeat", "to_dim"]


@given(st.dictionaries(st.sampled_from(DIMS), st.integers(1, 10_000)), layouts(), st.fixed_dictionaries(
    dict.fromkeys(ATOMS, SIZES)
))  # fmt: skip
def test_a_share_is_the_size_over_the_ranks_rounded_up(sizes, layout, atoms):
    cuts = dict(layout.dims)
    expected = {
        dim: math.ceil(size / math.prod(atoms[atom] for atom in cuts.get(dim, ()))) for dim, size in sizes.items()
    }
    assert local_sizes(sizes, cuts, atoms) == expected


@given(st.lists(st.tuples(st.integers(1, 10_000), SIZES, SIZES), min_size=1))
def test_columns_of_sizes_give_what_the_numbers_give(rows):
    seq, cp, kv = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    cuts = {"seq": ("cp", "kv")}
    column = local_sizes({"seq": seq}, cuts, {"cp": cp, "kv": kv})["seq"]
    single = [local_sizes({"seq": size}, cuts, {"cp": one, "kv": other})["seq"] for size, one, other in rows]
    assert column.tolist() == single


@given(
    layouts(),
    st.fixed_dictionaries(dict.fromkeys(DIMS, st.integers(1, 24))),
    st.fixed_dictionaries(dict.fromkeys(ATOMS, st.integers(1, 4))),
)
def test_a_layout_has_a_fault_just_where_a_dim_has_fewer_elements_than_parts(layout, sizes, atoms):
    finer = [dim for dim, cut in layout.dims if math.prod(atoms[atom] for atom in cut) > sizes[dim]]
    assert [fault.where for fault in layout.faults(atoms, sizes)] == finer


def test_all_faults_are_told_at_once():
    layout = Layout.parse("[batch/dp, sec/cp, hidden/qq] +ep ^cp")
    faults = layout.faults({"edp": 2, "ep": 2, "cp": 8}, {"batch": 3, "seq": 8, "hidden": 8})
    assert [str(fault) for fault in faults] == [
        "unknown atom 'qq'. Known: cp, dp, edp, ep.",
        "an atom both cuts and is pending: ['ep', 'cp']",
        "batch: 3 cannot be cut into 4 (dp). Use atoms whose product is at most 3",
        "sec: no such dim. Did you mean seq?",
    ]


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(["cuts", "+", "^"], 2)))
def test_an_atom_has_one_use(one, two):
    uses = {one, two}
    dims = (("seq", ("cp",) if "cuts" in uses else ()),)
    layout = Layout(dims=dims, sums=("cp",) if "+" in uses else (), maxima=("cp",) if "^" in uses else ())
    assert [fault.message for fault in layout.faults({"cp": 2})] == ["an atom both cuts and is pending: ['cp']"]
    assert layout.faults({"cp": 1}) == (), "an atom of size one does neither"
