"""What is written is accepted by the vendors' own readers, where their packages are installed."""

from pathlib import Path
from typing import Any

import pytest

from autoshard.exports.limits import expressed
from autoshard.exports.writing import text_of
from autoshard.plan.candidate import Candidate
from autoshard.plan.recompute import Recompute
from tests.exports.test_round_trip import WRITTEN, plan_at

LAYOUT = Candidate(
    tp=2, pp=4, dp=1, stages=(7, 8, 8, 9), recompute=(Recompute(kind="full"),), zero_group=None, zero=0
)  # fmt: skip


def written(name: str) -> str:
    plan = plan_at("llama3-8b", LAYOUT)
    return text_of(WRITTEN[name], plan, expressed(plan, WRITTEN[name]))


@pytest.mark.slow
def test_accelerate_reads_its_configuration(tmp_path: Path) -> None:
    module: Any = pytest.importorskip("accelerate.commands.config.config_args")
    path = tmp_path / "config.yaml"
    path.write_text(written("accelerate"), encoding="utf-8")
    read = module.load_config_from_file(str(path))
    assert read.num_processes == 8 and read.parallelism_config["parallelism_config_tp_size"] == 2


@pytest.mark.slow
def test_megatron_reads_its_layout_of_stages() -> None:
    module: Any = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    text = written("megatron").partition("--pipeline-model-parallel-layout ")[2].split()[0].strip("'")
    rows = module.PipelineParallelLayerLayout.parse_str_to_list(text)
    assert [sum(kind.name == "decoder" for kind in row) for row in rows] == [7, 8, 8, 9]


@pytest.mark.slow
def test_torchtitan_has_the_fields_that_are_set() -> None:
    module: Any = pytest.importorskip("torchtitan.config")
    code = written("torchtitan")
    start = code.index("ParallelismConfig(\n")
    call = code[start : code.index("\n    )", start) + 6]
    config = eval(call, {"ParallelismConfig": module.ParallelismConfig})
    assert config.pipeline_parallel_degree == 4 and len(config.module_fqns_per_model_part) == 4
