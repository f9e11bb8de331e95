"""The interpreter, functions made from a table, and these compiled: the same gradients, bytes and messages."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor import config

import autoshard.commands.run as run_command
import autoshard.engine.torch.execution as rows
import autoshard.engine.torch.kernels.matrices as matrices
import autoshard.engine.torch.writing as writing
from autoshard.commands.running.execution import Execution
from autoshard.engine.torch.engine import TorchEngine, build
from autoshard.engine.torch.fake import fake_world
from autoshard.engine.torch.formats import Formats
from autoshard.engine.torch.generated import GeneratedRun
from autoshard.engine.torch.recording import Operation
from autoshard.plan.plan import Buckets
from autoshard.run.protocol import EngineMode, Run
from autoshard.run.reports import Measured
from autoshard.runtime.machine import missing_compiler
from autoshard.spec.training import Training
from autoshard.spec.workload import Precision
from tests.kit import NOTHING
from tests.ranks import matrix
from tests.ranks.cases import (
    AS_PLANNED,
    EXACT,
    MIXTRAL,
    StepShare,
    Task,
    compare,
    deepseek,
    engine_of,
    glm,
    gpt,
    gpt_oss,
    llama,
    nearly,
    plan_of,
    run_steps,
    same,
    share_of,
)
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.ranks

FP32: Mapping[str, Any] = {"precision": Precision.named("fp32")}
COMPILED = {
    "one rank": ("tp=1,pp=1,dp=1", llama(num_layers=1), EXACT),
    "two ranks": ("tp=2,pp=1,dp=1", gpt(num_layers=1, vocab=32), AS_PLANNED),
    "experts with biases, and sinks": (
        "tp=1,pp=1,dp=1",
        gpt_oss(num_layers=1, kinds=(), order="", window=3),
        AS_PLANNED,
    ),
    "experts on two ranks": ("tp=1,pp=1,dp=2,ep=2", llama(num_layers=1, vocab=32, **MIXTRAL), EXACT),
    "experts in groups": ("tp=1,pp=1,dp=2,ep=2", glm(num_layers=1, vocab=32, kinds=(), order=""), EXACT),
}
# Each rank makes narrow states of its own tokens, and turns the part of keys that heads share for its own positions.
TURNED_APART = {
    "k_rotary": "[batch, seq/tp, rotary_dim]",
    "kv_down": "[batch, seq/tp, latent_kv]",
    "q_down": "[batch, seq/tp, latent_q]",
}
ROWS = matrix.rows()
MOST = {AS_PLANNED: 1e-5, EXACT: 1e-13}


def both(task: Task, formats: Formats, mode: EngineMode) -> list[tuple[StepShare, Measured]]:
    """A step in literal mode, and in another."""
    engines = [engine_of(task, formats, one) for one in ("literal", mode)]
    return [(share_of(engine, task), engine.measured()) for engine in engines]


def generated_alone(task: Task, folder: Path) -> TorchEngine:
    """The only rank of a task in this process."""
    return build(task.plan, Run(folder=folder, training=Training(), mode="generated"))


@pytest.mark.parametrize(
    ("text", "model", "pins"),
    rest_is_slow([
        ("tp=2,pp=1,dp=1,recompute=full", gpt(num_layers=4), NOTHING),
        ("tp=2,pp=1,dp=1", deepseek(vocab=32), TURNED_APART),
        ("tp=1,pp=2,dp=2,schedule=zb_v,vp=2,zero=3", gpt(num_layers=4), NOTHING),
        ("tp=2,pp=2,dp=1,schedule=zb_h1", deepseek(vocab=32), TURNED_APART),
    ], 1),
)  # fmt: skip
def test_generated_functions_give_in_fp32_what_the_interpreter_gives(text, model, pins):
    task = Task.of(plan_of(text, model, pins, **FP32))
    for (one, held), (other, held_too) in on_ranks(task.plan.mesh.num_ranks, both, task, AS_PLANNED, "generated"):
        same(one, other)
        assert held == held_too


@pytest.mark.slow
def test_the_only_expert_of_a_rank_adds_to_its_sum_in_a_wider_format():
    """As GPUs do; a list of one matrix is written as a list."""
    replaced = (
        (matrices, "adds_wide", lambda *_: True),
        (matrices, "_add_wide", lambda total, left, right: total.addmm_(left.float(), right.float())),
    )
    model = llama(num_layers=1, num_experts=2, experts_per_token=1)
    task = Task.of(plan_of("tp=1,pp=1,dp=2,ep=2", model, expert_capacity=1.0))
    for (one, _), (other, _) in on_ranks(2, both, task, AS_PLANNED, "generated", replaced=replaced):
        same(one, other)


@pytest.mark.parametrize("text", rest_is_slow(["tp=1,pp=2,dp=1,schedule=zb_h1", "tp=2,pp=1,dp=1"]))
def test_a_loss_by_few_tokens_gives_what_all_of_them_give(text):
    """Three of eight at a time, so that the last ones overlap."""
    task, few_at_a_time = Task.of(plan_of(text, gpt())), (rows, "_HOST_NUMBERS", 3 * 31)
    few = on_ranks(task.plan.mesh.num_ranks, both, task, EXACT, "generated", replaced=[few_at_a_time])
    for (one, _), (other, _) in few:
        same(one, other)
    compare(task.reference(), [one for (one, _), _ in few])


@pytest.mark.skipif(bool(missing_compiler("cpu")), reason="no compiler here")
@pytest.mark.parametrize(("text", "model", "formats"), rest_is_slow(COMPILED.values(), 0, 1), ids=COMPILED)
def test_compiled_functions_give_what_the_interpreter_gives(text, model, formats):
    compiled_like_the_interpreter(Task.of(plan_of(text, model, **FP32)), formats)


@pytest.mark.thorough
@pytest.mark.skipif(bool(missing_compiler("cpu")), reason="no compiler here")
@pytest.mark.parametrize("row", ROWS, ids=[f"{n:02}: {matrix.candidate_of(row)}" for n, row in enumerate(ROWS)])
def test_every_pair_of_features_compiled_gives_what_the_interpreter_gives(row):
    compiled_like_the_interpreter(Task.of(matrix.plan_for(row, precision="fp32")), AS_PLANNED)


def test_a_function_multiplies_once_where_weights_meet_one_tensor(monkeypatch: pytest.MonkeyPatch):
    """Also where one weight alone fills a bucket."""
    monkeypatch.setattr("autoshard.engine.torch.compiled.compiler_of", lambda _: lambda piece, _: piece)
    plan = plan_of("tp=1,pp=1,dp=1", llama(num_layers=1), global_batch=1)
    task = Task.of(replace(plan, buckets=Buckets(reduce_scatter_bytes=16, all_gather_bytes=16)))
    with fake_world(0, 1):
        engine = engine_of(task, EXACT, "compiled")
        compare(task.reference(), [share_of(engine, task)])
    run = engine._pipeline.blocks["layer.0"]
    assert isinstance(run, GeneratedRun)
    for about in ("q, k, v: one einsum", "up, gate: one einsum", "q.weight.sum, k.weight.sum, v.weight.sum: one"):
        assert f"# {about}" in run.text


def compiled_like_the_interpreter(task: Task, formats: Formats) -> None:
    """FP32 within 1e-5 of the largest gradient, double nearly exactly; bytes held and sent are the same."""
    bound, answers = MOST[formats], on_ranks(task.plan.mesh.num_ranks, both, task, formats, "compiled", timeout_s=600)
    for (one, held), (other, held_too) in answers:
        assert held == held_too
        nearly(one, other, bound)


@pytest.mark.parametrize("name", ["mul_", "addmm_", "add"])
def test_a_function_without_one_of_its_operations_is_caught(name, monkeypatch: pytest.MonkeyPatch):
    """Every kind of operation: changed in place, a sum of gradients, and one whose result is read."""
    task = Task.of(plan_of("tp=1,pp=1,dp=1", llama(num_layers=1), global_batch=1))
    dropped = list[Operation]()

    def dropping(operation: Operation, variables: writing.Variables) -> writing.Statement:
        found = written(operation, variables)
        if operation.func.overloadpacket.__name__ != name or dropped:
            return found
        dropped.append(operation)
        unchanged = f"{', '.join(found.writes)} = {found.reads[0]}" if found.writes else "pass"
        return writing.Statement(text=unchanged, reads=found.reads, writes=found.writes)

    written = writing.statement
    monkeypatch.setattr(writing, "statement", dropping)
    with fake_world(0, 1):
        shares = run_steps(task, EXACT, "generated")
    assert dropped
    with pytest.raises(AssertionError):
        compare(task.reference(), shares)


def test_the_functions_that_run_are_in_the_folder_of_the_run(tmp_path: Path):
    """They can be read, and imported: the text that ran, with a line for every entry of the table."""
    task = Task.of(plan_of("tp=1,pp=1,dp=1", llama()))
    with fake_world(0, 1):
        engine = generated_alone(task, tmp_path)
    files = sorted(tmp_path.glob("generated/rank_0/*.py"))
    assert [file.stem for file in files] == ["embed_0", "head_0", "layer_0"]
    text = files[-1].read_text(encoding="utf-8")
    assert "# attn_norm: rms_norm" in text and "# q: einsum -> [batch, seq, kv_heads, q_group, head_dim]" in text
    for file in files:
        run = engine._pipeline.blocks[file.stem.replace("_", ".")]
        assert isinstance(run, GeneratedRun) and file.read_text(encoding="utf-8") == run.text
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.forward and module.backward


def test_what_cannot_be_compiled_runs_as_it_is():
    from autoshard.engine.torch.compiled import compiler_of  # which takes seconds

    def piece(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [given[0] * float(given[0].sum())]  # which waits for a number

    def silent(given: list[torch.Tensor]) -> list[torch.Tensor]:
        raise NotImplementedError

    for one, reason in ((piece, "piece runs without being compiled: .+"), (silent, "compiled: NotImplementedError")):
        with pytest.warns(UserWarning, match=reason):
            assert compiler_of(torch.device("cpu"))(one, [torch.empty(3, device="meta")]) is one


@pytest.mark.slow
@pytest.mark.skipif(bool(missing_compiler("cpu")), reason="no compiler here")
def test_rows_that_nobody_counted_keep_the_order_of_their_dims():
    """The gradient of a product may come transposed; compiled code asserts the strides that it was told."""
    from autoshard.engine.torch.compiled import compiler_of

    def piece(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return [given[0].sin() * 2]

    for shape, order in (((1, 8, 6), (0, 1, 2)), ((1, 6, 8), (0, 2, 1)), ((8, 1, 6), (1, 0, 2))):
        example = torch.empty(shape, device="meta").permute(order)
        torch._dynamo.mark_dynamic(example, 1)
        compiled = compiler_of(torch.device("cpu"))(piece, [example])
        for num_rows in (2, 5, 8, 9):
            sizes = [num_rows if size == 8 else size for size in shape]
            rows = torch.arange(float(np.prod(sizes))).reshape(sizes).permute(order)
            torch.testing.assert_close(compiled([rows])[0], piece([rows])[0])
            assert compiled is not piece


def test_a_device_may_bring_its_own_compiler() -> None:
    """It is asked for by the name of the device, as TorchNeuron's is; here the host pretends to have one."""
    (found,) = on_ranks(1, by_its_own_compiler)
    assert found == (["aten.mul.Tensor", "aten.add.Tensor"], [5.0, 7.0], "")


def by_its_own_compiler() -> tuple[list[str], list[float], str]:
    from torch._dynamo import register_backend

    from autoshard.engine.torch.compiled import compiler_of

    def piece(given: list[torch.Tensor]) -> list[torch.Tensor]:
        first, second = given
        given.clear()
        return [first.mul(second).add_(1.0)]

    targets: list[str] = []

    def own(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    register_backend(own, name="cpu")
    compiled = compiler_of(torch.device("cpu"))(piece, [torch.empty(2, device="meta")] * 2)
    (made,) = compiled([torch.tensor([1.0, 2.0]), torch.tensor([4.0, 3.0])])
    register_backend(own, name="neuron")
    return targets, made.tolist(), missing_compiler("neuron")


def test_a_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        assert missing_compiler("cpu") == "there is no C++ compiler on PATH"
    assert "Triton" in missing_compiler("cuda")


@pytest.mark.parametrize(
    ("device", "wanted", "missing", "mode"),
    [
        ("cpu", "auto", "", "generated"),
        ("cuda", "auto", "", "compiled"),
        ("cuda", "literal", "", "literal"),
        ("cpu", "compiled", "", "compiled"),
        ("cuda", "auto", "there is no Triton here for cuda", "generated"),
    ],
)
def test_the_mode_follows_the_device_the_user_and_the_compiler(
    device: str, wanted: str, missing: str, mode: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_command, "missing_compiler", lambda _: missing)
    run = Run(folder=Path(), training=Training(), device=device)
    plan = plan_of("tp=1,pp=1,dp=1", llama())
    execution = Execution(plan=plan, notes=(), run=run, tried=False, restarts=0, json=False)
    found = run_command._in_mode(execution, wanted)
    assert found.run.mode == mode and len(found.notes) == bool(missing)
