"""Scripts and recipes are followed as far as they decide themselves; the rest is named, and nothing runs."""

from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.imports.forms.documents import parsed_documents
from autoshard.imports.forms.flat import resolved_keys
from autoshard.imports.forms.python import Unread, configurations
from autoshard.imports.forms.shell import shell_arguments
from autoshard.imports.imported import imported_run

SCRIPT = """#!/bin/bash
SIZE=8B   # a comment
TP=2
if [ ${SIZE} == "70B" ]; then
    PP=8
elif [ ${SIZE} == "8B" ]; then
    PP=2
else
    PP=4
fi
if [[ "$TP" -gt 1 && -n "$PP" ]]; then EXTRA="--sequence-parallel"; fi
if [ -z "$SIZE" ] || [ ! $TP != 2 ]; then
    BOTH=1
fi
WORLD=$((TP*PP/1+4-0))
ARGS=(
    --num-layers $((3*PP))
    "--hidden-size 4096"
)
ARGS+=(--world-size ${WORLD} --micro-batch-size=${MBS:-2})
if [ -n "${WANDB}" ]; then
    ARGS+=(--wandb-project x)
fi
for layer in 1 2; do
    ARGS+=(--lost $layer)
done
torchrun --nnodes 2 pretrain.py "${ARGS[@]}" $EXTRA --pipeline-model-parallel-size $PP
"""


def test_a_script_is_followed_as_far_as_it_decides_itself() -> None:
    assert shell_arguments(SCRIPT, "") == {
        "num_layers": "6", "hidden_size": "4096", "world_size": "8", "micro_batch_size": "2", "nnodes": "2",
        "sequence_parallel": True, "pipeline_model_parallel_size": "2",
        "conditions": ['if [ -n "${WANDB}" ]', "for layer in 1 2"],
    }  # fmt: skip


def test_a_script_reads_in_another_beside_it(tmp_path: Path) -> None:
    (tmp_path / "CONFIG.sh").write_text('export ARGS=" --num-layers ${NLS} --fp16 "\n', encoding="utf-8")
    (tmp_path / "run.sh").write_text("NLS=24\n. `pwd`/CONFIG.sh\nsbatch --nodes=4 RUN.sh\n", encoding="utf-8")
    assert parsed_documents(tmp_path / "run.sh")[""] == {"num_layers": "24", "fp16": True, "nodes": "4"}


@pytest.mark.parametrize(
    ("test", "holds"),
    [
        ("[ 3 -ge 3 ]", True), ("[ 3 -lt 3 ]", False), ("[ 3 -le 2 ]", False), ("[ a -gt b ]", None),
        ("[ -z '' ]", True),
        ("[ a -nt b ]", None), ("[ ! a == a ]", False), ("[ a != b ] || [ $x == y ]", True), ("[ $x == y ]", None),
        ("[ a == b ] && [ $x == y ]", False), ("[ 'a == b ]", None),
    ],
)  # fmt: skip
def test_conditions_hold_or_not_or_are_open(test: str, holds: bool | None) -> None:
    script = f"if {test}; then\nA=--yes\nelse\nA=--no\nfi\nrun --num-layers 1 $A\n"
    options = shell_arguments(script, "")
    assert options.get("yes", False) is (holds is True) and options.get("no", False) is (holds is False)


@pytest.mark.parametrize(
    "lines",
    [
        "A=4; B=2; C=8",
        "A=4 B=2 C=8",
        "export A=4 B='2';C=8;",
        "readonly A=4; declare -i B=2 C=$((A * B))",
        "A=${A:-4}; B=$(echo 1; echo 2) B=2 C=8 # all; of them",
        "ARGS='--x 1; --y 2'; A=4; B=2; C=8",
        "if [ 1 == 1 ]; then A=4; B=2; C=8; fi",
    ],
)
def test_several_assignments_may_stand_on_a_line(lines: str) -> None:
    sizes = "--tensor-model-parallel-size $A --micro-batch-size ${B} --num-layers $C"
    options = shell_arguments(f"{lines}\ntorchrun pretrain_gpt.py {sizes}\n", "")
    assert options == {"tensor_model_parallel_size": "4", "micro_batch_size": "2", "num_layers": "8"}


@pytest.mark.parametrize("directive", ["--nodes=16", "--nodes 16", "-N 16", "-N16   # all"])
@pytest.mark.parametrize(
    "launched", ["torchrun --nnodes $SLURM_NNODES", "torchrun --nnodes=${SLURM_JOB_NUM_NODES}", "srun python"]
)
def test_the_nodes_of_a_slurm_script_are_its_directive(directive: str, launched: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --job-name=x\n#SBATCH {directive}\n{launched} pretrain_gpt.py --num-layers 8\n"
    assert shell_arguments(script, "") == {"nnodes": "16", "num_layers": "8"}
    assert shell_arguments(script.replace("#SBATCH", "# SBATCH"), "").get("nnodes") != "16"


def test_options_in_a_variable_that_nothing_sets_are_no_value_of_the_flag_before() -> None:
    line = "torchrun --nnodes 2 pretrain.py --swiglu ${pr_options} ${load_options} --seq-length $6 $EXTRA_ARGS"
    read = shell_arguments(f'run="{line}"\neval $run', "")
    assert read["swiglu"] is True and read["seq_length"] == "$6" and read["nnodes"] == "2"
    assert read["variables"] == ["${pr_options}", "${load_options}", "$EXTRA_ARGS"]


@pytest.mark.parametrize("shell", ["sh -c", "bash -c", "srun -l --gpus 8 bash -c", "srun --gpus 8 sh -c"])
def test_a_line_that_another_shell_runs_is_read(shell: str) -> None:
    script = f'ARGS=\'--num-layers 8 --bf16\'\nRUN="python pretrain_gpt.py ${{ARGS}}"\n{shell} "cd x && ${{RUN}}"\n'
    options = shell_arguments(script, "")
    assert (options["num_layers"], options["bf16"], options.get("gpus", "8")) == ("8", True, "8")


RECIPE = '''
import os
LENGTH: int = 4 * 1024
WIDE = -1
SIZES = {"small": 2, "large": 8}

def _common(tp=2):
    cfg = Config(model=Model(tp=tp), train=dict(size=LENGTH // 2, power=2 ** 3, share=1 / 4))
    return cfg

def _tuned(cfg, scale=3):
    """Change a configuration."""
    cfg.train.size = scale * 100
    cfg.new.inner = "made"

def recipe(num_nodes: int = 2, *, fast: bool = False, name=None):
    cfg = _common(tp=4)
    _tuned(cfg, scale=1)
    other_file(cfg)
    if fast:
        cfg.train.size = 0
    elif name is None:
        cfg.model.pp = num_nodes + 1
    if os.environ:
        cfg.model.pp = 99
    cfg.model.same = cfg.model.tp == 4
    cfg.model.differs = cfg.model.tp is not None
    cfg.model.both = fast or not name
    cfg.model.neither = fast and True
    cfg.model.chosen = 7 if name is None else 8
    cfg.model.open = 7 if os else 8
    cfg.model.negative, cfg.model.wide = -num_nodes, WIDE
    cfg.model.list = [num_nodes, (1, 2)]
    cfg.model.dtype = torch.bfloat16
    cfg.model.unknown = LENGTHS[0] + 1
    cfg.model.call = other.make("x", size=3)
    cfg.model.hub = Bridge.load("org/name").config()
    cfg.model.zero = 1 // 0
    return cfg

def early(flag: bool = True):
    if flag:
        return Config(size=1)
    return Config(size=2)

def endless():
    return endless()
'''


def test_a_recipe_is_followed_through_the_functions_of_its_file() -> None:
    found = configurations(RECIPE, "")
    cfg = found["recipe"]
    model, train = cfg["model"], cfg["train"]
    assert (model["tp"], model["pp"], model["same"], model["differs"], model["both"], model["neither"]) == (
        4, 3, True, True, True, False,
    )  # fmt: skip
    assert (model["chosen"], model["list"], model["dtype"]) == (7, [2, [1, 2]], "bfloat16")
    assert isinstance(model["unknown"], Unread) and isinstance(model["open"], Unread)
    assert isinstance(model["zero"], Unread)
    assert model["hub"]["args"] == ["org/name"] and model["call"] == {"call": "other.make", "args": ["x"], "size": 3}
    assert (train["size"], train["power"], train["share"]) == (100, 8, 0.25)
    assert cfg["changed_by"] == "other_file" and cfg["new"] == {"inner": "made"}
    assert found["early"]["size"] == 1 and "endless" not in found and "_common" not in found


def test_references_lead_to_values_or_stay() -> None:
    values = {"a.b": "${.c}", "a.c": "${d}", "d": 3, "e": "${nowhere}", "f": "${f}", "g": "x${d}"}
    assert resolved_keys(values) == {"a.b": 3, "a.c": 3, "d": 3, "e": "${nowhere}", "f": "${f}", "g": "x${d}"}


def test_lists_of_arguments_and_files_without_suffix_are_read(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text('["--num-layers", 4, "--bf16"]', encoding="utf-8")
    (tmp_path / "deepspeed").write_text('{"train_batch_size": 8}', encoding="utf-8")
    assert parsed_documents(tmp_path / "args.json")[""] == {"num_layers": "4", "bf16": True}
    assert parsed_documents(tmp_path / "deepspeed")[""] == {"train_batch_size": 8}
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "large.yaml").write_bytes(b"#" * (5 * 2**20))
    for name, says in (("bytes.toml", "is not text in UTF-8"), ("large.yaml", "is far too large")):
        with pytest.raises(InputError, match=says):
            parsed_documents(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"train_batch_size": 8}'),
        ("run.yaml", "train_batch_size: 8\n"),
        ("run.toml", "[training]\nseq_len = 8\n"),
        ("run.py", "def run():\n    return Trainer.Config(parallelism=P(tensor_parallel_degree=8))\n"),
        ("run.sh", "torchrun pretrain_gpt.py --tensor-model-parallel-size 8\n"),
    ],
)
@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_files_of_editors_of_windows_are_read(tmp_path: Path, name: str, text: str, ends: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.replace("\n", ends).encode())
    assert 8 in imported_run(str(tmp_path / name)).facts.values()


def test_a_fault_names_the_key_whose_value_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHRD}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"fsdp_config\.fsdp_sharding_strategy: 'FULL_SHRD' is no sharding strategy"):
        imported_run(str(path))
    path.write_text("train_batch_size: 8\nzero_optimization: {stage: 3, zero_hpz_partition_size: [2]}\n", "utf-8")
    with pytest.raises(InputError, match=r"zero_hpz_partition_size: expected a whole number, found \[2\]"):
        imported_run(str(path))
