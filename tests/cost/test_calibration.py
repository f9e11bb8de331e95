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

FOLDER = Path(str(resources.files("autoshard.cost")))


def shipped() -> list[Path]:
    return [FOLDER / "uncalibrated.json", *(FOLDER / "calibrations").glob("*.json")]


def test_a_cluster_has_its_own_constants_or_those_of_the_nearest_machine_or_nominal_ones():
    own, nearest = {path.stem for path in shipped()[1:]}, json.loads((FOLDER / "nearest.json").read_text("utf-8"))
    assert own <= {*cluster_names()} and not own & nearest.keys()
    for name in cluster_names():
        expected = name if name in own else nearest.get(name, {"to": "uncalibrated"})["to"]
        assert built_in(name).name == expected and expected in {"uncalibrated", *own}
    assert built_in("my-own") is uncalibrated()


def test_impossible_constants_are_refused_all_at_once():
    with pytest.raises(InputError) as caught:
        replace(
            uncalibrated(), matrix_efficiency=1.1, far_link_efficiency=0.0, launch_s=-1e-9, interval=1.0, sources={}
        )
    assert [fault.where for fault in caught.value.faults] == [
        "matrix_efficiency", "far_link_efficiency", "launch_s", "interval",
        *(f"sources.{name}" for name in (*CONSTANTS, "interval")),
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
