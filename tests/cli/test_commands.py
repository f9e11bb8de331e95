"""What a user types, the exit code, and the words that must come back; one line per fault and never a traceback."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoshard
from autoshard.command_line.reading import read_options
from autoshard.commands import COMMANDS, command_of
from autoshard.plan.codec import dump, load
from autoshard.spec.cluster_catalogue import load_node_type
from autoshard.spec.record import encode
from autoshard.spec.training import Training
from tests.conftest import Typed
from tests.slower import rest_is_slow

LOCAL = "plan --model tiny-llama --cluster local"
TRN1 = "plan --model llama3-8b"

FINE = [
    ("--help", "usage: autoshard COMMAND"),
    ("--version", "autoshard 0."),
    ("plan --help", "--global-batch N"),
    (f"{LOCAL} --top 1 --global-batch 1 --seq-len 1 --fix tp=2", "1 sequence of 1 token a step"),
    (f"{LOCAL} --optimizer sgd --precision fp32 --nodes 1 --fix tp=2,mbs=8 --out o.json", "wrote o.json"),
    (f"{LOCAL} --fix sp=false,zero=3,tp=2,place=3/2/1/0,kernels=te,mbs=8", "zero=3,place=3-0,kernels=te"),
    (f"{LOCAL} --at tp=2,pp=2,stages=1/3,recompute=full/none", "layout   tp=2,pp=2,dp=1"),
    (f"{TRN1} --nodes 4 --at tp=8,pp=4,dp=4,recompute=full --release 2.16", "2.16,"),
    (f"{LOCAL} --prove --fix tp=2,mbs=8", "changes: no gain"),
    (f"{LOCAL} --prove exact --fix tp=2,mbs=8", "search   the fastest of "),
    ("plan --prove tiny-llama --cluster local --fix tp=2,mbs=8", "search   "),
    (f"{LOCAL} --exhaustive --fix tp=2,mbs=8", "search   "),
    (f"{LOCAL} --objective memory --fix tp=2,mbs=8", "search   the smallest of "),
    (f"{LOCAL} --pareto --fix tp=2,mbs=8", "wrote the fastest"),
    ("plan --config tiny-llama-local --fix tp=2,mbs=8", "wrote plan.json"),
]
LONG = [
    (f"{TRN1} --nodes 1,2 --pareto --fix mbs=1,tp=8", "wrote the fastest"),
    (f"{TRN1} --cluster trn2.48xlarge --fix lnc=1", "trn2.48xlarge at lnc 1: 128 ranks"),
    ("plan --model llama3-70b --nodes 512", "512 x trn1.32xlarge: 16384 ranks"),
]
WRONG = [
    ("plan --model tiny-llama --cluster local --seq-len 2147483647", ["step_time_s: "]),
    ("", ["usage: autoshard COMMAND"]),
    ("plna", ["plna: not a command. Did you mean plan?"]),
    ("llama-tiny", ["llama-tiny: not a command. Type: autoshard plan tiny-llama"]),
    ("sweep tiny --wandb=list.yaml", ["--wandb list.yaml: is no project of W&B"]),
    ("run tiny-text --track.wandb=list.yaml", ["track.wandb: list.yaml is no project of W&B"]),
    ("plan llama-tiny", ["'llama-tiny' is not a known model. Did you mean tiny-llama"]),
    ("plan --model zzz --cluster qqq", ["autoshard list models prints all", "autoshard list clusters prints all"]),
    ("run nope", ["nope: there is no such file. autoshard list recipes prints all"]),
    ("run text-tiny", ["text-tiny: there is no such file. Did you mean tiny-text"]),
    ("plan", ["--model: missing"]),
    ("list", ["WHAT: missing; one of models, recipes, clusters"]),
    ("list model", ["WHAT: 'model' is not one of them. Did you mean models?"]),
    ("verify none.json", ["none.json: there is no such file"]),
    ("plan --config tiny-txt", ["--config tiny-txt: there is no such file. Did you mean tiny-text"]),
    ("launch tiny-txt --scheduler slurm", ["tiny-txt: there is no such file. Did you mean tiny-text"]),
    (
        "launch recipes/tiny-text.yaml --scheduler slurm",
        ["no such file. To use the one that comes with autoshard, type tiny-text"],
    ),
    ("sweep tny", ["tny: there is no such file. Did you mean tiny"]),
    ("explain none.json --trace .", ["--trace .: is a folder"]),
    ("validate .", [".: holds no files of rows: their names end in .jsonl"]),
    (f"{LOCAL} --nodes 1,2", ["--nodes: takes several numbers with --pareto only"]),
    (f"{LOCAL} --time-limit 0", ["--time-limit: must be 1 to"]),
    (f"{LOCAL} --mod x --zork", ["--mod: unknown option. Did you mean --model", "--zork: unknown option."]),
    (f"{LOCAL} zork", ["--model: is typed twice: zork and tiny-llama"]),
    (f"{LOCAL} --nodes", ["--nodes: a value is missing. See autoshard plan --help"]),
    (f"{LOCAL} --extend=-- --pin=--", ["--extend: a value is missing, not --", "--pin: a value is missing, not --"]),
    (
        f"{LOCAL} --pin q --pin up=[ffn",
        ["autoshard: --pin q: '' is not a layout.", "--pin up: '[ffn' is not a layout."],
    ),
    (f"{LOCAL} --pin u=[x] --pin u=[y]", ["--pin u: is given twice; keep one"]),
    (f"{LOCAL} --pin upp=[x]", ["--pin upp: no tensor of the forward pass has this name. Did you mean up?"]),
    (
        f"{LOCAL} --pin up=[batch/xx,seq,ffn/pp]",
        ["autoshard: --pin up: unknown atom 'xx'. Known:", "--pin up: unknown atom 'pp'"],
    ),
    (f"{LOCAL} --nodes 1,x --ranks a --engine x", ["--nodes: expected a whole", "--ranks: exp", "Known: any, nxd"]),
    (f"{LOCAL} --seq-len -4 --global-batch 0", ["--seq-len: must be at least 1", "--global-batch: must be at least 1"]),
    (f"{TRN1} --release x", ["--release: must be a number such as 2.24, not 'x'"]),
    (
        f"{TRN1} --cluster h100-80 --release 2.16",
        ["--release: the rows of h100-80 under autoshard, torch engine name no releases"],
    ),
    (f"{LOCAL} --tokens -2T", ["--tokens: '-2T' is not a number of tokens. Write it like 2T"]),
    (f"{LOCAL} --seq-len -8k", ["--seq-len: expected a whole number, found '-8k'"]),
    ("plan --model mixtral-8x7b --expert-imbalance -1", ["--expert-imbalance: must be at least 0"]),
    (f"{TRN1} --expert-imbalance 0", ["--expert-imbalance: llama3-8b has no experts"]),
    (f"{LOCAL} --seq-len= --top 0", ["--seq-len: must not be empty"]),
    (f"{LOCAL} --precision fp8", ["Known: bf16, bf16-sr, fp16, fp32. Products in FP8 are bf16,products=fp8."]),
    (f"{LOCAL} --out no/such/plan.json", ["--out no/such/plan.json: there is no folder no/such. Make it first"]),
    (f"{LOCAL} --fix tp=2 --fix=pp=2", ["--fix: is typed 2 times. Join its values by commas"]),
    (f"{LOCAL} --nodes 1 --nodes 2 --top 1 --top 1 --json --json", ["--nodes: is typed", "--top: is typed 2 times. K"]),
    ("plan --config a --config b", ["--config: is typed 2 times. Keep one"]),
    ("explain a.json --trace x --trace y", ["--trace: is typed 2"]),
    (f"{LOCAL} --fix tp=2,tp=4,zz=1", ["--fix tp=4: tp is given twice", "--fix zz=1: unknown key"]),
    (f"{LOCAL} --fix tp=3", ["--fix tp=3: 8 query heads of tiny-llama do not divide by 3. Use tp 1, 2 or 4"]),
    (f"{LOCAL} --at tp=2 --fix pp=2", ["--fix: has no effect beside --at, which evaluates one layout"]),
    (f"{LOCAL} --at tp=3", ["--at tp=3,pp=1,cp=1: tp*pp*cp is 3"]),
    ("plan --model no --cluster no --nodes 0", ["--model: 'no' is not a known", "--cluster: 'no'", "--nodes: must"]),
    (f"{TRN1} --cluster trn2.48xlarge --lnc 3", ["--lnc: trn2.48xlarge has no lnc 3. Use 1 or 2"]),
    (f"{TRN1} --cluster trn2.48xlarge --fix lnc=3", ["--fix lnc=3: trn2.48xlarge has no lnc 3. Use 1 or 2"]),
    (f"{TRN1} --cluster trn9 --fix lnc=3", ["autoshard: --cluster: 'trn9' is not a cluster"]),
]
REFUSED = [  # answers with exit code 1: on stdout what was asked about a candidate, on stderr why there is no plan
    (f"{TRN1} --at tp=2", "refused tp=2: trn1 runs tp 1, 8 or 32"),
    (f"{TRN1} --cluster trn2.48xlarge --at tp=4,lnc=3", "refused lnc=3: trn2.48xlarge is planned with lnc 2. Use"),
    (f"{TRN1} --at tp=8", "refused prediction.stage_memory[0]: pipeline rank 0 is predicted to need"),
    (f"{TRN1} --at tp=8,mbs=1024", "no estimate: dp=4,mbs=1024: a step of 1024 sequences does not divide"),
    (f"{LOCAL} --ranks 7 --json", "layouts of tiny-llama on this machine with 7 ranks is refused"),
]


@pytest.mark.parametrize(("line", "words"), rest_is_slow([*FINE, *LONG], 6, len(FINE)))
def test_it_answers(line: str, words: str, typed: Typed):
    assert words in typed.answer(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(command: str, typed: Typed):
    code, out, _ = typed(f"{command} -h")
    assert code == 0 and "--config FILE" in out and (command_of(command).__doc__ or "").split("\n")[0][:40] in out


@pytest.mark.parametrize(("line", "faults"), WRONG, ids=[line[:70] for line, _ in WRONG])
def test_wrong_input_is_one_line_per_fault(line: str, faults: list[str], typed: Typed):
    code, out, err = typed(line)
    assert (code, out) == (2, "") and all(words in err for words in faults)
    lines = err.splitlines()
    assert not line or (len(lines) >= len(faults) and all(text.startswith("autoshard: ") for text in lines))
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_no_says_why_and_writes_nothing(line: str, words: str, typed: Typed):
    code, out, err = typed(line)
    assert code == 1 and not Path("plan.json").exists()
    assert words in (" ".join(out.split()) if "--at" in line else err) and ("--at" not in line or not err)


CONFIGS: list[tuple[object, list[str]]] = [
    ({"model": "tiny-llama", "nodez": 3, "foo": 1}, ["c.yaml: nodez: unknown key. Did you mean nodes", "foo: unknown"]),
    (
        {"model": "tiny-llama", "nodes": "many", "lnc": [1]},
        ["nodes: expected a whole number", "lnc: expected a single"],
    ),
    ({"model": "tiny-llama", "json": "maybe", "top": True}, ["json: expected true or", "top: expected a single value"]),
    ({"model": 3, "cluster": "local"}, ["--model: '3' is not a known model"]),
    ({"model": "tiny-llama", "nodes": [1, "two"]}, ["nodes: expected a whole number, or several like 4,8,16, found"]),
    (
        {"model": "tiny-llama", "schedule": {"shap": "cosine"}, "steps": 0, "data": {"sets": {"a": 0}}},
        ["schedule.shap: unknown key. Did you mean shape?", "data.sets.a: the weight must be", "steps: must be"],
    ),
    ({"model": "tiny-llama", "pins": ["q"]}, ["c.yaml: pins: must map names to text in quotes"]),
    ("model: tiny-llama\nsteps: 5\nsteps: 6\n", ["the key 'steps' appears twice in one object"]),
    ("- 1\n- 2\n", ["must hold options"]),
    ("a: [1\n", ["is not YAML"]),
]


def write(name: str, data: object) -> None:
    Path(name).write_text(data if isinstance(data, str) else yaml.safe_dump(data))


@pytest.mark.parametrize(("data", "faults"), CONFIGS)
def test_a_wrong_config_names_every_fault(data: object, faults: list[str], typed: Typed):
    write("c.yaml", data)
    code, out, err = typed("plan --config c.yaml")
    assert (code, out, len(err.splitlines())) == (2, "", len(faults))
    assert all(words in err for words in faults)


def test_a_file_of_another_kind_is_told_in_a_screenful(typed: Typed):
    write("plan.jsonl", "{\n" * 300)
    first, second = typed("validate plan.jsonl")[2].splitlines()
    assert first.startswith("autoshard: plan.jsonl: holds no measured row that can be used. Run a plan to its end")
    assert second.startswith("autoshard: plan.jsonl lines 1 to 300: is not JSON")
    write("plan.jsonl", "".join("{" + " " * number + "\n" for number in range(300)))
    lines = typed("validate plan.jsonl")[2].splitlines()
    assert len(lines) == 41 and lines[-1] == "autoshard: and 261 faults more"


def test_a_config_that_is_missing_or_no_text_is_refused(typed: Typed):
    assert "no.yaml: there is no such file" in typed("plan --config no.yaml")[2]
    Path("b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "b.yaml: is not text in UTF-8" in typed("plan --config b.yaml")[2]


@pytest.mark.parametrize("words", ["--config c.yaml", "--config c.yaml --ranks 8", "--ranks 8 --config c.yaml"])
def test_the_command_line_wins_over_the_config_in_any_order(words: str):
    write("c.yaml", {"model": "tiny-llama", "cluster": "local", "ranks": 2, "global-batch": None, "json": True})
    values = read_options("plan", command_of("plan"), words.split())
    assert values["to"].json is True
    assert values["question"].ranks == (8 if "8" in words else 2) and values["question"].global_batch is None


def test_pins_of_a_config_are_joined_by_those_of_the_command_line(typed: Typed):
    layouts = {"up": "[batch/dp, seq, ffn/tp]", "q": "[batch/dp, seq, kv_heads/tp, q_group, head_dim]"}
    write("c.yaml", {"model": "tiny-llama", "cluster": "local", "pins": layouts})
    assert typed("plan --config c.yaml --at tp=2 --pin 'q=[batch/dp, seq, kv_heads, q_group/tp, head_dim]'")[0] == 0
    layer = load(Path("plan.json")).strategies["layer"]
    assert layer["q"].endswith("q_group/tp, head_dim]") and layer["up"].endswith("ffn/tp]")


def test_sets_that_are_typed_one_by_one_are_all_taken():
    words = ["plan.json", "--data.set", "sets/web=2", "--data.set", "sets/code=1", "--schedule.warm-up-steps", "3"]
    values = read_options("run", command_of("run"), words)
    assert values and values["training"].over(Training()).data.sets == {"sets/web": 2.0, "sets/code": 1.0}
    assert values["training"].values["schedule.warm_up_steps"] == 3


HF: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_hidden_layers": 22, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def test_a_model_and_a_cluster_may_be_files_with_any_name(typed: Typed):
    Path("[red]m[").mkdir()
    Path("[red]m[/config.json").write_text(json.dumps(HF))
    node = encode(load_node_type("trn1.32xlarge"))
    write("mine.yaml", {**node, "name": "[bold]mine[/]"})
    code, out, err = typed("plan --model [red]m[ --cluster mine.yaml --nodes 2 --fix tp=8,pp=1,mbs=1")
    assert (code, err) == (0, "") and out.startswith("[red]m[ (1.10 G parameters) on 2 x [bold]mine[/]: 64 ranks")
    Path("m.json").write_text(json.dumps({**HF, "hidden_size": -1}))
    assert "m.json: hidden_size: must be at least 1" in typed("plan --model m.json")[2]
    write("broken.yaml", {**node, "nme": 1, "chips_per_node": "x"})
    code, out, err = typed(f"{TRN1} --cluster broken.yaml")
    assert (code, out, len(err.splitlines())) == (2, "", 2)
    assert "--cluster broken.yaml: nme: unknown key. Did you mean name?" in err


@pytest.mark.slow
def test_explain_shows_every_block_and_writes_the_predicted_step_as_a_trace(typed: Typed):
    assert typed(f"{LOCAL} --at tp=2,pp=2,schedule=1f1b,recompute=full")[0] == 0
    Path("run").mkdir()
    step = {"step": 1, "loss": 6.2, "norm": 1.0, "time_s": 0.5, "tokens": 100, "phase": "steady", "at": 1.0}
    Path("run/metrics.jsonl").write_text(json.dumps(step) + "\n")
    assert "embed, once" not in typed("explain plan.json")[1] and len(typed("explain plan.json")[1].splitlines()) <= 60
    code, out, err = typed("explain plan.json --trace step.json --run run -v")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 120
    for words in ("embed, once", "layer full, 4 times", "head, once", "all_gather seq/tp", "shared-memory x 2"):
        assert words in out
    assert out.endswith("wrote step.json; open it at https://ui.perfetto.dev\n") and "second best" in out
    events = json.loads(Path("step.json").read_text())["traceEvents"]
    assert {"F0.0", "B1.0", "send F0.0", "layer 3", "recompute"} <= {event["name"] for event in events}
    assert "measured: run" in Path("step.json").read_text()
    code, _, err = typed("explain plan.json --run run")
    assert code == 2 and "--run: is what --trace draws beside the prediction. Type both" in err
    code, _, err = typed("explain plan.json --trace plan.json")
    assert code == 2 and "--trace plan.json: is the plan itself" in err and load(Path("plan.json"))
    keys = {"candidate", "blocks", "rules", "basis", "dollars", "prediction", "unlimited_s", "runners_up",
            "certificate", "gap", "pipeline_ranks", "notes"}  # fmt: skip
    assert set(json.loads(typed("explain plan.json --json")[1])) == keys
    Path("plan.json").write_text(json.dumps({**json.loads(Path("plan.json").read_text()), "micro_batch": 3}))
    code, out, _ = typed("explain plan.json -v --trace other.json")
    assert code == 1 and "refused" in out and "second best" not in out and not Path("other.json").exists()


@pytest.fixture(scope="module")
def plan_text() -> str:
    """A plan for Trainium, small enough to be edited and verified in a moment."""
    return dump(autoshard.plan("tiny-llama", "trn1.32xlarge", fix="kernels=nxd_core,mbs=1,tp=8").plan)


VERIFIED: list[tuple[Callable[[Any], object], int, str]] = [
    (lambda data: None, 0, "x trn1.32xlarge with engine nxd: no Rule speaks against it"),
    (lambda data: data["cluster"].update(num_nodes=3), 1, "uses 32 ranks, but the cluster has 96"),
    (lambda data: data["model"].update(num_layers=33), 1, "refused stages: the stages hold 4 layers together"),
    (lambda data: data["workload"].update(seq_len=128), 0, "the plan was edited after it was made"),
    (lambda data: data["prediction"].update(mfu=0.99), 0, "not what this version predicts; its own are used"),
    (lambda data: data.update(bogus=1, micro_batch="x"), 2, "plan.json: micro_batch: expected a whole number"),
]


@pytest.mark.parametrize(("change", "code", "words"), VERIFIED, ids=[case[2] for case in VERIFIED])
def test_verify_finds_what_was_edited(
    change: Callable[[Any], object], code: int, words: str, plan_text: str, typed: Typed
):
    data = json.loads(plan_text)
    change(data)
    Path("plan.json").write_text(json.dumps(data))
    found, out, err = typed("verify plan.json")
    assert (found, bool(err), bool(out)) == (code, code == 2, code < 2)
    assert words in " ".join((out or err).split()) and ("edited" in out) == ("edited" in words)


READERS = ("verify {}", "explain {} --why-not tp=8,mbs=2", "launch {} --scheduler slurm --out {}-job",
           "export {} --to nxdt --out {}.yaml", "compare {} {}", "explain {}")  # fmt: skip


@pytest.mark.parametrize("line", rest_is_slow(READERS, 4, 2))
def test_every_command_that_reads_a_plan_says_what_was_edited_and_refuses_lines_of_its_table(
    line: str, plan_text: str, typed: Typed
):
    faster, wrong = json.loads(plan_text), json.loads(plan_text)
    faster["workload"]["seq_len"] = 128
    wrong["strategies"]["layer"]["attn_out"] = "rubbish"
    for name, data in (("faster", faster), ("wrong", wrong)):
        Path(name).write_text(json.dumps(data))
    assert "the plan was edited after it was made" in " ".join(typed.answer(line.replace("{}", "faster")).split())
    code, out, err = typed(line.replace("{}", "wrong"))
    assert code in (1, 2) and "attn_out" in (out or err)


@pytest.mark.parametrize(
    ("line", "code", "keys"),
    [
        (
            f"{LOCAL} --fix tp=2 --json --force",
            0,
            {
                "plan",
                "written",
                "dollars",
                "total",
                "answers",
                "no_vendor",
                "against_vendor",
                "defaults",
                "remarks",
                "runners_up",
                "certificate",
            },
        ),
        (f"{LOCAL} --at tp=2 --json --force", 0, {"rejections", "plan", "dollars", "total", "defaults"}),
        (f"{TRN1} --at tp=8,mbs=1024 --json", 1, {"rejections", "plan", "dollars", "total", "defaults"}),
        ("list kernels --config what.yaml", 0, {"kernels"}),
        ("verify plan.json --json", 0, {"holds", "rejections", "notices", "proof"}),
        ("explain edited.json --json", 1, {"rejections"}),
    ],
)
def test_json_is_one_object_and_nothing_else(line: str, code: int, keys: set[str], plan_text: str, typed: Typed):
    Path("plan.json").write_text(plan_text)
    Path("edited.json").write_text(json.dumps({**json.loads(plan_text), "micro_batch": 3}))
    write("what.yaml", {"what": "engines", "json": True})
    found, out, err = typed(line)
    assert (found, err) == (code, "") and set(json.loads(out)) == keys
    if "runners_up" in keys:
        printed = json.loads(out)["plan"]
        assert printed.pop("candidate") == str(load(Path("plan.json")).candidate)
        assert printed == json.loads(Path("plan.json").read_text())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autoshard pl", ["plan"]),
        ("autoshard plan --objective d", ["dollars"]),
        ("autoshard plan --why", []),
        ("autoshard explain --why", ["--why-not"]),
        ("autoshard list mod", ["models"]),
        ("autoshard plan --model tiny-l", ["tiny-llama"]),
        ("autoshard run --data.s", ["--data.set"]),
        ("autoshard run tiny-te", ["tiny-text"]),
    ],
)
def test_bash_completes_commands_options_and_names(line: str, expected: list[str], typed: Typed):
    script = typed("completion bash")[1]
    words = f"COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}; _autoshard; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{words}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected and not done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_every_command_and_read_their_script_where_they_are_installed(shell: str, typed: Typed):
    code, script, _ = typed(f"completion {shell}")
    assert (
        code == 0
        and all(command in script for command in COMMANDS)
        and "--why-not" in script.replace("-l why", "--why")
    )
    if shutil.which(shell):
        subprocess.run([shell, "-n", "-c", script], check=True, capture_output=True)


def test_lists_and_comparisons_are_numbers_as_data(typed: Typed):
    rows = (
        json.loads(typed("list models --json")[1])["models"] + json.loads(typed("list clusters --json")[1])["clusters"]
    )
    numbers = {
        "parameters",
        "layers",
        "heads",
        "kv_heads",
        "ranks_per_node",
        "rank_memory_bytes",
        "rank_bf16_flops_per_s",
    }
    values = [(name, value) for row in rows for name, value in row.items() if name in numbers]
    assert len(values) > 100 and all(isinstance(value, int | float) for _, value in values)
    assert not [row for row in rows if "-" in row.values()], "what is not known is null"
    assert re.search(r"^llama3-70b +70\.55 G +80 ", typed("list models")[1], re.MULTILINE)


def test_dollars_need_a_price(typed: Typed):
    code, _, err = typed(f"{LOCAL} --objective dollars")
    assert code == 2 and "--objective: no price of local is known. Type yours, --price with the dollars" in err
