"""The kernel tables: they load, they cite, and a wrong one is refused with every fault."""

import json
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.spec import record
from autoshard.spec.kernels import (
    Kernel,
    Kernels,
    kernels_names,
    libraries_of,
    library_names,
    load_kernels,
    program_table,
)

REQUIRED = ("selective", "clones_end", "keeps_gathered", "waits_for_sends", "receives_apart", "runtime_bytes", "eager")
SOURCES = dict.fromkeys(REQUIRED, "this test")
TABLE: dict[str, Any] = {
    "name": "mine",
    "program": "my program",
    "kernels": [{"ops": ["*_norm"], "saves": ["in0", "copy:out0@fp32"], "source": "this test"}],
    "selective": {"norms": ["attn_norm"]},
    "clones_end": "output",
    "keeps_gathered": False,
    "waits_for_sends": [],
    "receives_apart": False,
    "runtime_bytes": 0,
    "eager": False,
    "sources": SOURCES,
}


def stated(name: str) -> dict[str, Any]:
    """What the file of a table itself says."""
    return json.loads((resources.files("autoshard.spec") / "kernel_tables" / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", kernels_names())
def test_a_table_loads_under_its_own_name_and_cites_a_source_for_everything(name: str):
    table, own = load_kernels(name), stated(name)
    assert table.name == name and table.kernels and table.selective
    assert record.decode(Kernels, record.encode(table)) == table
    assert all(len(source) > 20 for source in (*table.sources.values(), *(kernel.source for kernel in table.kernels)))
    named = [  # another file's come after
        (op, *(kernel.get(trait, False) for trait in ("drops", "biased", "unfused", "capped")))
        for kernel in own.get("kernels", ())
        for op in kernel["ops"]
    ]
    assert len(named) == len(set(named)), "no operation is named by two kernels"
    assert set(own) - {"name", "program", "engine", "like", "kernels", "sources"} <= set(own.get("sources", ()))
    mine, other = record.encode(table), record.encode(load_kernels(own.get("like", name)))
    for key in set(mine) - {"name", "kernels", "sources"}:
        assert mine[key] == (own[key] if key in own and "like" in own else other[key]), key
    assert "like" not in own or mine["kernels"][len(own.get("kernels", ())) :] == other["kernels"]


def test_an_unknown_table_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"^kernels: there is no table 'torch_gpu'. Did you mean torch_c"):
        load_kernels("torch_gpu")


@pytest.mark.parametrize("library", library_names())
def test_a_library_adds_what_it_states_to_any_program_and_cites_its_source(library: str):
    for program in ("te", "mcore"):
        table, base = load_kernels(f"{program}+{library}"), load_kernels(program)
        assert table.sends_tokens and not base.sends_tokens and len(table.sources["sends_tokens"]) > 20
        added = {name: getattr(table, name) for name in ("name", "program", "sends_tokens", "token_links", "sources")}
        assert table == replace(base, **added) and table.program.startswith(f"{base.program} and ")
        assert (program_table(table.name), libraries_of(table.name)) == (program, (library,))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("te+deepp", r"there is no library 'deepp'. Did you mean deepep\?"),
        ("tee+deepep", "there is no table 'tee'"),
        ("te+deepep+deepep", "a library stands twice"),
        ("torch_engine_gpu+deepep", "autoshard's engine runs torch_engine_gpu without deepep"),
        ("nxd+deepep", "autoshard's engine runs nxd without deepep"),
    ],
)
def test_a_library_that_nobody_has_or_no_engine_runs_is_refused(name: str, fault: str):
    with pytest.raises(InputError, match=f"^kernels: {fault}"):
        load_kernels(name)


SETTINGS = {"placeholders": [["q"]], "workspace_bytes": 1, "uncounted": ["runtime"], "seconds_per_graph": 1.0}
BY_TOKENS = {"sends_tokens": True, "sources": {**SOURCES, "sends_tokens": "x", "token_links": "x"}}
OTHER_SOURCES = {"sources": {**SOURCES, **dict.fromkeys((*SETTINGS, "hides"), "x")}}
COUNTS = {
    "ops": ["act"],
    "source": "s",
    "launches": {"forward": -1, "backward": -2},
    "mask_tile": 0,
    "traffic_ratio": 0.5,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hides": {"pp": 1.0}, **OTHER_SOURCES}, ["hides: 'pp' is not one of tp, dp, sums, unit"]),
        (
            {"hides": {"tp": 1.1, "dp": -0.1}, **OTHER_SOURCES},
            ["hides.tp: must lie in [0, 1]", "hides.dp: must lie in [0, 1]"],
        ),
        (
            {"kernels": [COUNTS]},
            [
                "kernels[0].launches.forward: must be at least 0, not -1",
                "kernels[0].launches.backward: must be at least 0, not -2",
                "kernels[0].mask_tile: must be at least 1, not 0",
                "kernels[0].traffic_ratio: must be at least 1, not 0.5",
            ],
        ),
        (
            {
                "clones_end": "never",
                "keeps_gathered": 1,
                "extra": None,
                "selective": {"norms": "attn_norm"},
                "kernels": [{"ops": [], "source": "", "backward_flops_ratio": 0.5}, {"ops": ["act"]}],
            },
            [
                "extra: unknown key. Known: adds_gradients, adds_weights, cast_bytes, clones_end,",
                "kernels[0].ops: a kernel needs at least one operation",
                "kernels[0].backward_flops_ratio: must be at least 1, not 0.5",
                "kernels[0].source: say where this is known from",
                "kernels[1].source: missing",
                "selective.norms: expected a list, found 'attn_norm'",
                "clones_end: expected one of last_saved, output, found 'never'",
                "keeps_gathered: expected true or false, found 1",
            ],
        ),
        (
            {"sources": {"selective": "this test", "clones_end": ""}},
            [f"sources: no source for {', '.join(REQUIRED[1:])}"],
        ),
        (
            {**BY_TOKENS, "token_links": {"node": 0.7}},
            ["token_links: with sends_tokens, and only then, state cluster and node"],
        ),
        ({**BY_TOKENS, "token_links": {"node": 0.7, "cluster": 1.5}}, ["token_links.cluster: must lie in (0, 1]"]),
        (SETTINGS, ["sources: no source for placeholders, workspace_bytes, uncounted, seconds_per_graph"]),
        (
            {"workspace_bytes": -1, "seconds_per_graph": -1.0, **OTHER_SOURCES},
            ["workspace_bytes: must be at least 0, not -1", "seconds_per_graph: must be at least 0, not -1.0"],
        ),
    ],
)
def test_a_wrong_table_is_refused_with_all_faults_and_their_places(changes: dict[str, Any], expected: list[str]):
    assert record.decode(Kernels, TABLE).kernels[0].saves == ("in0", "copy:out0@fp32")
    with pytest.raises(InputError) as caught:
        record.decode(Kernels, {**TABLE, **changes}, where="mine")
    assert len(caught.value.faults) == len(expected)
    for fault, words in zip(caught.value.faults, expected, strict=True):
        assert str(fault).startswith(f"mine.{words}")


def test_only_the_forms_of_saves_are_read():
    for text in (
        "in0",
        "in12",
        "in*",
        "out1",
        "copy:in*",
        "over:in0",
        "copy:out0@bf16",
        "copy:out0@fp8",
        "in*@fp16",
        "scores@fp8",
    ):
        assert Kernel(ops=("act",), saves=(text,), source="this test").saves == (text,)
    for text in (
        "",
        "in",
        "in0@",
        "in0@fp64",
        "copy:",
        "out*",
        "in0 ",
        "copy:copy:in0",
        "in-1",
        "scores@bf16",
        "in0@fp8",
    ):
        with pytest.raises(InputError, match=r"^saves: cannot read .*write in0, in\*, out0, scores, copy:in0"):
            Kernel(ops=("act",), saves=("in0", text), source="this test")


def test_sets_of_operations_resolve_in_order_without_repetition():
    table = record.decode(Kernels, {**TABLE, "selective": {"a": ["x", "y"], "b": ["y", "z"]}})
    assert table.resolve(("b", "a", "w")) == ("y", "z", "x", "w")


@given(name=st.sampled_from(kernels_names()), usable=st.integers(2**32, 2**38), headroom=st.floats(0, 0.9))
def test_a_rank_is_filled_by_tensors_to_its_headroom_and_by_what_is_reserved_beside_them_to_the_end(
    name: str, usable: int, headroom: float
):
    """Both conditions are met by no more than the capacity, and by nothing larger."""
    table = load_kernels(name)
    share = table.reserved.share if table.reserved else 0.0
    of_headroom = usable * (1 - headroom) - table.runtime_bytes
    of_device = (usable - table.runtime_bytes) / (1 + share)
    tensors = min(of_headroom, of_device) if table.reserved else of_headroom
    capacity = tensors * (1 + share) + table.runtime_bytes
    assert table.capacity_bytes(usable, headroom) == pytest.approx(capacity, abs=4)
    assert table.capacity_bytes(usable, 0.0) == usable


@pytest.mark.parametrize("name", ["nxd", "torch_engine_gpu", "te"])
def test_memory_that_a_headroom_leaves_is_never_negative(name: str):
    kernels = load_kernels(name)
    assert kernels.capacity_bytes(80 * 2**30, 0.999) >= 1 and kernels.capacity_bytes(1, 0.5) == 1
    assert kernels.capacity_bytes(80 * 2**30, 0.1) > 70 * 2**30


RESERVING = [name for name in kernels_names() if load_kernels(name).reserved]


@pytest.mark.parametrize("name", RESERVING)
@given(usable_gib=st.integers(16, 288))
def test_under_a_safe_headroom_the_most_that_an_allocator_may_reserve_fits_and_under_a_smaller_it_may_not(
    name: str, usable_gib: int
):
    kernels, usable = load_kernels(name), usable_gib * 2**30
    reserved = kernels.reserved
    assert reserved

    def most(headroom: float) -> float:
        tensors = (kernels.capacity_bytes(usable, headroom) - kernels.runtime_bytes) / (1 + reserved.share)
        return tensors * (1 + reserved.high) + kernels.runtime_bytes

    safe = kernels.safe_headroom(usable)
    assert 0 < safe < 1 and most(safe) <= usable + 2 < most(safe - 0.01)
