"""``python -m benchmarks on_trainium``: dry runs end, parts fail alone, and what a device runs is read as it should."""

import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import benchmarks.trainium.machine as machine_module
import benchmarks.trainium.running as running
from autoshard.calibration.rows import Occasion, row_of
from autoshard.cli import main as cli_main
from autoshard.plan.candidate import Candidate
from autoshard.plan.codec import load
from autoshard.plan.plan import Plan
from autoshard.runtime.here import node_type_here
from autoshard.spec.record import encode
from benchmarks import SUITES, on_trainium
from benchmarks.__main__ import main
from benchmarks.guarded import Setting
from benchmarks.trainium import layouts, rows, shapes, stage, wires
from benchmarks.trainium.cores import Core
from benchmarks.trainium.machine import Machine, machine_of
from benchmarks.trainium.timed import ENDING, timing
from tests.slower import rest_is_slow

TRAINIUMS = ("trn1.2xlarge", "trn1.32xlarge", "trn2.48xlarge", "trn3-gen1")


def played(tmp_path: Path, name: str = "trn1.32xlarge", *, dry: bool = True) -> Machine:
    """A machine that is not here; not dry, with programs of a test's own in the place of torchrun."""
    setting = Setting(folder=tmp_path, dry=True, machine=name)
    found = machine_of(setting)
    real = Setting(folder=tmp_path, dry=False, machine=None)
    return found if dry else Machine(node_type=found.node_type, engines=found.engines, setting=real)


# -- the command ------------------------------------------------------------------------------------------


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.thorough
def test_a_dry_run_goes_through_all_parts_and_one_that_fails_leaves_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rehearsed").write_text("a file where a part wants a folder", encoding="utf-8")
    words = ["on_trainium", "--json", "--dry-run", "--machine", "trn1.2xlarge", "--out", str(tmp_path)]
    assert main(words) == 1
    said = capfd.readouterr()
    found = {row["name"]: row for row in lines(said.out)}
    (failed,) = [row for row in found.values() if "failed" in row]
    assert failed["name"] == "layouts" and "5 of 6 parts ended well" in said.err
    assert {"stage_tp1_compile", "stage_tp1_step", "stage_tp1_memory", "attention_tp8_both", "row_dp2"} <= found.keys()
    assert found["all_reduce_dp_2_65536"]["unit"] == "s, predicted (dry run)"


@pytest.mark.thorough
def test_every_layout_of_a_dry_run_computes_what_one_process_does(tmp_path: Path) -> None:
    found = list(layouts.run(played(tmp_path)))
    assert len(found) == 20 and all(one.holds and one.value < 1e-5 for one in found if one.name != "layout_bf16")


@pytest.mark.thorough
def test_collectives_run_between_few_ranks_of_the_host(tmp_path: Path) -> None:
    found = list(wires.run(played(tmp_path)))
    assert len(found) == 3 * len(wires.KINDS) * len(wires.SIZES)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--dry-run --parts stage_tp9", "--parts: there is no part 'stage_tp9' here. Did you mean"),
        ("--dry-run --machine h100-80", "--machine: h100-80 is no Trainium. Use one of trn1.2xlarge, trn1.32xlarge"),
        ("--dry-run --machine trn9", "cluster: 'trn9' is not a cluster."),
        (
            "",
            "there is no Trainium here that neuron-ls shows. Rent one (docs/guides/trainium.md), or type --dry-run",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["on_trainium", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says)


def test_what_it_costs_is_said_before_it_starts(tmp_path: Path) -> None:
    assert SUITES["on_trainium"] == "benchmarks.on_trainium:SUITE"
    for name, says in (
        ("trn1.32xlarge", "53.03 dollars at 21.50 an hour on demand"),
        ("trn2.48xlarge", "no price of trn2.48xlarge is known here"),
    ):
        setting = Setting(folder=tmp_path, dry=True, machine=name)
        opening = on_trainium.opening(setting, on_trainium.parts(setting))
        assert says in opening and "layouts: tiny models" in opening and "minutes" in opening


# -- what is measured of which machine ----------------------------------------------------------------------


@pytest.mark.parametrize("name", rest_is_slow(TRAINIUMS, 0, 1))
def test_every_machine_has_parts_whose_plans_its_rules_let_run(name: str, tmp_path: Path) -> None:
    machine = played(tmp_path, name)
    parts = {part.name for part in on_trainium.parts(machine.setting)}
    assert {"wires", "products", "kernels", "rows"} <= parts
    plans = [stage.stage_plan(machine, case) for case in stage.cases(machine).values()]
    plans += rows.plans(machine, machine.engines[0]).values()
    assert all(plan.mesh.num_ranks == plan.cluster.num_ranks for plan in plans)
    if name != "trn3-gen1":
        assert len(rows.plans(machine)) >= 3 and len(layouts.plans(machine)) >= 18
    assert ("layouts_native" in parts) == ("torch" in machine.engines)


def test_the_stage_is_both_plans_of_the_70b_and_on_trn2_both_ways_to_join_cores(tmp_path: Path) -> None:
    assert [Candidate.parse(case.text).tp for case in stage.cases(played(tmp_path)).values()] == [8, 32]
    trn2 = played(tmp_path, "trn2.48xlarge")
    found = [stage.stage_plan(trn2, case) for case in stage.cases(trn2).values()]
    assert [(plan.cluster.lnc, plan.engine) for plan in found] == [(2, "nxd"), (1, "nxd"), (2, "torch")]


def test_a_machine_is_what_neuron_ls_says_and_has_the_engines_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = {"instance_type": "trn2.3xlarge", "logical_neuroncore_config": 2}
    monkeypatch.setattr(machine_module, "neuron_devices", lambda: [device])
    monkeypatch.setattr("autoshard.runtime.here.neuron_devices", lambda: [device])
    monkeypatch.setattr(machine_module, "_is_there", lambda engine: engine == "torch")
    found = machine_of(Setting(folder=tmp_path, dry=False, machine=None))
    assert (found.node_type.name, found.engines, found.node().num_ranks) == ("trn2.3xlarge", ("torch",), 4)
    assert not any(tmp_path.iterdir()), "to look at a machine writes nothing"
    assert "layouts" not in {part.name for part in on_trainium.parts(found.setting)}


# -- what a device would run, with a stand-in for torchrun ----------------------------------------------------


def row(plan: Plan, name: str) -> str:
    """The measured row that ``autoshard run`` leaves of a plan."""
    occasion = Occasion(
        name=name, step_time_s=5.0, date="2026-11-24", versions="autoshard 0.1.0, torch 2.9.0",
        platform=plan.cluster.name,
    )  # fmt: skip
    return json.dumps({key: value for key, value in encode(row_of(plan, occasion)).items() if value is not None})


class Torchrun:
    """Leaves what ``autoshard run`` leaves, and notes what it was told."""

    def __init__(self, losses: Sequence[float] = (2.0, 1.5)) -> None:
        self.commands, self.losses = list[Sequence[str]](), losses

    def __call__(self, command: Sequence[str], more: Mapping[str, str] | None = None) -> str:
        self.commands.append(command)
        if "--compile-only" in command:
            return "Total graphs: 3\nTotal successful compilations: 3\nTotal failed compilations: 0\n"
        folder, plan = Path(command[command.index("--out") + 1]), command[command.index("run") + 1]
        (folder / "logs").mkdir(parents=True)
        (folder / "plan.json").write_text(Path(plan).read_text("utf-8"), encoding="utf-8")
        neuron = {"device_bytes": 32 * 2**33}
        steps = [{"loss": one, "norm": 1.0, "time_s": 9.0, "neuron": neuron} for one in self.losses]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps), encoding="utf-8")
        (folder / "report.json").write_text(json.dumps({"step_time_s": {"measured": 5.0}}), encoding="utf-8")
        (folder / "measured.jsonl").write_text(row(load(Path(plan)), folder.name), encoding="utf-8")
        if "benchmarks.trainium.timed" in command:
            graphs = [["micro_batch", 2.0], ["micro_batch", 1.0], ["update", 0.5]]
            text = "".join(json.dumps(one) + "\n" for one in graphs)
            folder.with_name(folder.name + ENDING).write_text(text, encoding="utf-8")
        return ""


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Torchrun:
    found = Torchrun()
    for module in (running, stage, wires):
        monkeypatch.setattr(module, "started", found)
    return found


def test_a_stage_is_compiled_run_and_timed_graph_by_graph(tmp_path: Path, torchrun: Torchrun) -> None:
    found = {one.name: one.row() for one in stage.run("tp8", played(tmp_path, dry=False))}
    assert found["stage_tp8_compile"]["graphs"] == found["stage_tp8_compile"]["predicted_graphs"] == 3
    assert (found["stage_tp8_step"]["value"], found["stage_tp8_step"]["first_step_s"]) == (5.0, 9.0)
    assert found["stage_tp8_step"]["measured_over_predicted"] == pytest.approx(5.0 / 6.15, rel=0.05)
    assert found["stage_tp8_memory"]["value"] == 2**33 and found["stage_tp8_graph_micro_batch"]["times"] == 2
    rank_commands = [command for command in torchrun.commands if "torch.distributed.run" in command]
    assert all(command[command.index("--nproc-per-node") + 1] == "32" for command in rank_commands)
    assert [one.name for one in (tmp_path / "runs").iterdir()] == ["stage_tp8"], "a slowed run is no row"


def test_rows_of_stages_and_of_rows_come_out_as_one_file_for_others(
    tmp_path: Path, torchrun: Torchrun, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = played(tmp_path, dry=False)
    assert list(stage.run("tp8", machine))
    found = {one.name: one.row() for one in rows.run(machine)}
    assert found["rows"]["value"] == 1 + len(rows.plans(machine)) and not found["rows"]["left_out"]
    assert cli_main(["validate", str(tmp_path / rows.CONTRIBUTION), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["rows"]) == found["rows"]["value"] and not told["left_out"]


def test_rows_of_a_machine_outside_the_catalogue_lie_beside_its_file(
    tmp_path: Path, torchrun: Torchrun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [{"instance_type": "trn2.3xlarge", "logical_neuroncore_config": 2}]
    monkeypatch.setattr("autoshard.runtime.here.neuron_devices", lambda: devices)
    node_type = node_type_here()
    assert node_type
    setting = Setting(folder=tmp_path, dry=False, machine=None)
    machine = Machine(node_type=node_type, engines=("nxd",), setting=setting)
    (*found, last) = rows.run(machine)
    assert len(found) == last.value == 3
    assert cli_main(["validate", str(tmp_path / "runs"), "--json"]) == 0
    assert cli_main(["validate", str(tmp_path / rows.CONTRIBUTION), "--json"]) == 0, "its rows carry the file"
    assert len(json.loads(capsys.readouterr().out.rpartition("\n{\n")[0])["rows"]) == 3


@pytest.mark.slow
def test_layouts_are_held_against_one_process_of_the_same_question(tmp_path: Path, torchrun: Torchrun) -> None:
    machine = played(tmp_path, "trn1.2xlarge", dry=False)
    found = list(layouts.run(machine))
    assert found and all(one.holds and one.value == 0 for one in found)
    single = [command for command in torchrun.commands if "torch.distributed.run" not in command]
    assert {load(Path(command[command.index("run") + 1])).cluster.name for command in single} == {"local"}
    torchrun.losses = (2.0, 9.0)
    (one, *_) = layouts.run(played(tmp_path / "second", "trn1.2xlarge", dry=False))
    assert one.holds, "both have the same losses"


@pytest.mark.slow
def test_a_layout_that_is_off_misses_its_bar(tmp_path: Path) -> None:
    plan = next(iter(layouts.plans(played(tmp_path, "trn1.2xlarge")).values()))
    ran = [_ran(tmp_path, plan, str(norm), norm) for norm in (1.0, 1.01)]
    result = layouts.compared("tp", plan, *ran, dry=False)
    assert not result.holds and result.value == pytest.approx(0.0099, rel=0.01)


def _ran(folder: Path, plan: Plan, name: str, norm: float) -> running.Ran:
    file = running.written(plan, played(folder), "p")
    (folder / name).mkdir()
    (folder / name / "plan.json").write_text(file.read_text("utf-8"), encoding="utf-8")
    return running.Ran(folder=folder / name, steps=({"loss": 2.0, "norm": norm},), report={})


def test_collectives_are_told_with_their_real_groups_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(command: Sequence[str], more: Mapping[str, str] | None = None) -> str:
        given = json.loads(Path(command[-1]).read_text("utf-8"))
        assert given["device"] == "xla" and command[command.index("--nproc-per-node") + 1] == "32"
        for wire in given["wires"]:
            assert sorted(rank for group in wire["groups"] for rank in group) == [*range(32)]
        text = "".join(json.dumps([wire["name"], 0.5]) + "\n" for wire in given["wires"])
        Path(given["out"]).write_text(text, encoding="utf-8")
        return ""

    monkeypatch.setattr(wires, "started", start)
    found = {one.name: one.row() for one in wires.run(played(tmp_path, dry=False))}
    assert found["all_reduce_tp_8_1048576"]["bytes_per_s"] == 2**21
    assert (found["all_gather_dp_4_65536"]["group"], found["all_gather_dp_4_65536"]["groups"]) == (4, 8)


def test_shapes_are_timed_as_graphs_that_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    xla, model = types.ModuleType("torch_xla"), types.ModuleType("torch_xla.core.xla_model")
    xla.sync = lambda: asked.append("sync")  # type: ignore[attr-defined]
    model.wait_device_ops = lambda: asked.append("wait")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_xla", xla)
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", model)
    core = Core(device="cpu", engine="nxd", lnc=1)
    taken_s = core.seconds(torch.matmul, (core.make(4, 4), core.make(4, 4)), times=3)
    assert taken_s is not None and taken_s > 0
    assert asked == ["sync", "sync", "wait", "sync", "sync", "sync", "wait"]


def test_dry_shapes_are_those_of_a_rank_of_the_70b(tmp_path: Path) -> None:
    found = {one.name: one.row() for one in shapes.products(played(tmp_path))}
    assert found["product_gate_up_tp8_bf16"]["shape"] == "8192 x 8192 x 7168"
    kernels = {one.name: one.row() for one in shapes.kernels(played(tmp_path))}
    assert kernels["attention_tp8_both"]["flops"] == pytest.approx(3.5 * 4 * 8192**2 * 8 * 128 / 2)


def test_graphs_are_named_by_the_function_of_the_engine_that_ends_them() -> None:
    import autoshard.engine.nxd.engine as engine

    ended, notes = list[str](), list[str]()

    def plain(name: str) -> Callable[[], None]:
        return lambda: ended.append(name)

    engine_named, engine.named = engine.named, plain

    def _one_by_one() -> None:
        engine.named("mark_step")()

    def step() -> None:
        engine.named("mark_step")()

    try:
        with timing(lambda name, seconds: notes.append(name), lambda: ended.append("waited")):
            _one_by_one()
            step()
            engine.named("cpu_mode")()
        assert engine.named is plain
    finally:
        engine.named = engine_named
    assert notes == ["micro_batch", "update"]
    assert ended == ["mark_step", "waited", "mark_step", "waited", "cpu_mode"]


def graphs_of_the_engine() -> Iterator[str]:
    """The functions of the engine that end graphs."""
    import ast
    import inspect

    import autoshard.engine.nxd.engine as engine

    for node in ast.walk(ast.parse(inspect.getsource(engine))):
        if isinstance(node, ast.FunctionDef):
            calls = [ast.unparse(one) for one in ast.iter_child_nodes(node)]
            if any("named('mark_step')()" in one for one in calls):
                yield node.name


def test_every_graph_of_the_engine_has_a_name() -> None:
    from benchmarks.trainium.timed import GRAPHS

    assert set(graphs_of_the_engine()) - {"_updated"} <= set(GRAPHS)
