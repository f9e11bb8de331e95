"""Recipes of NeMo 2 and Megatron-Bridge: functions of other files, whose arguments say the layout."""

from pathlib import Path

import pytest

from autoshard.imports.imported import imported_run
from autoshard.imports.question import ImportOptions, imported_question
from autoshard.spec.recipe import Pins

# As nemo/collections/llm/recipes/qwen3_32b.py and llama3_70b_16k.py of NVIDIA/NeMo 8cfedd7 are built.
_RECIPES = """
NAME = "qwen3_32b"

def model():
    return qwen3_model(version=NAME)

def pretrain_recipe(
    tensor_parallelism: int = 8, pipeline_parallelism: int = 2, virtual_pipeline_parallelism: Optional[int] = None,
    context_parallelism: int = 1, sequence_parallelism: bool = False, num_nodes: int = 2, num_gpus_per_node: int = 8,
    global_batch_size=32, micro_batch_size=2, seq_length=4096,
):
    return run.Partial(
        fn,
        model=model(),
        trainer=qwen3_trainer(
            tensor_parallelism=tensor_parallelism, pipeline_parallelism=pipeline_parallelism,
            virtual_pipeline_parallelism=virtual_pipeline_parallelism, context_parallelism=context_parallelism,
            sequence_parallelism=sequence_parallelism, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node,
        ),
        data=run.Config(
            MockDataModule, seq_length=seq_length, global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
        ),
    )

def long_recipe(num_nodes: int = 4, num_gpus_per_node: int = 8):
    recipe = qwen3_8b.pretrain_recipe(num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node)
    recipe.trainer = qwen3_8b.trainer(
        tensor_parallelism=8, pipeline_parallelism=2, context_parallelism=2, expert_parallelism=1,
        sequence_parallelism=True, num_nodes=num_nodes, num_gpus_per_node=num_gpus_per_node,
    )
    recipe.trainer.strategy.tensor_model_parallel_size = 4
    recipe.data = run.Config(MockDataModule, seq_length=16384, global_batch_size=512, micro_batch_size=1)
    return recipe
"""


@pytest.mark.parametrize(
    ("function", "candidate", "ranks", "foreign"),
    [
        ("pretrain_recipe", "tp=8,pp=2,dp=1,mbs=2,sp=false,kernels=mcore", 16, ("qwen3_trainer()",)),
        ("long_recipe", "tp=4,pp=2,cp=2,dp=2,kernels=mcore,cp_order=zigzag", 32,
         ("qwen3_8b.pretrain_recipe()", "qwen3_8b.trainer()")),
    ],
)  # fmt: skip
def test_arguments_of_a_function_of_another_file_say_the_layout(
    tmp_path: Path, function: str, candidate: str, ranks: int, foreign: tuple[str, ...]
) -> None:
    path = tmp_path / "qwen3_32b.py"
    path.write_text(_RECIPES, encoding="utf-8")
    run = imported_run(f"{path}:{function}")
    question = imported_question(run, ImportOptions())
    assert (str(question.candidate), question.request.cluster.num_ranks) == (candidate, ranks)
    assert question.request.model.name == "qwen3-32b"
    for name in foreign:
        assert f"{name}, of another file, to which this adds" in run.unread


def test_torchtitan_computes_again_what_it_does_where_a_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"
    path.write_text(
        """
def unsaid():
    return Trainer.Config(model_spec=model_registry("8B"), training=TrainingConfig(max_context_length=8192))

def off():
    config = unsaid()
    config.activation_checkpoint = None
    return config
""",
        encoding="utf-8",
    )
    for function, fix, kind, says in (
        (
            "unsaid",
            None,
            "selective",
            ["recompute selective: the default of torchtitan (--fix recompute=KIND sets it)"],
        ),
        ("unsaid", Pins("recompute=full"), "full", []),
        ("off", None, "none", []),
    ):
        options = ImportOptions(model="llama3-8b", fix=fix)
        question = imported_question(imported_run(f"{path}:{function}"), options, 1)
        assert question.candidate.recompute[0].kind == kind
        assert [str(line) for line in question.assumed if "recompute" in line.what] == says
