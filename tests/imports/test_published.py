"""Published configurations are read as their vendors mean them, and what is not read is said."""

from pathlib import Path
from typing import Any

import pytest

from autoshard.errors import InputError
from autoshard.imports.answer import answered
from autoshard.imports.imported import imported_run
from autoshard.imports.question import ImportedQuestion, ImportOptions, imported_question
from benchmarks.aws_recipes import AwsRecipe, load_aws_recipes
from tests.imports.published import PUBLISHED, Published


def asked(folder: Path, case: Published) -> ImportedQuestion:
    """The question of a published configuration, with the options that its user types."""
    path = folder / case.file
    path.write_text(case.text, encoding="utf-8")
    options: dict[str, Any] = dict(case.options)
    nodes = options.pop("nodes", None)
    name = f"{path}:{case.function}" if case.function else str(path)
    return imported_question(imported_run(name), ImportOptions(**options), nodes)


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case.program}-{case.file}")
def test_a_published_configuration_is_read_as_its_vendor_means_it(tmp_path: Path, case: Published) -> None:
    question = asked(tmp_path, case)
    request, work = question.request, question.request.workload
    assert question.run.program.name == case.program
    assert (request.model.name, str(question.candidate)) == (case.model, case.candidate)
    assert (request.cluster.name, request.cluster.num_nodes) == (case.cluster, case.nodes)
    assert (work.seq_len, work.global_batch, work.precision.name) == (case.seq_len, case.global_batch, case.precision)
    assert question.run.unread == case.unread


@pytest.mark.parametrize("compiled", [False, True])
def test_what_torchtitan_computes_again_unless_told_otherwise_runs(tmp_path: Path, compiled: bool) -> None:
    path = tmp_path / "llama3_8b.toml"
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
    text += f'[activation_checkpoint]\nmode = "selective"\n[compile]\nenable = {str(compiled).lower()}\n'
    path.write_text(text, encoding="utf-8")
    answer = answered(imported_question(imported_run(str(path)), ImportOptions(), 1), None)
    assert answer.refused == () and answer.runs
    assert str(answer.question.candidate).endswith("torch_compiled" if compiled else "torch_cuda")


def test_every_program_has_two_published_configurations_and_a_source() -> None:
    programs = [case.program for case in PUBLISHED]
    assert all(programs.count(name) >= 2 for name in set(programs)) and len(set(programs)) == 6
    assert all(case.source.startswith("https://github.com/") for case in PUBLISHED)


def nxdt_text(recipe: AwsRecipe) -> str:
    """Write the recorded facts of an AWS recipe in the keys of NxD Training."""
    model = recipe.spec()
    recompute = recipe.recompute.removeprefix("selective").strip("[]").split(",")
    granularity = "selective" if recipe.recompute.startswith("selective") else recipe.recompute
    lnc = f"lnc: {recipe.lnc}, " if recipe.lnc else ""
    stages = recipe.candidate().stages or ()
    cuts = [f"model.layers.{sum(stages[: number + 1]) - 1}" for number in range(len(stages) - 1)]
    capacity = f"capacity_factor: {recipe.expert_capacity or 'null'}"
    lines = [
        f"trainer: {{devices: {recipe.request().cluster.ranks_per_node}, {lnc}num_nodes: {recipe.nodes}}}",
        f"distributed_strategy: {{tensor_model_parallel_size: {recipe.tp}, pipeline_model_parallel_size: {recipe.pp}, "
        f"virtual_pipeline_model_parallel_size: {recipe.vp}, context_parallel_size: {recipe.cp}, "
        f"expert_model_parallel_size: {recipe.ep}, zero1: {recipe.zero1}, sequence_parallel: {recipe.sp}}}",
        f"data: {{micro_batch_size: {recipe.micro_batch}, global_batch_size: {recipe.global_batch}}}",
        f"precision: {{type: {recipe.precision}}}",
        f"model: {{encoder_seq_length: {recipe.seq_len}, num_layers: {model.num_layers}, hidden_size: {model.hidden},",
        f"  moe: {{{capacity}}},",
        f"  activations_checkpoint_granularity: {'null' if granularity == 'none' else granularity},",
        f"  activations_checkpoint_recompute: {recompute if granularity == 'selective' else 'null'},",
        f"  pipeline_cuts: {cuts or 'null'},",
        f"  fusions: {{flash_attention: {recipe.attention == 'flash'},",
        f"    ring_attention: {recipe.attention == 'ring'}}}}}",
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("recipe", load_aws_recipes(), ids=lambda recipe: recipe.name)
def test_the_recipes_of_aws_give_the_recorded_layouts(tmp_path: Path, recipe: AwsRecipe) -> None:
    path = tmp_path / recipe.name
    path.write_text(nxdt_text(recipe), encoding="utf-8")
    question = imported_question(imported_run(str(path)), ImportOptions(model=recipe.model))
    told, request = question.candidate, recipe.request()
    assert str(told).replace(f",lnc={told.lnc}", "") == str(recipe.candidate())
    assert (question.request.workload, question.request.cluster) == (request.workload, request.cluster)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("none.yaml", None, "there is no such file"),
        ("list.yaml", "- {a: 1}\n", "must hold keys with values"),
        ("other.yaml", "a: 1\n", "is no configuration of a training run that autoshard reads"),
        ("broken.yaml", "a: [1\n", "is not YAML"),
        ("broken.toml", "a = \n", "is not TOML"),
        ("broken.json", '{"zero_optimization": ', "is not JSON"),
        ("broken.py", "def f(:\n", "is not Python that can be read"),
        ("nothing.py", "x = 1\n", "is no configuration"),
        ("broken.sh", "torchrun x.py --num-layers 'a\n", "is no shell script that can be read"),
        ("count.yaml", "zero1: true\ntensor_model_parallel_size: many\n", "expected a whole number, found 'many'"),
        ("flag.yaml", "zero1: perhaps\n", "expected true or false, found 'perhaps'"),
        ("layout.sh", "x --num-layers 4 --pipeline-model-parallel-layout 'EtxL'\n", "is not a layout such as"),
        ("empty.sh", "x --num-layers 4 --pipeline-model-parallel-layout 'Ett|tt||L'\n",
         "empty.sh: pipeline_model_parallel_layout: stage 3 has no layer"),
        ("model.json", '{"train_batch_size": 8}', "--model: missing: the file names none"),
        ("hybrid.sh", "x --num-layers 4 --hybrid-layer-pattern M*4\n", "do not read hybrid_layer_pattern"),
        (
            "gated.sh", "x --num-layers 4 --hidden-size 64 --attention-output-gate --linear-attention-freq 4\n",
            "do not read attention_output_gate, linear_attention_freq",
        ),
        ("sizes.yaml", "zero1: true\nnum_layers: 32\nhidden_size: 4096\n", "--model: missing: the sizes in the file"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_a_line(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        imported_question(imported_run(str(path)), ImportOptions())
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_several_configurations_names_them(tmp_path: Path) -> None:
    path = tmp_path / "two.py"
    code = "def {}():\n    return Trainer.Config(parallelism=ParallelismConfig(tensor_parallel_degree=2))\n"
    path.write_text(code.format("a") + code.format("b"), encoding="utf-8")
    with pytest.raises(InputError, match=r"holds 2 configurations: a, b\. Type .*two\.py:a"):
        imported_run(str(path))
    with pytest.raises(InputError, match="there is no such function"):
        imported_run(f"{path}:c")
    assert imported_run(f"{path}:b").facts["layout.tp"] == 2


def test_keys_that_are_not_read_are_listed_and_those_without_effect_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    text = "zero1: true\nseed: 1\nnew_option: 7\nold_option: false\nactivations_checkpoint_granularity: selective\n"
    path.write_text(f"{text}activations_checkpoint_recompute: [Other, LlamaMLP]\n", encoding="utf-8")
    run = imported_run(str(path))
    assert run.unread == ("activations_checkpoint_recompute: Other", "new_option = 7")
    assert set(run.harmless) == {"seed", "old_option"}
