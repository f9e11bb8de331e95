"""What a user types, the exit code, and the words that must come back; one line per fault and never a traceback."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoshard
from autoshard.cli import command_of, main
from autoshard.command_line import read_options
from autoshard.plan.codec import dump, load
from autoshard.search.api import Search
from autoshard.spec.cluster_catalogue import load_node_type
from autoshard.spec.record import encode

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
LOCAL = "plan --model tiny-llama --cluster local"
TRN1 = "plan --model llama3-8b"

FINE = [
    ("--help", "usage: autoshard COMMAND"),
    ("--version", "autoshard 0."),
    ("plan --help", "--global-batch N"),
    ("compare -h", "--fail-if-slower TEXT"),
    (f"validate {DATA / 'trainium.jsonl'}", "predictions calibrated on 15 rows of trn1.32xlarge"),
    ("calibrate -h", "--cluster TEXT"),
    ("list --help", "WHAT"),
    *(
        (f"list {what}", "name")
        for what in ("models", "recipes", "clusters", "engines", "schedules", "kernels", "rules")
    ),
    (f"{LOCAL} --top 1 --global-batch 1 --seq-len 1", "1 sequence of 1 token a step"),
    (f"{LOCAL} --optimizer sgd --precision fp32 --nodes 2 --nodes 1 --out other.json", "wrote other.json"),
    (f"{LOCAL} --fix sp=false,zero=3,tp=2,place=3/2/1/0,kernels=te,mbs=8", "zero=3,place=3-0,kernels=te"),
    (f"{LOCAL} --at tp=2,pp=2,stages=1/3,recompute=full/none", "plan tp=2,pp=2,dp=1"),
    (f"{LOCAL} --prove --fix tp=2", "the fastest by this cost model, of"),
    (f"{LOCAL} --exhaustive --fix tp=2,mbs=8", "0 pruned by their bound"),
    (f"{LOCAL} --objective memory --fix tp=2", "the smallest by this cost model"),
    (f"{LOCAL} --pareto --fix tp=2", "wrote the fastest"),
    pytest.param(
        "plan --model llama3-8b --nodes 1,2 --pareto --fix mbs=1,tp=8", "wrote the fastest", marks=pytest.mark.slow
    ),
    pytest.param(
        "plan --model llama3-8b --cluster trn2.48xlarge --fix lnc=1",
        "trn2.48xlarge at lnc 1: 128 ranks",
        marks=pytest.mark.slow,
    ),
    pytest.param("plan --model llama3-70b --nodes 512", "512 x trn1.32xlarge: 16384 ranks", marks=pytest.mark.slow),
]

WRONG = [
    ("", ["usage: autoshard COMMAND"]),
    ("plna", ["plna: not a command. Did you mean plan?"]),
    ("plan", ["--model: missing"]),
    ("list", ["WHAT: missing; one of models, recipes, clusters"]),
    (f"{LOCAL} --nodes 1,2", ["--nodes: takes several numbers with --pareto only"]),
    (f"{LOCAL} --nodes 1,x", ["--nodes: expected a whole number, or several like 4,8,16"]),
    (f"{LOCAL} --time-limit 0", ["--time-limit: must be 1 to"]),
    (
        "plan --model llama3-8b --documents separate",
        ["--documents separate: NxD's attention knows no mask but the causal one"],
    ),
    ("list model", ["WHAT: 'model' is not one of them. Did you mean models?"]),
    ("verify", ["PLAN: missing"]),
    ("verify none.json", ["none.json: cannot be read"]),
    ("explain none.json --trace .", ["--trace .: is a folder"]),
    ("validate none.jsonl", ["none.jsonl: cannot be read"]),
    ("validate .", [".: holds no files of rows: their names end in .jsonl"]),
    (f"{LOCAL} --mod x --zork", ["--mod: unknown option. Did you mean --model", "--zork: unknown option."]),
    (f"{LOCAL} zork", ["unrecognized arguments: zork. See autoshard plan --help"]),
    (f"{LOCAL} --nodes", ["argument --nodes: expected one argument"]),
    (f"{LOCAL} --pin q --pin up=[ffn", ["--pin q: '' is not a layout.", "--pin up: '[ffn' is not a layout."]),
    (f"{LOCAL} --pin u=[x] --pin u=[y]", ["--pin u: is given twice; keep one"]),
    (f"{LOCAL} --pin upp=[x]", ["--pin upp: no tensor of the forward pass has this name. Did you mean up?"]),
    (f"{LOCAL} --pin up=[batch/xx,seq,ffn/pp]", ["--pin up: unknown atom 'xx'. Known:", "--pin up: unknown atom 'pp'"]),
    (f"{LOCAL} --nodes 1.5 --ranks a --engine x", ["--nodes: expected a whole", "--ranks: exp", "Known: any, nxd"]),
    (
        f"{LOCAL} --nodes 0 --ranks 65 --lnc 1",
        ["--nodes: must be at least 1", "--ranks: local takes 1", "--lnc: local"],
    ),
    (f"{LOCAL} --nodes 2", ["--nodes: local has no network"]),
    (f"{LOCAL} --seq-len 1e30", ["--seq-len: expected a whole number, found '1e30'"]),
    (f"{LOCAL} --seq-len -4 --global-batch 0", ["--seq-len: must be at least 1", "--global-batch: must be at least 1"]),
    (f"{LOCAL} --seq-len 1000000000000000000", ["--seq-len: must be at most 2147483647"]),
    (f"{LOCAL} --seq-len=", ["--seq-len: must not be empty"]),
    (f"{LOCAL} --precision fp8", ["--precision: 'fp8' is not one of them. Known: bf16, bf16-sr, fp16, fp32"]),
    (f"{LOCAL} --top 0", ["--top: must be 1 to 100, not 0"]),
    (f"{LOCAL} --out no/such/plan.json", ["--out no/such/plan.json: there is no folder no/such. Make it first"]),
    (f"{LOCAL} --out .", ["--out .: is a folder"]),
    (f"{LOCAL} --engine nxd", ["--engine nxd: runs on Trainium only, not on local. Use --engine torch"]),
    (f"{LOCAL} --fix=", ["--fix: must not be empty"]),
    (f"{LOCAL} --fix ,", ["--fix: write key=value", "--fix: write key=value"]),
    (f"{LOCAL} --fix tp=2,tp=4,zz=1", ["--fix tp=4: tp is given twice", "--fix zz=1: unknown key"]),
    (f"{LOCAL} --fix tp=3", ["--fix tp=3: 8 query heads of tiny-llama do not divide by 3. Use tp 1, 2 or 4"]),
    (
        f"{LOCAL} --fix tp=2,cp=2,cp_kind=all_to_all",
        [
            "--fix cp_kind=all_to_all: heads are cut over cp, so they cannot be cut over tp=2 too. "
            "Use cp_kind=ring or tp=1"
        ],
    ),
    (f"{LOCAL} --at tp=2 --fix pp=2", ["--at: already names every key; leave out --fix"]),
    (f"{LOCAL} --at tp=3", ["--at tp=3,pp=1,cp=1: tp*pp*cp is 3"]),
    ("plan --model no --cluster no --nodes 0", ["--model: 'no' is not a known", "--cluster: 'no'", "--nodes: must"]),
    ("plan --model llama3-7b", ["--model: 'llama3-7b' is not a known model. Did you mean llama3-70b"]),
    (f"{TRN1} --cluster trn2.48xlarge --lnc 3", ["--lnc: trn2.48xlarge has no lnc 3. Use 1 or 2"]),
    (f"{TRN1} --engine torch", ["--engine torch: PyTorch runs natively on trn2"]),
    (f"{TRN1} --fix tp=8,pp=3", ["--fix pp=3: NxD sends between stages in groups of two"]),
    (f"{TRN1} --fix ep=2", ["--fix ep=2: llama3-8b is dense"]),
]

REFUSED = [  # answers with exit code 1: on stdout what was asked about a candidate, on stderr why there is no plan
    (f"{TRN1} --at tp=2", "refused tp=2: trn1 runs tp 1, 8 or 32"),
    (f"{TRN1} --at tp=8", "refused prediction.stage_memory[0]: pipeline rank 0 is predicted to need"),
    (f"{TRN1} --at tp=8,mbs=1024", "no estimate: dp=4,mbs=1024: a step of 1024 sequences does not divide"),
    (f"{TRN1} --at tp=8,dp=4,vp=999999999", "32 layers of llama3-8b cannot fill 999999999 stages"),
    (f"{LOCAL} --ranks 7 --json", "outer points of tiny-llama on this machine with 7 ranks is refused"),
]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(shlex.split(line))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(("line", "words"), FINE)
def test_it_answers(line: str, words: str, capsys: pytest.CaptureFixture[str]):
    code, out, err = run(line, capsys)
    assert (code, err) == (0, "")
    assert words in out


@pytest.mark.parametrize(("line", "faults"), WRONG, ids=[line[:70] for line, _ in WRONG])
def test_wrong_input_is_one_line_per_fault(line: str, faults: list[str], capsys: pytest.CaptureFixture[str]):
    code, out, err = run(line, capsys)
    assert (code, out) == (2, "")
    for words in faults:
        assert words in err
    lines = err.splitlines()
    assert not line or all(text.startswith("autoshard: ") for text in lines)
    assert not line or len(lines) >= len(faults)
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_no_says_why_and_writes_nothing(line: str, words: str, capsys: pytest.CaptureFixture[str]):
    code, out, err = run(line, capsys)
    assert code == 1
    assert words in (" ".join(out.split()) if "--at" in line else err)
    assert "--at" not in line or not err
    assert not Path("plan.json").exists()


def write(name: str, data: object) -> None:
    text = data if isinstance(data, str) else yaml.safe_dump(data)
    Path(name).write_text(text)


CONFIGS: list[tuple[object, list[str]]] = [
    ({"model": "tiny-llama", "nodez": 3, "foo": 1}, ["c.yaml: nodez: unknown key. Did you mean nodes", "foo: unknown"]),
    (
        {"model": "tiny-llama", "nodes": "many", "lnc": [1]},
        ["nodes: expected a whole number", "lnc: expected a single"],
    ),
    ({"model": "tiny-llama", "seq_len": 300.0}, ["c.yaml: seq_len: expected a whole number, found '300.0'"]),
    (
        {"model": "tiny-llama", "json": "maybe", "top": True},
        ["json: expected true or false", "top: expected a single value"],
    ),
    ({"model": 3, "cluster": "local"}, ["--model: '3' is not a known model"]),
    ({"model": "tiny-llama", "learning_rat": 1}, ["c.yaml: learning_rat: unknown key. Did you mean learning_rate?"]),
    (
        {"model": "tiny-llama", "schedule": {"shap": "cosine"}, "steps": 0, "data": {"sets": {"a": 0}}},
        ["schedule.shap: unknown key. Did you mean shape?", "data.sets.a: must weigh more than 0", "steps: must be"],
    ),
    ({"model": "tiny-llama", "steps": 0, "checkpoint": None}, ["c.yaml: steps: must be at least 1, not 0"]),
    ("model: tiny-llama\nsteps: 5\nsteps: 6\n", ["the key 'steps' stands twice in one object"]),
    ("- 1\n- 2\n", ["must hold options"]),
    ("", ["must hold options"]),
    ("a: [1\n", ["is not YAML"]),
]


@pytest.mark.parametrize(("data", "faults"), CONFIGS)
def test_a_wrong_config_names_every_fault(data: object, faults: list[str], capsys: pytest.CaptureFixture[str]):
    write("c.yaml", data)
    code, out, err = run("plan --config c.yaml", capsys)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == len(faults)
    for words in faults:
        assert words in err


def test_a_file_of_another_kind_is_told_in_a_screenful(capsys: pytest.CaptureFixture[str]):
    write("plan.jsonl", "{\n" * 300)
    first, second = run("validate plan.jsonl", capsys)[2].splitlines()
    assert first.startswith("autoshard: plan.jsonl: holds no measured row that can be used. Run a plan to its end")
    assert second.startswith("autoshard: plan.jsonl lines 1 to 300: is not JSON")
    write("plan.jsonl", "".join("{" + " " * number + "\n" for number in range(300)))
    lines = run("validate plan.jsonl", capsys)[2].splitlines()
    assert len(lines) == 41 and lines[1].startswith("autoshard: plan.jsonl line 1: is not JSON")
    assert lines[-1] == "autoshard: and 261 faults more"


def test_a_config_that_is_missing_or_no_text_is_refused(capsys: pytest.CaptureFixture[str]):
    assert "no.yaml: cannot be read: No such file" in run("plan --config no.yaml", capsys)[2]
    Path("b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "b.yaml: is not text in UTF-8" in run("plan --config b.yaml", capsys)[2]


def test_the_command_line_wins_over_the_config_in_any_order():
    write("c.yaml", {"model": "tiny-llama", "cluster": "local", "ranks": 2, "global-batch": None, "json": True})
    plan = command_of("plan")
    for words in (
        ["--config", "c.yaml"],
        ["--config", "c.yaml", "--ranks", "8"],
        ["--ranks", "8", "--config", "c.yaml"],
    ):
        values = read_options("plan", plan, words)
        assert values and values["json"] is True
        assert values["question"].ranks == (8 if "8" in words else 2) and values["question"].global_batch is None


def test_pins_of_a_config_are_joined_by_those_of_the_command_line(capsys: pytest.CaptureFixture[str]):
    layouts = {"up": "[batch/dp, seq, ffn/tp]", "q": "[batch/dp, seq, kv_heads/tp, q_group, head_dim]"}
    Path("c.yaml").write_text(yaml.safe_dump({"model": "tiny-llama", "cluster": "local", "pins": layouts}))
    line = "plan --config c.yaml --at tp=2 --pin 'q=[batch/dp, seq, kv_heads, q_group/tp, head_dim]'"
    assert run(line, capsys)[0] == 0
    layer = load(Path("plan.json")).strategies["layer"]
    assert layer["q"].endswith("q_group/tp, head_dim]") and layer["up"].endswith("ffn/tp]")
    Path("d.yaml").write_text("model: tiny-llama\ncluster: local\npins: [q]\n")
    assert "--config d.yaml: pins: must map names to text in quotes" in run("plan --config d.yaml", capsys)[2]
    Path("d.yaml").write_text("model: tiny-llama\ncluster: local\npins: {up: [batch/dp, seq, ffn/tp]}\n")
    assert "--config d.yaml: pins: must map names to text in quotes" in run("plan --config d.yaml", capsys)[2]


def test_other_commands_take_a_config_too(capsys: pytest.CaptureFixture[str]):
    write("c.yaml", {"what": "engines", "json": True})
    assert json.loads(run("list --config c.yaml", capsys)[1])["engines"][0]["name"] == "nxd"
    assert "kernels" in json.loads(run("list kernels --config c.yaml", capsys)[1])


HF: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_hidden_layers": 22, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def test_a_model_may_be_a_file_or_a_folder_with_any_name(capsys: pytest.CaptureFixture[str]):
    Path("[red]m[").mkdir()
    Path("[red]m[/config.json").write_text(json.dumps(HF))
    for path in ("[red]m[", "[red]m[/config.json"):
        code, out, err = run(f"plan --model {path}", capsys)
        assert (code, err) == (0, "")
        assert out.startswith("[red]m[ (1.10 G parameters)")


def test_a_wrong_model_file_is_named(capsys: pytest.CaptureFixture[str]):
    Path("m.json").write_text(json.dumps({**HF, "hidden_size": -1}))
    code, out, err = run("plan --model m.json", capsys)
    assert (code, out) == (2, "")
    assert "m.json: hidden_size: must be at least 1" in err


def test_a_cluster_may_be_a_file(capsys: pytest.CaptureFixture[str]):
    data = encode(load_node_type("trn1.32xlarge"))
    write("mine.yaml", {**data, "name": "[bold]mine[/]"})
    code, out, err = run(f"{TRN1} --cluster mine.yaml --nodes 2", capsys)
    assert (code, err) == (0, "")
    assert "on 2 x [bold]mine[/]: 64 ranks" in out
    write("broken.yaml", {**data, "nme": 1, "chips_per_node": "x"})
    code, out, err = run(f"{TRN1} --cluster broken.yaml", capsys)
    assert (code, out, len(err.splitlines())) == (2, "", 2)
    assert "--cluster broken.yaml: nme: unknown key. Did you mean name?" in err


@pytest.fixture(scope="module")
def plan_text() -> str:
    """Return a plan for Trainium, small enough to be edited and verified in a moment."""
    return dump(autoshard.plan("tiny-llama", "trn1.32xlarge", search=Search(pins="kernels=nxd_core")))


def edited(text: str, change: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    data = json.loads(text)
    change(data)
    Path("plan.json").write_text(json.dumps(data))
    return run("verify plan.json", capsys)


def test_explain_shows_every_block_and_writes_the_predicted_step_as_a_trace(capsys: pytest.CaptureFixture[str]):
    search = Search(pins="tp=2,pp=2,schedule=1f1b,recompute=full")
    Path("plan.json").write_text(dump(autoshard.plan("tiny-llama", "local", search=search)))
    code, out, err = run("explain plan.json --trace step.json", capsys)
    assert (code, err) == (0, "")
    for words in ("embed, once", "layer full, 4 times", "head, once", "all_gather seq/tp", "shared-memory x 2"):
        assert words in out
    assert out.endswith("wrote step.json; open it at https://ui.perfetto.dev\n") and "second best" in out
    assert max(map(len, out.splitlines())) <= 120
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {"F0.0", "B1.0", "send F0.0"} <= {event["name"] for event in events}
    code, _, err = run("explain plan.json --trace plan.json", capsys)
    assert code == 2 and "--trace plan.json: is the plan itself" in err and load(Path("plan.json"))
    keys = {"candidate", "blocks", "rules", "basis", "dollars", "prediction", "unlimited_s", "runners_up"}
    assert set(json.loads(run("explain plan.json --json", capsys)[1])) == keys
    data = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**data, "micro_batch": 3}))
    code, out, _ = run("explain plan.json --trace other.json", capsys)
    assert code == 1 and "refused" in out and "second best" not in out and not Path("other.json").exists()


VERIFIED = [
    (lambda data: None, 0, "may run on trn1.32xlarge with engine nxd"),
    (lambda data: data["cluster"].update(num_nodes=3), 1, "refused mesh: has 32 ranks, but 3 nodes"),
    (lambda data: data["model"].update(num_layers=33), 1, "refused stages: hold 4 layers"),
    (lambda data: data["stages"][0].update(recompute="selective[foo]"), 1, "foo is not known to nxd"),
    (lambda data: data["workload"].update(seq_len=128), 0, "the plan was edited after it was made"),
    (lambda data: data["prediction"].update(mfu=0.99), 0, "not what this version predicts; its own are used"),
    (lambda data: data.update(bogus=1, micro_batch="x"), 2, "plan.json: micro_batch: expected a whole number"),
    (lambda data: data["prediction"].update(step_time_s=1.0), 2, "prediction.time_parts: the parts add up to"),
]


@pytest.mark.parametrize(("change", "code", "words"), VERIFIED, ids=[case[2] for case in VERIFIED])
def test_verify_finds_what_was_edited(
    change: Any, code: int, words: str, plan_text: str, capsys: pytest.CaptureFixture[str]
):
    found, out, err = edited(plan_text, change, capsys)
    assert (found, bool(err), bool(out)) == (code, code == 2, code < 2)
    assert words in " ".join((out or err).split())
    assert ("edited" in out) == ("edited" in words)


@pytest.mark.parametrize(
    ("line", "code", "keys"),
    [
        (f"{LOCAL} --json", 0, {"plan", "dollars", "runners_up", "certificate"}),
        (f"{LOCAL} --at tp=2 --json", 0, {"rejections", "plan", "dollars"}),
        (f"{TRN1} --at tp=8,mbs=1024 --json", 1, {"rejections", "plan", "dollars"}),
        ("list rules --json", 0, {"rules"}),
        ("verify plan.json --json", 0, {"rejections", "notices", "proof"}),
        ("verify edited.json --json", 1, {"rejections", "notices", "proof"}),
    ],
)
def test_json_is_one_object_and_nothing_else(
    line: str, code: int, keys: set[str], plan_text: str, capsys: pytest.CaptureFixture[str]
):
    Path("plan.json").write_text(plan_text)
    Path("edited.json").write_text(json.dumps({**json.loads(plan_text), "micro_batch": 3}))
    found, out, err = run(line, capsys)
    assert (found, err) == (code, "")
    assert set(json.loads(out)) == keys
    if "runners_up" in keys:
        printed = json.loads(out)["plan"]
        assert printed.pop("candidate") == str(load(Path("plan.json")).candidate)
        assert printed == json.loads(Path("plan.json").read_text())


def test_sets_that_are_typed_one_by_one_are_all_taken() -> None:
    words = ["plan.json", "--data.set", "sets/web=2", "--data.set", "sets/code=1", "--schedule.warm-up-steps", "3"]
    values = read_options("run", command_of("run"), words)
    assert values and values["training"].data.sets == {"sets/web": 2.0, "sets/code": 1.0}
    assert values["training"].schedule.warm_up_steps == 3
