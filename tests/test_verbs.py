"""The commands as functions of Python: they return what the commands print, and raise what the commands say."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard.cli import main
from autoshard.errors import InputError, NoPlan, RunFailed
from autoshard.search.ask.api import Cost, Search
from autoshard.spec.cluster_catalogue import load_cluster
from tests.imports.logs.published import LOGS
from tests.slower import rest_is_slow


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return autoshard.plan("tiny-llama", "local", fix={"tp": 2, "pp": 1, "mbs": 8}).save(tmp_path / "plan.json")


@pytest.mark.parametrize("verb", rest_is_slow(["verify", "compare", "explain"], 2))
def test_a_verb_has_the_figures_of_its_command(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks = autoshard.plan("tiny-llama", load_cluster("local", ranks=2), fix={"tp": 2, "mbs": 8})
    paths = [str(two_ranks.save(tmp_path / "plan.json"))] * (2 if verb == "compare" else 1)
    account = getattr(autoshard, verb)(*paths)
    assert main([verb, *paths, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    if verb == "verify":
        assert account.data["holds"] is True
    page = Path(__file__).parents[1] / "docs" / "reference" / "plan-json.md"
    (row,) = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{verb}` |")]
    assert not [key for key in printed if f"`{key}`" not in row], "what is printed stands on the page"
    assert json.loads(json.dumps(account.data)) == printed
    assert str(account) and account._repr_html_().startswith("<div>")


@pytest.mark.slow
def test_a_plan_of_a_search_is_explained_without_a_file() -> None:
    result = autoshard.plan("tiny-llama", load_cluster("local", ranks=2), fix={"mbs": 8})
    account = autoshard.explain(result.plan, why_not={"pp": 2})
    assert account.data["difference"]["slower_by"] > 0
    assert result.prediction == result.plan.prediction == result.named("simple").prediction
    assert len(repr(result.plan)) < 200


def test_a_plan_goes_into_the_file_of_another_program_and_comes_back(plan_file: Path) -> None:
    account = autoshard.export(plan_file, "torchtitan")
    out = plan_file.with_name("train.py")
    out.write_text(account.data["text"])
    back = autoshard.import_(out, search=False, model="tiny-llama", cluster="local")
    assert back.data["candidate"].startswith("tp=2,pp=1,dp=2")
    with pytest.raises(InputError, match="does not run on local"):
        autoshard.export(plan_file, "nxdt")
    with pytest.raises(InputError, match="'bridge' is not known"):  # which is read, and not written
        autoshard.export(plan_file, "bridge")


def test_logs_are_read_into_rows_as_the_command_does(tmp_path: Path) -> None:
    published = next(log for log in LOGS if log.name == "titan-rowwise.log")
    (tmp_path / "train.log").write_text(published.text, encoding="utf-8")
    (tmp_path / "float8.toml").write_text(published.config[1], encoding="utf-8")
    config, place = tmp_path / "float8.toml", {"nodes": 1, "cluster": "h100-96"}
    account = autoshard.import_(tmp_path / "train.log", config=config, search=False, **place)
    (log,) = account.data["logs"]
    assert round(log["step_time_s"], 2) == 1.17 and "next_layout" not in account.data
    assert "train.log" in str(account) and log["row"]["framework"] == "torchtitan" and not log["remarks"]
    too_fast = autoshard.import_(tmp_path / "train.log", config=config, search=False, model="llama3.1-405b", **place)
    assert "of the chips' peak, which nobody reaches" in too_fast.data["logs"][0]["remarks"][-1]
    with pytest.raises(InputError, match="files: missing"):
        autoshard.import_()


def test_a_report_is_written_and_its_path_returned(plan_file: Path) -> None:
    out = autoshard.report(plan_file, out="page.html")
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_plan_that_cannot_run_is_refused_with_its_reason(plan_file: Path) -> None:
    data = json.loads(plan_file.read_text())
    data["micro_batch"] = 7
    plan_file.write_text(json.dumps(data))
    with pytest.raises(NoPlan, match="does not divide"):
        autoshard.explain(plan_file)
    with pytest.raises(InputError, match="there is no such file"):
        autoshard.load("nothere.json")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"cluster": "trn1", "seq_len": 256, "fix": {"tp": 8}}, "Use seq_len=2048"),
        ({"cluster": "a100", "search": Search(engine="nxd")}, r"search=Search\(engine='torch'\)"),
        ({"cluster": "local", "headroom": 0.99, "fix": {"tp": 4, "mbs": 1, "recompute": "none"}}, "more than the"),
    ],
)
def test_what_has_no_plan_is_advised_in_words_of_python(options: dict[str, Any], advice: str) -> None:
    with pytest.raises((NoPlan, InputError), match=advice) as refused:
        autoshard.plan("tiny-llama", **options)
    assert "--" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fix": {"tp": 7}}, r"fix=\{'tp': 7\}: "),
        ({"nodes": "2"}, "nodes: must be a whole number, not '2'"),
        ({"nodes": 0}, "nodes: must be at least 1, not 0"),
        ({"top": 0}, "top: must be at least 1, not 0"),
        ({"top": "3"}, "top: must be a whole number, not '3'"),
        ({"top": None}, "top: must be a whole number, not None"),
        ({"seq_len": "2k"}, "seq_len: must be a whole number, not '2k'"),
        ({"global_batch": 8.0}, "global_batch: must be a whole number, or tokens in words as '4M', not 8.0"),
        ({"headroom": "0.1"}, "headroom: must be a share such as 0.1, not '0.1'"),
        ({"headroom": 1.5}, "headroom: "),
        ({"objective": "speed"}, "objective: must be time, memory or dollars, not 'speed'"),
        ({"cluster": "local", "objective": "dollars"}, "objective: no price of local is known. State price="),
        ({"global_batch": "4x"}, "global_batch: expected sequences"),
        ({"fix": {"tensor": 8}}, "Did you mean tp?"),
        ({"price": "much"}, "price: 'much' is not a price"),
        ({"workload": 4}, "workload: must be a Workload, not 4. Name the others: nodes=4"),
        ({"nodes": 0, "top": 0, "seq_len": "2k"}, "nodes: .*\nseq_len: .*\ntop: "),
        ({"cluster": None}, "cluster: must be a Cluster, a name or a path, not None"),
        ({"precision": ""}, "precision: '' is not a precision"),
        ({"precision": 8}, "precision: must be number formats in words, as 'bf16', not 8"),
        ({"search": {}}, "search: must be a Search, not {}"),
        ({"cost": "mine.json"}, "cost: must be a Cost or a Calibration, not 'mine.json'"),
        ({"choose": 0}, "choose: must be fastest, .* or a number up to 100, not 0"),
        ({"search": Search(layouts={"up": "[batch/zz]"})}, r"layouts=\{'up': ...\}: unknown atom 'zz'"),
        ({"cluster": load_cluster("local"), "nodes": 4}, "nodes: no link joins 4 nodes"),
    ],
)
def test_faults_are_said_in_the_words_of_python(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        autoshard.plan("llama3-8b", **{"cluster": "trn1", **options})  # pyright: ignore


def test_an_argument_that_is_not_there_leads_to_those_that_are() -> None:
    with pytest.raises(TypeError, match=r"autoshard.plan\(\) has no argument 'gpus'. Known: choose, cluster, .*nodes"):
        autoshard.plan("llama3-8b", gpus=8)  # pyright: ignore
    with pytest.raises(TypeError, match="Did you mean seq_len"):
        autoshard.plan("llama3-8b", seqlen=8192)  # pyright: ignore


def test_an_answer_may_be_named_by_its_number() -> None:
    chosen = [autoshard.plan("tiny-llama", "local", choose=choose).plan for choose in (2, "2")]
    assert chosen[0] == chosen[1] != autoshard.plan("tiny-llama", "local", fix=None).plan


def test_dollars_are_at_the_price_that_a_script_states() -> None:
    dollars = autoshard.plan("tiny-llama", "local", fix="tp=2,mbs=8", price="3/chip").plan.dollars
    assert dollars and dollars.price_usd_per_node_hour == 3 * load_cluster("local").chips_per_node


def test_what_is_public_is_listed_before_it_is_imported() -> None:
    assert {"shard", "local", "explain", "compare", "verify", "report", "run", "load"} <= {*dir(autoshard)}


@pytest.mark.slow
def test_a_run_trains_in_its_folder_and_its_path_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = autoshard.plan("tiny-llama", load_cluster("local").with_local_ranks(1), seq_len=64, global_batch=4)
    result.save(tmp_path / "one.json")
    (tmp_path / "poem.txt").write_text("The fog comes on little cat feet. " * 200, encoding="utf-8")
    options = {"steps": 2, "learning_rate": 1e-3, "data__set": {"poem.txt": 1}, "checkpoint__to": "none"}
    folder = autoshard.run("one.json", **options)
    assert folder == Path("runs", "one")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [step["step"] for step in steps if "loss" in step] == [1, 2]
    with pytest.raises(RunFailed):
        autoshard.run("one.json", out="diverged", **{**options, "learning_rate": 1e30, "steps": 5})


def test_a_run_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="tiny-txt: there is no such file"):
        autoshard.run("tiny-txt")
    with pytest.raises(InputError, match="Type --learning-rate"):
        autoshard.run("tiny-text", lr=1e-3)


def test_values_of_other_kinds_are_refused_by_the_name_of_their_argument(plan_file: Path) -> None:
    result = autoshard.plan("tiny-llama", "local", fix={"tp": 2, "pp": 1, "mbs": 8})
    calls = {
        "fix: must be keys with values": lambda: autoshard.plan("tiny-llama", "local", fix=["tp=2"]),  # type: ignore[arg-type]
        "choose: must be fastest, .* not 'best'": lambda: autoshard.plan("tiny-llama", "local", choose="best"),
        "plan: must be a plan, or its path, .*result.plan": lambda: autoshard.explain(result),  # type: ignore[arg-type]
        "plan: must be a plan, or its path, not a value of NoneType": lambda: autoshard.verify(None),  # type: ignore[arg-type]
        "why_not: must be keys with values": lambda: autoshard.explain(plan_file, why_not=3),  # type: ignore[arg-type]
        "plan: must be the path of a plan": lambda: autoshard.run(result.plan),  # type: ignore[arg-type]
    }
    for message, call in calls.items():
        with pytest.raises(InputError, match=f"^{message}"):
            call()


def test_a_model_that_a_program_has_no_key_for_is_refused_as_by_the_command(tmp_path: Path) -> None:
    model, path = "tiny-olmo2", tmp_path / "plan.json"
    autoshard.plan(model, "local", fix={"tp": 1, "pp": 1, "mbs": 8}).save(path)
    assert main(["export", str(path), "--to", "megatron"]) == 2
    with pytest.raises(
        InputError, match=f"^plan: exports write no key of Megatron-LM for .* of {model}. Choose another"
    ):
        autoshard.export(path, "megatron")


@pytest.mark.slow
@pytest.mark.ranks
def test_what_is_false_or_none_is_as_on_a_command_line_without_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    autoshard.run("tiny-text", steps=1, json=False, seed=None, eval__keep_best=False, out=out)
    training = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert training["eval"]["keep_best"] is False and training["steps"] == 1
    with pytest.raises(InputError, match="--stepz: unknown option"):
        autoshard.run("tiny-text", stepz=None, out=out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "llama3.2-1b", "cluster": "trn2.48xlarge", "objective": "memory"}, ["--objective", "memory"]),
        ({"model": "llama3-8b", "cluster": "trn2.48xlarge", "fix": {"lnc": 1, "tp": 8}}, ["--fix", "lnc=1,tp=8"]),
        ({"model": "tiny-llama", "cluster": "local", "choose": 5}, ["--choose", "5"]),
    ],
)
def test_a_question_of_python_has_the_plan_of_the_command(
    options: dict[str, str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", options["model"], "--cluster", options["cluster"], *words, "--out", "command.json"]) == 0
    path = autoshard.plan(**options).save("python.json")  # pyright: ignore
    assert path.read_bytes() == Path("command.json").read_bytes()


def test_an_engine_is_named_and_runners_up_are_counted_by_numbers() -> None:
    few = {"seq_len": 2048, "global_batch": 8, "fix": "tp=1,pp=1"}
    result = autoshard.plan("tiny-llama", "trn2.48xlarge", search=Search(engine="torch"), **few)  # pyright: ignore
    assert result.plan.engine == "torch" and result.named(2) == result.named("2")
    for part, options in ((Search, {"engine": "x"}), (Search, {"rules": ["x"]}), (Cost, {"calibration": "x"})):
        with pytest.raises(InputError, match=next(iter(options))):
            part(**options)  # pyright: ignore
    with pytest.raises(InputError, match=r"why_not=\{'tpp': 2\}: unknown key"):
        autoshard.explain(result.plan, why_not={"tpp": 2})


def test_results_are_copied_and_sent_between_processes() -> None:
    result = autoshard.plan("tiny-llama", "local", fix={"tp": 2, "mbs": 8})
    for value in (result, result.plan, result.answers):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(autoshard.verify(result.plan))).data["holds"]
