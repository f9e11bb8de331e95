"""Constants: what they may be, what those that come with autoshard rest on, and how plans carry them."""

import json
import math
from dataclasses import replace
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from autoshard.cost.built_in import built_in, calibration_of
from autoshard.cost.calibration import (
    CONSTANTS,
    EFFICIENCIES,
    SECONDS,
    Calibration,
    Reach,
    calibration_entries,
    calibration_text,
    load_calibration,
    uncalibrated,
)
from autoshard.cost.departures import chip_family, departures, hardware, mean_constants
from autoshard.cost.outside import UNSEEN_OFF, Seen
from autoshard.cost.predict import predict
from autoshard.errors import InputError
from autoshard.plan.codec import dump, load
from autoshard.spec import record
from autoshard.spec.cluster_catalogue import cluster_names, load_node_type
from autoshard.spec.workload import Precision
from tests.cost.cases import ask, plan_of

FOLDER = Path(str(resources.files("autoshard.cost")))
FILES = sorted((FOLDER / "calibrations").glob("*.json"), key=lambda one: one.name)
OWN = replace(
    uncalibrated(), name="mine", basis="my runs", matrix_efficiency=0.3, near_link_efficiency=1 / 3, interval=0.1
)
efficiencies = st.tuples(*[st.floats(1e-6, 1)] * len(EFFICIENCIES))
times = st.tuples(*[st.floats(0, 10)] * len(SECONDS))


class TestConstants:
    def test_impossible_ones_are_refused_all_at_once(self):
        wrong = {"matrix_efficiency": 1.1, "far_link_efficiency": 0.0, "launch_s": -1e-9, "interval": 1.0}
        with pytest.raises(InputError) as caught:
            replace(uncalibrated(), sources={}, **wrong)
        sources = [f"sources.{name}" for name in (*CONSTANTS, "interval")]
        assert [fault.where for fault in caught.value.faults] == [*wrong, *sources]

    @pytest.mark.parametrize("value", [0.0, -0.5, 1.01])
    def test_an_efficiency_is_a_share_of_a_peak_and_a_time_not_negative(self, value: float):
        for name in EFFICIENCIES:
            with pytest.raises(InputError, match=rf"^{name}: must lie in \[1e-06, 1\]"):
                replace(uncalibrated(), **{name: value})
        for name in SECONDS:
            with pytest.raises(InputError, match=rf"^{name}: must be at least 0"):
                replace(uncalibrated(), **{name: -1e-12})
        limits = {**dict.fromkeys(EFFICIENCIES, 1.0), **dict.fromkeys(SECONDS, 0.0)}
        assert replace(uncalibrated(), **limits).launch_s == 0

    def test_more_than_a_rate_is_reached_only_where_it_is_declared(self):
        here = Reach(cluster="local", axes=(), kernels=("torch_engine",))
        assert replace(uncalibrated(), reach=here, matrix_efficiency=4.0).matrix_efficiency == 4
        for reach in (None, replace(here, cluster="h100-80")):
            with pytest.raises(InputError, match=r"matrix_efficiency: must lie in \[1e-06, 1\]"):
                replace(uncalibrated(), reach=reach, matrix_efficiency=4.0)

    @given(efficiencies, times, st.floats(0, 0.99))
    def test_a_file_round_trips(self, shares: tuple[float, ...], seconds: tuple[float, ...], interval: float):
        values = dict(zip(CONSTANTS, (*shares, *seconds), strict=True))
        made = replace(built_in("trn1.32xlarge"), interval=interval, **values)
        assert record.decode(Calibration, json.loads(calibration_text(made))) == made

    def test_a_wrong_file_is_one_line_that_names_it(self, tmp_path: Path):
        path = tmp_path / "my.json"
        path.write_text(calibration_text(replace(built_in("trn1.32xlarge"), name="mine")), "utf-8")
        assert load_calibration(path).name == "mine"
        data = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps({**data, "runtime_bytes": 1, "far_link_efficiency": 2.0}), "utf-8")
        with pytest.raises(InputError) as caught:
            load_calibration(path)
        assert [fault.where for fault in caught.value.faults] == [str(path)]
        assert "runtime_bytes: unknown key" in caught.value.faults[0].message
        with pytest.raises(InputError, match="there is no such file"):
            load_calibration(tmp_path / "none.json")


class TestBuiltIn:
    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_it_says_what_it_rests_on_and_keeps_rates_together(self, path: Path):
        found, nominal = load_calibration(path), uncalibrated()
        assert found == built_in(path.stem) and found.name == path.stem and found is not nominal
        assert found.fit and found.reach and path.stem in found.reach.cluster.split(",")
        assert len(set(found.fit.rows)) == len(found.fit.rows) >= found.fit.num_layouts >= 2
        year, month, day = (*map(int, found.fit.date.split("-")), 1, 1)[:3]  # publishers may leave out the day
        assert date(year, month, day).isoformat().startswith(found.fit.date) and year > 2020
        for words in (f"{len(found.fit.rows)} rows", path.stem, found.fit.date, f"{1 + found.interval:.2f}"):
            assert words in found.basis, "the sentence of every plan"
        rates = [getattr(found, name) for name in EFFICIENCIES]
        assert max(rates) / min(rates) < 1.1, "rows of few layouts do not tell rates apart"
        starts = {name for name in SECONDS if getattr(found, name) != getattr(nominal, name)}
        assert not starts, "a compiled graph is started once, whatever it does"
        assert found.fit.left_out_mape <= 0.06

    def test_a_cluster_has_its_own_constants_or_those_of_the_nearest_machine_or_of_its_chip_or_nominal_ones(self):
        own, nearest = {path.stem for path in FILES}, json.loads((FOLDER / "nearest.json").read_text("utf-8"))
        assert own <= {*cluster_names()} and not own & nearest.keys()
        for name in cluster_names():
            found = built_in(name)
            if load_node_type(name).chip.name.startswith("trainium"):
                assert found.name == (name if name in own else nearest[name]["to"])
            else:
                assert found.name == ("uncalibrated" if name == "local" else f"{name} under autoshard, torch engine"), (
                    name
                )
        assert built_in("my-own") is uncalibrated()

    def test_constants_of_hardware_are_the_same_for_every_program_and_machine_with_the_chip(self):
        for name, other in (("h200", "p5en.48xlarge"), ("h100-80", "p5.48xlarge"), ("a100-80", "a100-40")):
            one, two = (built_in(cluster) for cluster in (name, other))
            assert [getattr(one, key) for key in CONSTANTS] == [getattr(two, key) for key in CONSTANTS]
        for program in departures().programs:
            found = built_in(program.cluster, program.kernels[0], program.framework)
            assert found.name == f"{program.cluster} under {program.framework}" and found.interval == program.interval
            chip = hardware().chips[chip_family(load_node_type(program.cluster).chip.name)]
            for name, share in chip.shares.items():
                factor = mean_constants([program], departures().programs)[name]
                assert getattr(found, name) == pytest.approx(min(0.97, share * factor))
            assert found.launch_s == hardware().hosts["launch_s"]

    def test_a_program_departs_as_on_its_own_cluster_then_as_elsewhere_then_as_all_do(self):
        own = built_in("h100-80", "torch_flash", "llm-foundry (Composer, FSDP1)")
        assert own.name == "h100-80 under llm-foundry" and own.reach and own.fit
        moved = built_in("b200", "torch_flash", "llm-foundry")
        assert moved.interval == departures().elsewhere and moved.reach is None and "adds on a100-40" in moved.basis
        new = built_in("b200", "neuron_native", "a new program")
        assert new.interval == max(0.25, departures().unknown) and "programs add on average" in new.basis
        assert built_in("h100-80", "te", "Megatron-LM + TransformerEngine 2.11").name.endswith("+ TransformerEngine")

    def test_what_no_row_of_a_program_depends_on_is_what_all_programs_take_on_average(self):
        """Rows of one GPU say nothing about links, so predictions of several GPUs are worth those of a new program."""
        (engine,) = (one for one in departures().programs if one.framework == "autoshard, torch engine")
        assert not engine.axes and not engine.constants.keys() & {"near_link_efficiency", "dp_ratio", "collective_s"}
        elsewhere, new = built_in("b200"), built_in("b200", "neuron_native", "a new program")
        assert elsewhere.near_link_efficiency == new.near_link_efficiency and elsewhere.dp_ratio == new.dp_ratio != 1
        assert elsewhere.matrix_efficiency == pytest.approx(0.5 * engine.constants["matrix_efficiency"])
        assert elsewhere.interval == new.interval and "of one rank there" in elsewhere.basis


def plan(text="tp=8,pp=4,dp=4", calibration=None, **changes):
    made = plan_of(ask(**changes), text)
    return replace(made, provenance=calibration_entries(calibration)) if calibration else made


SEEN = {"tp": Seen(values=("8",))}


class TestSoftware:
    def test_older_releases_are_slower_by_as_much_each_and_what_no_row_has_is_wide(self):
        found = built_in("trn1.32xlarge")
        assert found.software
        rate = 1 + found.software.slower_per_release
        settled, old = found.running("neuronx-distributed", (2, 20)), found.running("neuronx-distributed", (2, 16, 1))
        assert settled == found and old.interval == found.interval and old.basis == found.basis
        for name in EFFICIENCIES:
            assert getattr(old, name) == pytest.approx(getattr(found, name) / rate**2)
        assert old.task_s == pytest.approx(found.task_s * rate**2)
        for framework, release, named in (("my own", (2, 20), "framework my own"), (None, (2, 99), "release 2.99")):
            beyond = found.running(framework, release)
            assert beyond.interval >= 0.25 and named in beyond.basis
        assert found.running(None, ()) == found, "a row that says nothing ran on what plans are for"

    def test_a_release_that_is_asked_for_is_named_with_what_it_costs(self):
        found = built_in("trn1.32xlarge")
        assert found.software and "release 2.24" in found.basis, "the newest of the rows"
        old, newest, later = (found.under_release(one) for one in ("2.16", "2.24", "2.99"))
        rate = (1 + found.software.slower_per_release) ** 2
        assert old.matrix_efficiency == pytest.approx(found.matrix_efficiency / rate)
        said, head = f"; for release 2.16, {rate - 1:.1%} slower than from 2.18 on:", found.basis.partition(":")[0]
        assert old.basis == found.basis.replace(head + ":", head + said, 1), "in the part that a short answer prints"
        assert replace(newest, basis=found.basis) == found and "; for release 2.24:" in newest.basis
        assert later.interval >= 0.25 and "; for release 2.99, which no row has:" in later.basis
        assert "none of these rows has release 2.99" in later.basis
        for own, text in ((found, "x"), (found, ""), (found, "2."), (found, "2"), (found, "9.9"), (found, "1.20"),
                          (built_in("h100-80"), "2.16"), (OWN, "2.16")):  # fmt: skip
            with pytest.raises(
                InputError,
                match=r"^release: (must be a number such as 2\.24|the rows of .* no releases|.* is of no generation)",
            ):
                own.under_release(text)

    def test_steps_take_as_much_longer_as_their_software(self):
        found, made = built_in("trn1.32xlarge"), plan()
        old = found.running("neuronx-nemo-megatron", (2, 14))
        ratio = predict(made, old).step_time_s / predict(made, found).step_time_s
        assert found.software
        assert ratio == pytest.approx(found.software.slowness("neuronx-nemo-megatron", (2, 14)), rel=1e-3)

    def test_a_plan_of_before_is_read_without_what_it_does_not_state_and_what_is_gone(self):
        entries = dict(calibration_entries(OWN))
        before = entries["calibration.constants"].split(",")
        without = [one for one in before if "task" not in one]
        entries["calibration.constants"] = ",".join([*without, "shared_ports=0.5"])
        assert calibration_of(replace(plan(), provenance=entries)).task_s == 0


class TestProvenance:
    @pytest.mark.parametrize("calibration", [OWN, built_in("trn1.32xlarge"), uncalibrated()], ids=lambda one: one.name)
    def test_a_plan_read_back_predicts_with_the_same_constants(self, calibration: Calibration):
        read = load(dump(plan(calibration=calibration)))
        same = replace(calibration_of(read), sources=calibration.sources)
        assert same == replace(calibration, fit=None, software=None)
        assert predict(read) == predict(read, calibration)

    @pytest.mark.parametrize(
        ("text", "changes", "where", "wider"),
        [
            ("tp=8,pp=2,cp=2,dp=4", {}, {"cp": "2, and rows have 1"}, 3 * 0.1**2),
            ("tp=8,pp=4,dp=4", {"cluster_name": "trn1n.32xlarge"}, {"cluster": "trn1n.32xlarge, and rows have"}, 0.03),
            ("tp=32,pp=4,dp=1", {}, {"tp": "32, and rows have 1, 8"}, 0.2**2 - 0.1**2),
            ("tp=8,pp=4,dp=4,recompute=full", {}, {"recompute": "full, and rows have none"}, 3 * 0.1**2),
            ("tp=8,pp=4,dp=4", {"seq_len": 4096}, {"sequence": "4096, and rows have 8192 to 16384: a factor of 2"}, 0),
            ("tp=32,pp=2,cp=2,dp=1", {}, {"tp": "32", "cp": "2"}, 0.2**2 - 0.1**2 + 0.03),
        ],
    )
    def test_what_no_row_had_widens_the_interval_by_what_left_out_rows_were_off_by(
        self, text: str, changes: dict[str, Any], where: dict[str, str], wider: float
    ):
        seen = {
            "tp": Seen(values=("1", "8"), off=0.2),
            "recompute": Seen(values=("none",)),
            "sequence": Seen(values=("8192", "16384"), off=0.05),
        }
        reach = Reach(cluster="trn1.32xlarge", axes=("tp", "pp", "dp"), kernels=("nxd",))
        here = replace(OWN, interval=0.1, reach=reach, seen=seen, best_mfu=0.99)
        inside, beyond = predict(plan(calibration=here)), predict(plan(text, here, **changes))
        assert not inside.outside and inside.basis == beyond.basis == here.basis
        assert inside.high_s / inside.step_time_s - 1 == pytest.approx(0.1)
        assert beyond.outside.keys() == where.keys()
        assert all(beyond.outside[feature].startswith(words) for feature, words in where.items())
        assert beyond.high_s / beyond.step_time_s - 1 == pytest.approx(math.sqrt(0.1**2 + wider))
        assert predict(plan(text, uncalibrated(), **changes)).outside == {}, "reaches nowhere anyway"

    def test_other_software_than_that_of_the_rows_and_fp8_make_it_a_quarter_at_least(self):
        seen = {"products": Seen(values=("bf16", "fp8"), off=0.9)}
        reach = Reach(cluster="h100-80", axes=("tp", "pp", "dp"), kernels=("te",))
        here = replace(OWN, interval=0.1, reach=reach, seen=seen, best_mfu=0.99)
        work = Precision.named("bf16")
        changes: list[tuple[dict[str, Any], Calibration, float, set[str]]] = [
            ({"precision": work}, here, 0.1, set()),
            ({"precision": replace(work, products="fp8")}, here, 0.25, {"products"}),
            ({"precision": replace(work, products="fp8")}, replace(here, seen={}), 0.25, {"products"}),
            ({"precision": Precision.named("fp16")}, here, 0.9, {"products"}),
            ({"kernels": "mcore"}, here, 0.25, {"kernels"}),
            ({"kernels": "mcore"}, replace(here, interval=0.2), 0.4, {"kernels"}),
            ({"kernels": "torch_engine_gpu"}, here, max(0.25, departures().unknown), {"kernels"}),
        ]
        for change, constants, interval, where in changes:
            change = {"kernels": "te", **change}
            found = predict(plan("tp=8,pp=4,dp=1", constants, cluster_name="h100-80", nodes=4, **change))
            assert found.high_s / found.step_time_s - 1 == pytest.approx(interval) and found.outside.keys() == where

    def test_a_program_without_rows_of_mixtures_is_off_by_what_others_were(self):
        for path in FILES:
            assert built_in(path.stem).seen["experts"].values == ("0",)
        ours = replace(OWN, interval=0.1, seen={"experts": Seen(values=("0", "8"), off=0.2)})
        for constants, interval in ((built_in("h100-80", "neuron_native"), UNSEEN_OFF["experts"]), (ours, 0.1)):
            question = {"model_name": "mixtral-8x7b", "cluster_name": "h100-80", "nodes": 4}
            found = predict(plan("tp=8,pp=4,dp=1", constants, **question))
            assert found.high_s / found.step_time_s - 1 == pytest.approx(interval)
            assert ("experts" in found.outside) == (constants is not ours)

    def test_a_plan_better_than_the_best_row_says_so(self):
        own = predict(plan(calibration=replace(OWN, best_mfu=0.99))).mfu_causal
        assert own and "mfu" not in predict(plan(calibration=replace(OWN, seen=SEEN, best_mfu=own))).outside
        above = predict(plan(calibration=replace(OWN, seen=SEEN, best_mfu=own / 2)))
        assert above.outside == {"mfu": f"{own:.1%} without masked pairs, and the best row has {own / 2:.1%}"}

    @pytest.mark.parametrize(
        ("change", "fault"),
        [
            ({"constants": "far_link_efficiency=1"}, "provenance.calibration.constants: must be NAME=NUMBER"),
            ({"constants": ",".join(f"{name}=x" for name in (*CONSTANTS, "interval"))}, "found 'x'"),
            ({"constants": ",".join(f"{name}=2" for name in (*CONSTANTS, "interval"))}, "must lie in"),
            ({"reach": "trn1"}, "write CLUSTER: AXES"),
            ({"basis": ""}, "provenance.calibration.basis: say what"),
        ],
    )
    def test_a_wrong_edit_is_refused_with_its_place(self, change: dict[str, str], fault: str):
        made = plan(calibration=OWN)
        entries = {f"calibration.{name}": text for name, text in change.items()}
        with pytest.raises(InputError) as caught:
            predict(replace(made, provenance={**made.provenance, **entries}))
        assert fault in str(caught.value)
