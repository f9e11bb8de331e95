"""Modules of others: the table has a line for each, and modules of transformers equal one process on every rank."""

import math
import re
from dataclasses import replace

import pytest
import torch

from autoshard.errors import InputError
from autoshard.modules.sharded import shard
from benchmarks.foreign_modules import ranks, table
from benchmarks.foreign_modules.catalogue import MODULES
from benchmarks.foreign_modules.ranks import BARS, EQUAL, FAILED, FP64, MIXED, REFUSED, WRONG, Outcome, Passes
from benchmarks.foreign_modules.registry import PACKAGES, ForeignModule, Package
from benchmarks.pages import table_in
from tests.ranks.spawn import on_ranks

COMMAND = f"python -m benchmarks {table.NAME} --write"
ON_RANKS = ("SmolLM3", "Mamba2", "Mixtral", "BertForMaskedLM")


def of_transformers(name: str) -> ForeignModule:
    (found,) = (one for one in MODULES if (one.package, one.name) == ("transformers", name))
    return found


def test_the_page_has_a_line_for_each_module_of_the_catalogue():
    written = table.rows(table_in(table.PAGE.read_text(encoding="utf-8"), table.NAME))
    assert [*written] == [(one.name, one.package) for one in MODULES], f"run {COMMAND}"
    kinds = [cells[table._COLUMNS.index("outcome")] for cells in written.values()]  # pyright: ignore[reportPrivateUsage]
    assert {*kinds} <= {EQUAL, REFUSED}
    for cells in written.values():
        if EQUAL in cells:
            assert max(map(float, cells[4:7])) <= BARS[cells[2]], cells


def test_the_page_has_each_package_with_its_version_and_licence():
    text = table_in(table.PAGE.read_text(encoding="utf-8"), "packages")
    assert table.packages_table() in text, f"run {COMMAND}"
    assert {one.package for one in MODULES} == {*PACKAGES}


def found(kind: str, **numbers: float) -> Outcome:
    return Outcome(kind=kind, words="File x.py, line 1: `no`" if kind == REFUSED else "", **numbers)  # pyright: ignore


def test_a_module_that_is_wrong_or_fails_does_not_hold():
    many = [(MODULES[0], found(EQUAL))] * table.LEAST_EQUAL
    assert table.judge([*many, (MODULES[1], found(REFUSED))], []).holds
    assert not table.judge(many[1:], []).holds
    for kind in (WRONG, FAILED):
        assert not table.judge([*many, (MODULES[1], found(kind))], []).holds
    extras = table.judge(many, ["timm"]).extras
    assert extras["timm is not installed"] == "pip install timm==1.0.31"


def test_a_page_gets_its_tables_and_the_sentences_of_what_is_refused():
    page = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in (table.NAME, "packages"))
    tried = [(MODULES[0], found(EQUAL, results=2e-16)), (MODULES[1], found(REFUSED))]
    text = table.page_text(page, tried)
    assert [*table.rows(table_in(text, table.NAME))] == [(one.name, one.package) for one, _ in tried]
    assert f"| {MODULES[0].name} | timm | FP64 | equal | 2e-16 | 0e+00 | 0e+00 | 0 |" in text
    assert f"- **{table.title(MODULES[1])}**: `File x.py, line 1: 'no'`" in text


def test_a_page_is_written_only_where_all_packages_are_installed(monkeypatch: pytest.MonkeyPatch):
    absent = Package(imported="no_such_package", version="1", licence="MIT", install="pip install nothing")
    monkeypatch.setattr(table, "PACKAGES", {"nothing": absent})
    with pytest.raises(
        InputError, match=re.escape("--write: needs all packages. Install nothing: pip install nothing")
    ):
        table.run(write=True)


def test_differences_are_relative_to_the_tensor_and_small_gradients_to_the_largest():
    large, small = torch.tensor([1.0, 2.0]), torch.tensor([1e-9, 0.0])
    one = Passes(results=[large], gradients=[large, small], losses=[2.0, 1.0])
    assert ranks.differences(one, one) == (0.0, 0.0, 0.0)
    other = Passes(results=[large * 1.5], gradients=[large, small * 2], losses=[2.0, 1.5])
    results, gradients, losses = ranks.differences(one, other)
    assert (results, losses) == (0.5, 0.5) and gradients == pytest.approx(1e-9 / 2e-3)
    broken = replace(one, results=[large * math.nan])
    assert ranks.differences(one, broken)[0] == math.inf


class Fails(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("nobody knows why") if self.in_features == 4 else InputError.of("module", "is refused")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "kind", "words"), [(4, FAILED, "nobody knows why"), (5, REFUSED, "is refused")])
def test_a_module_that_fails_or_is_refused_says_so(size: int, kind: str, words: str):
    foreign = ForeignModule(
        name="x", package="timm", make=lambda: Fails(size, 4), inputs=lambda: [torch.randn(4, size)]
    )
    outcome = ranks.compared(foreign)
    assert outcome.kind == kind and words in outcome.words


def trained(name: str) -> list[tuple[float, float, float]]:
    """Shard a module on every rank, and hold its results, gradients and losses against the plain one."""
    foreign = of_transformers(name)
    module, inputs = ranks.prepared(foreign)
    plain, _ = ranks.prepared(foreign)
    optimizers = [torch.optim.AdamW(plain.parameters(), lr=1e-3)]
    expected = ranks.passes(plain, inputs, optimizers[0], ranks.STEPS)
    sharded = shard(module, inputs, "dp=2,tp=2", results=ranks.places(module, inputs))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    return [ranks.differences(expected, ranks.passes(sharded, inputs, optimizer, ranks.STEPS))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_module_of_transformers_that_each_rank_solves_is_that_of_one_process(name: str):
    bar = BARS[
        "FP32" if of_transformers(name).dtype == torch.float32 else MIXED if name in ("SmolLM3", "Mamba2") else FP64
    ]
    for (differences,) in on_ranks(4, trained, name, timeout_s=600):
        assert max(differences) <= bar, differences
