import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.calibration import (
    CONSTANTS,
    EFFICIENCIES,
    SECONDS,
    Calibration,
    Reach,
    built_in,
    calibration_text,
    load_calibration,
    uncalibrated,
)
from autoshard.errors import InputError
from autoshard.spec.cluster_catalogue import cluster_names

MEASURED = {"a100-80", "a100-800g", "b200", "h100-80", "h100-96", "trn1.32xlarge"}
NEAR_TO = {
    "a100-80": {"a100-40", "p4d.24xlarge", "p4de.24xlarge"}, "b200": {"p6-b200.48xlarge"},
    "h100-80": {"p5.48xlarge", "p5en.48xlarge"}, "h100-96": {"h200"},
    "trn1.32xlarge": {"trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge"},
}  # fmt: skip


def shipped() -> list[Path]:
    folder = Path(str(resources.files("autoshard.cost")))
    return [folder / "uncalibrated.json", *(folder / "calibrations").glob("*.json")]


def test_the_nominal_constants_say_what_they_are_worth_and_where_each_is_from():
    nominal = uncalibrated()
    assert nominal.basis.startswith("uncalibrated")
    assert {*CONSTANTS, "interval"} == set(nominal.sources)


def test_impossible_constants_are_refused_all_at_once():
    with pytest.raises(InputError) as caught:
        replace(uncalibrated(), matrix_efficiency=1.1, far_link_efficiency=0.0, launch_s=-1e-9, interval=1.0)
    assert [fault.where for fault in caught.value.faults] == [
        "matrix_efficiency", "far_link_efficiency", "launch_s", "interval",
    ]  # fmt: skip


@pytest.mark.parametrize("name", EFFICIENCIES)
@pytest.mark.parametrize(("value", "legal"), [(0.0, False), (-0.5, False), (1e-9, True), (1.0, True), (1.01, False)])
def test_an_efficiency_is_a_share_of_a_peak(name: str, value: float, legal: bool):
    if legal:
        assert getattr(replace(uncalibrated(), **{name: value}), name) == value
    else:
        with pytest.raises(InputError, match=rf"^{name}: must lie in \(0, 1\]"):
            replace(uncalibrated(), **{name: value})


@pytest.mark.parametrize("name", SECONDS)
def test_a_time_may_be_nothing_but_not_less(name: str):
    assert getattr(replace(uncalibrated(), **{name: 0.0}), name) == 0
    with pytest.raises(InputError, match=rf"^{name}: must not be negative"):
        replace(uncalibrated(), **{name: -1e-12})


def test_more_than_a_rate_is_reached_only_where_it_is_declared():
    here = Reach(cluster="local", axes=(), kernels=("torch_engine",))
    assert replace(uncalibrated(), reach=here, matrix_efficiency=4.0).matrix_efficiency == 4
    for reach in (None, replace(here, cluster="h100-80")):
        with pytest.raises(InputError, match=r"matrix_efficiency: must lie in \(0, 1\]"):
            replace(uncalibrated(), reach=reach, matrix_efficiency=4.0)


def test_the_constants_are_efficiencies_and_times():
    assert (*EFFICIENCIES, *SECONDS) == CONSTANTS
    assert dict(uncalibrated().constants) == {name: getattr(uncalibrated(), name) for name in CONSTANTS}


def test_a_number_without_a_source_is_refused():
    with pytest.raises(InputError, match=r"sources\.interval: say where this number is from"):
        replace(uncalibrated(), sources={**uncalibrated().sources, "interval": ""})


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_no_calibration_holds_memory_or_other_numbers_than_the_constants(path: Path):
    data = json.loads(path.read_text("utf-8"))
    assert not [key for key in data if "bytes" in key or "gib" in key]
    assert {key for key, value in data.items() if isinstance(value, float)} == {*CONSTANTS, "interval"}


def test_only_measured_clusters_have_constants_of_their_own():
    own = {name for name in cluster_names() if built_in(name).name == name}
    assert own == MEASURED
    for name, others in NEAR_TO.items():
        assert {other for other in cluster_names() if built_in(other).name == name} == {name, *others}
    assert built_in("my-own") is uncalibrated()


efficiencies = st.tuples(*[st.floats(1e-6, 1)] * len(EFFICIENCIES))
times = st.tuples(*[st.floats(0, 10)] * len(SECONDS))


@given(efficiencies, times, st.floats(0, 0.99))
def test_a_file_round_trips(shares: tuple[float, ...], seconds: tuple[float, ...], interval: float):
    values = dict(zip(CONSTANTS, (*shares, *seconds), strict=True))
    made = replace(built_in("trn1.32xlarge"), interval=interval, **values)
    text = calibration_text(made)
    assert "bytes" not in text
    assert json.loads(text)["matrix_efficiency"] == made.matrix_efficiency
    path = Path("unused")
    assert _read(text, path) == made


def _read(text: str, path: Path) -> Calibration:
    from autoshard.spec import record

    return record.decode(Calibration, json.loads(text), where=str(path))


def test_a_wrong_file_is_one_line_that_names_it(tmp_path: Path):
    path = tmp_path / "my.json"
    path.write_text(calibration_text(replace(built_in("trn1.32xlarge"), name="mine")), "utf-8")
    assert load_calibration(path).name == "mine"
    data = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**data, "runtime_bytes": 1, "far_link_efficiency": 2.0}), "utf-8")
    with pytest.raises(InputError) as caught:
        load_calibration(path)
    assert [fault.where for fault in caught.value.faults] == [str(path)]
    assert "runtime_bytes: unknown key" in caught.value.faults[0].message
    with pytest.raises(InputError, match="cannot be read"):
        load_calibration(tmp_path / "none.json")
