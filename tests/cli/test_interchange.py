"""What ``import`` and ``export`` print, write and refuse, as a stranger types them in an empty folder."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from autoshard.cli import main
from autoshard.plan.codec import load
from tests.conftest import Typed
from tests.imports.published import PUBLISHED, Published

NXDT = next(case for case in PUBLISHED if case.file == "hf_llama3_70B_config.yaml")
SMALL = """
zero1: true
trainer: {devices: 32, num_nodes: 1}
tensor_model_parallel_size: 8
micro_batch_size: 1
global_batch_size: 64
encoder_seq_length: 2048
num_layers: 32
hidden_size: 4096
rope_theta: 500000.0
max_position_embeddings: 8192
sequence_parallel: true
activations_checkpoint_granularity: full
fusions: {flash_attention: true}
unknown_option: 3
"""


@pytest.fixture
def recipe() -> Path:
    path = Path("recipe.yaml")
    path.write_text(SMALL, encoding="utf-8")
    return path


def test_an_import_says_it_all_on_a_screen(typed: Typed, recipe: Path) -> None:
    out = typed.answer(f"import {recipe}")
    for words in (
        "NxD Training",
        "llama3-8b",
        "step ",
        "memory ",
        "runs ",
        "best ",
        "80% interval",
        "not read: unknown_",
    ):
        assert words in out
    assert "assumed cluster trn1.32xlarge" in out and "(--cluster sets it)" in out
    assert len(out.splitlines()) <= 40


def test_an_import_is_kept_as_a_plan_and_exported_again(typed: Typed, recipe: Path) -> None:
    assert typed(f"import {recipe} --no-search --out plan.json")[0] == 0
    plan = load(Path("plan.json"))
    assert str(plan.candidate) == "tp=8,pp=1,dp=4,recompute=full"
    assert "is a plan. `autoshard export plan.json" in typed("import plan.json")[2]
    code, out, _ = typed("export plan.json --to nxdt")
    assert code == 0 and "says all" in out and "wrote plan.nxdt.yaml" in out
    data = json.loads(typed("import plan.nxdt.yaml --no-search --json")[1])
    assert data["candidate"] == str(plan.candidate) and data["not_read"] == []
    assert data["imported"]["prediction"]["step_time_s"] == plan.prediction.step_time_s if plan.prediction else False


def test_what_is_to_be_typed_next_asks_the_same(typed: Typed, recipe: Path) -> None:
    asked = f"import {recipe} --no-search --nodes 2 --fix pp=2,recompute=none --headroom 0.05"
    said = typed(asked)[1]
    following = re.search(r"^next +autoshard (.*(?:\n {9}.*)*)", said, re.MULTILINE)
    assert following and typed(" ".join(following[1].split()))[0] == 0
    candidate, cluster = (json.loads(typed(f"{asked} --json")[1])[key] for key in ("candidate", "nodes"))
    kept = load(Path("imported.json"))
    assert (str(kept.candidate), kept.cluster.num_nodes, kept.headroom) == (candidate, cluster, 0.05)


def test_what_cannot_run_is_said_and_not_kept(typed: Typed, recipe: Path) -> None:
    recipe.write_text(SMALL.replace("tensor_model_parallel_size: 8", "tensor_model_parallel_size: 4"), encoding="utf-8")
    code, out, _ = typed(f"import {recipe} --no-search --out plan.json")
    assert code == 1 and "cannot run" in out and "Use tp 1, 8 or 32" in out and not Path("plan.json").exists()
    code, out, _ = typed(f"import {recipe} --no-search --fix tp=1 --cluster h100 --global-batch 64 --json")
    data = json.loads(out)
    assert data["cluster"] == "h100-80" and any("does not run on" in one["why"] for one in data["assumed"])


def test_states_that_are_divided_over_a_part_of_the_ranks_are_kept_as_a_plan(typed: Typed) -> None:
    case = next(case for case in PUBLISHED if case.file == "tp_hsdp.yaml")
    Path(case.file).write_text(case.text, encoding="utf-8")
    line = f"import {case.file} --model llama3-8b --seq-len 2048 --global-batch 8 --no-search"
    assert "ZeRO-3 over groups of 2 ranks" in typed.answer(f"{line} --out plan.json")
    assert load(Path("plan.json")).zero_group == 2


def test_an_export_prices_what_is_lost_and_keeps_files(typed: Typed, recipe: Path) -> None:
    assert typed(f"import {recipe} --no-search --cluster h100 --nodes 4 --fix pp=4,tp=2 --out plan.json")[0] == 0
    data = json.loads(typed("export plan.json --to accelerate --json")[1])
    assert data["differences"][0]["what"] == "pipeline stages (pp=4)"
    assert data["as_run"]["step_time_s"] > 0 and data["ratio"]["low"] <= data["ratio"]["value"] <= data["ratio"]["high"]
    Path("plan.megatron.sh").write_text("mine", encoding="utf-8")
    assert "holds something else, and is kept. Type --force" in typed.refusal("export plan.json --to megatron")
    assert typed("export plan.json --to megatron --force")[0] == 0


@pytest.mark.slow
def test_a_model_that_a_file_cannot_say_is_not_exported(typed: Typed) -> None:
    assert typed("plan --model tiny-olmo2 --cluster h100 --seq-len 128 --fix tp=2,pp=1 --out plan.json")[0] == 0
    assert "write no key of Megatron-LM for norm_place, qk_norm_over of tiny-olmo2" in typed.refusal(
        "export plan.json --to megatron"
    )
    assert not Path("plan.megatron.sh").exists()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import", "FILE: missing"),
        ("import none.yaml", "there is no such file"),
        ("import .", "is a folder without a log"),
        ("import recipe.yaml --nodes 0", "--nodes: must be at least 1"),
        ("import recipe.yaml --model nothing", "is not a known model"),
        ("import recipe.yaml --cluster nothing", "is not a cluster"),
        ("import recipe.yaml --fix tp=x", "is not a whole number"),
        ("import recipe.yaml --ranks 4", "--ranks: unknown option"),
        ("export plan.json --to", "--to: a value is missing"),
        ("export none.json --to nxdt", "there is no such file"),
        ("export recipe.yaml --to nemo", "not one of them"),
    ],
)  # fmt: skip
def test_bad_lines_are_refused(typed: Typed, recipe: Path, line: str, says: str) -> None:
    code, _, err = typed(line)
    assert code == 2 and says in err and "Traceback" not in err, err


CASES = st.sampled_from([case for case in PUBLISHED if case.program != "bridge"])


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES, at=st.integers(0, 2000), junk=st.text(max_size=6))
def test_broken_files_are_answered_or_refused(
    case: Published, at: int, junk: str, capsys: pytest.CaptureFixture[str]
) -> None:
    published = case
    place = at % len(published.text)
    path = Path(published.file)
    path.write_text(published.text[:place] + junk + published.text[place + 1 :], encoding="utf-8")
    name = f"{path}:{published.function}" if published.function else str(path)
    code = main(["import", name, "--no-search", "--model", "llama3-8b"])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2) and "Traceback" not in out + err and bool(err) == (code == 2)
