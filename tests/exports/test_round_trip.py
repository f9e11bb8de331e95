"""What is exported is imported as the same layout, for every layout; and what a program cannot say is said."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from autoshard.errors import InputError
from autoshard.exports.limits import Difference, Expressed, expressed
from autoshard.exports.writing import SUFFIXES, text_of
from autoshard.imports.imported import PROGRAMS, imported_run
from autoshard.imports.programs.megatron_stages import layout_of_stages, stages_of_layout
from autoshard.imports.question import ImportedQuestion, ImportOptions, imported_question
from autoshard.imports.table import OtherProgram
from autoshard.plan.build import build_plan
from autoshard.plan.candidate import Candidate
from autoshard.plan.plan import Plan
from autoshard.plan.recompute import Recompute, parse_stages
from autoshard.spec.cluster_catalogue import load_cluster
from autoshard.spec.kernels import library_names, load_kernels
from autoshard.spec.model_catalogue import load_model
from autoshard.spec.model_parts import RotaryScaling, Router
from autoshard.spec.recipe import Pins
from autoshard.spec.record import options_on
from autoshard.spec.workload import BalancedOver, Precision, Workload
from tests.spec.hf.smallest import SMALLEST, read as read_config

WRITTEN = {program.name: program for program in PROGRAMS if program.name != "bridge"}
SETTINGS = {"llama3-8b": 32, "mixtral-8x7b": 32, "gpt3-6.7b": 32}
OURS = (*(f"full:{count}" for count in (1, 2)), "full", "none", "selective[attention]", "selective[norms,mlp]")


@cache
def workload(precision: str = "bf16") -> Workload:
    return Workload(seq_len=2048, global_batch=256, precision=Precision.named(precision))


def plan_at(model: str, candidate: Candidate, precision: str = "bf16", cluster: str = "h100") -> Plan:
    machine = load_cluster(cluster, max(1, candidate.num_ranks // load_cluster(cluster).ranks_per_node))
    engine = "nxd" if machine.engine == "nxd" else "torch"
    return build_plan(candidate, load_model(model), machine, workload(precision), engine)


def imported(program: OtherProgram, plan: Plan, found: Expressed) -> ImportedQuestion:
    """Write a plan for a program and read it again, as somebody does who knows what does not stand in the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{plan.model.name}.{SUFFIXES[program.form]}"
        path.write_text(text_of(program, plan, found), encoding="utf-8")
        unsaid = program.limits.unsaid
        fix = Pins(f"mbs={found.candidate.mbs}") if "layout.mbs" in unsaid else None
        options = ImportOptions(
            model=plan.model.name, cluster=plan.cluster.name, seq_len=2048, fix=fix,
            lnc=plan.cluster.lnc, global_batch=256 if "work.global_batch" in unsaid else None,
        )  # fmt: skip
        return imported_question(imported_run(str(path)), options, plan.cluster.num_nodes)


def test_a_file_that_says_which_model_is_trained_says_which_options_it_cannot():
    for name in ("tiny-olmo2", "tiny-gemma3", "llama3-8b"):
        model = load_model(name)
        options = tuple(option for option in options_on(model) if option != "norm_offset")
        options = options if model.activation == "silu" else ("activation", *options)
        said = {program: found.limits.unsayable(model) for program, found in WRITTEN.items()}
        assert said == dict.fromkeys(WRITTEN, ()) | {"megatron": options}
        assert options == () if name == "llama3-8b" else "norm_place" in options


@pytest.mark.parametrize(
    "name",
    ["gpt-oss-20b", "glm4.5-air", "deepseek-v3", "deepseek-v2-lite", "tiny-gpt-oss", "smollm3-3b", "nemotron4-15b"],
)
def test_megatron_reads_options_of_models_as_it_writes_them(name: str, tmp_path: Path):
    model, program = load_model(name), WRITTEN["megatron"]
    plan = plan_at(name, Candidate(tp=1, pp=1, dp=8, recompute=(Recompute(kind="full"),)))
    path = tmp_path / "run.sh"
    path.write_text(text_of(program, plan, expressed(plan, program)).replace(name, "run"), encoding="utf-8")
    question = imported_question(imported_run(str(path)), ImportOptions(cluster="h100"), 1)
    read = question.request.model
    assert options_on(read) == options_on(model) and (read.head_dim, read.ffn) == (model.head_dim, model.ffn)
    assert read.num_parameters == model.num_parameters
    assert (read.activation, read.norm, read.rotary_fraction) == (model.activation, model.norm, model.rotary_fraction)


_YARN = RotaryScaling(kind="yarn", factor=16.0, high_frequency_factor=32.0, original_positions=4096)
SCALINGS = (  # and whether Megatron-LM has flags for it: of llama3-8b, of deepseek-v2-lite
    (RotaryScaling(kind="linear", factor=4.0), (True, False)),
    (RotaryScaling(kind="linear", factor=2.5), (False, False)),
    (RotaryScaling(kind="llama3", factor=32.0, high_frequency_factor=4.0, original_positions=8192), (True, False)),
    (RotaryScaling(kind="llama3", factor=8.0, high_frequency_factor=3.0, original_positions=8192), (False, False)),
    (replace(_YARN, mscale=0.5), (True, True)),
    (replace(_YARN, mscale=1.0, truncate=False), (True, False)),
    (RotaryScaling(kind="yarn", factor=4.0, high_frequency_factor=9.0, original_positions=512), (True, False)),
)  # fmt: skip


@pytest.mark.parametrize(("scaling", "said"), SCALINGS)
@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v2-lite"])
def test_megatron_reads_the_scaling_of_frequencies_as_it_writes_it_or_the_export_says_that_it_cannot(
    name: str, scaling: RotaryScaling, said: tuple[bool, bool], tmp_path: Path
):
    plan, program = plan_at(name, Candidate(tp=1, pp=1, dp=8, recompute=(Recompute(kind="full"),))), WRITTEN["megatron"]
    plan = replace(plan, model=replace(plan.model, rotary_scaling=scaling))
    expression = expressed(plan, program)
    path = tmp_path / "run.sh"
    path.write_text(text_of(program, plan, expression).replace(name, "run"), encoding="utf-8")
    if said[name != "llama3-8b"]:
        assert imported_question(imported_run(str(path)), ImportOptions()).request.model.rotary_scaling == scaling
    cannot = [f"rotary frequencies scaled by {scaling.kind} (factor {scaling.factor:g})"]
    lost = [difference.what for difference in expression.differences if "rotary" in difference.what]
    assert lost == ([] if said[name != "llama3-8b"] else cannot)


@pytest.mark.parametrize("family", SMALLEST)
def test_megatron_reads_a_model_without_a_card_as_it_was_written_or_has_no_key_for_it(family: str, tmp_path: Path):
    plan, program = plan_at("llama3-8b", Candidate(tp=1, pp=1, dp=8)), WRITTEN["megatron"]
    biases = [{}, {"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}]
    for hidden_act, bias in product(("silu", "gelu", "gelu_new", "relu", "relu2"), biases):
        try:
            model = read_config(family, hidden_act=hidden_act, **bias)
        except InputError:
            continue
        plan = replace(plan, model=replace(model, name="proxy"))
        if program.limits.unsayable(plan.model):
            continue
        (tmp_path / "run.sh").write_text(text_of(program, plan, expressed(plan, program)), encoding="utf-8")
        read = imported_question(imported_run(str(tmp_path / "run.sh")), ImportOptions(cluster="h100"), 1).request.model
        tanh = {"activation": "gelu"} if model.activation == "gelu_tanh" else {}  # one flag for both forms of GELU
        written = {"name": read.name, "source": read.source, "max_positions": read.max_positions}
        assert read == replace(model, **written, **tanh), (hidden_act, bias)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, Candidate]:
    """A model with any layout of it on nodes of H100 that has a shape."""
    model = draw(st.sampled_from(sorted(SETTINGS)))
    layers, powers = SETTINGS[model], st.sampled_from((1, 2, 4))
    tp, pp, cp = draw(powers), draw(powers), draw(st.sampled_from((1, 2)))
    inner = tp * pp * cp
    dp = draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if inner * size % 8 == 0]))
    schedule = draw(st.sampled_from(("1f1b", "interleaved", "zb_v", "zb_h1", "gpipe"))) if pp > 1 else "1f1b"
    vp = 2 if schedule in ("interleaved", "zb_v") else 1
    zero = draw(st.sampled_from((0, 1, 3) if dp * cp > 1 else (0, 1)))
    groups = [group for group in (2, 4, 8) if group % cp == 0 and dp * cp % group == 0 and group < dp * cp]
    group = draw(st.sampled_from((None, *groups))) if zero else None
    held = [size for size in groups if size < (group or dp * cp)]
    stages = draw(st.lists(st.integers(-1, 1), min_size=pp * vp, max_size=pp * vp)) if pp > 1 else [0]
    even = [layers // (pp * vp) + change for change in stages]
    even[0] += layers - sum(even)
    kinds = draw(st.lists(st.sampled_from(OURS), min_size=1, max_size=2))
    recompute = [Recompute.parse(kinds[stage % len(kinds)]) for stage in range(pp * vp)]
    return model, Candidate(
        tp=tp, pp=pp, cp=cp, dp=dp, vp=vp, schedule=schedule, zero=zero,
        mbs=draw(st.sampled_from((1, 2))),
        sp=draw(st.booleans()) if tp > 1 else None,
        ep=draw(st.sampled_from((1, 2))) if "mixtral" in model and dp % 2 == 0 else 1,
        zero_group=group,
        weight_group=draw(st.sampled_from((None, *held))) if zero == 3 else None,
        stages=tuple(even) if pp > 1 and draw(st.booleans()) and min(even) >= 3 else None,
        recompute=tuple(recompute),
        cp_order=draw(st.sampled_from(("contiguous", "zigzag"))) if cp > 1 else "contiguous",
    )  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=min(settings().max_examples, 25))
@given(chosen=layouts())
def test_an_exported_layout_is_imported_as_what_was_said(name: str, chosen: tuple[str, Candidate]) -> None:
    (model, candidate), program = chosen, WRITTEN[name]
    cluster = "trn1.32xlarge" if name == "nxdt" else "h100"
    if name == "nxdt":
        names: dict[str, str] = {"attention": "CoreAttention", "norms": "LlamaRMSNorm", "mlp": "LlamaMLP"}
        kinds = [replace(kind, ops=tuple(names[op] for op in kind.ops)) for kind in candidate.recompute]
        ranks = load_cluster(cluster).ranks_per_node
        nodes = -(-candidate.num_ranks // ranks)
        dp = nodes * ranks // (candidate.num_ranks // candidate.dp)
        candidate = replace(candidate, dp=dp, recompute=tuple(kinds), zero_group=None, weight_group=None)
    plan = plan_at(model, candidate, cluster=cluster)
    found = expressed(plan, program)
    question = imported(program, plan, found)
    assert str(question.candidate) == str(replace(found.candidate, lnc=None)), text_of(program, plan, found)
    assert question.request.workload.global_batch == 256
    assert [key for key in question.run.unread if "of another file" not in key] == []
    again = expressed(plan_at(model, question.candidate, cluster=cluster), program)
    assert again.candidate == found.candidate and again.differences == (), "what a program can say, it says whole"


@pytest.mark.parametrize(
    ("program", "shape"),
    [("accelerate", "pp=4,dp=2"), ("deepspeed", "pp=4,dp=2"), ("torchtitan", "pp=2,dp=4,vp=2,schedule=zb_v,mbs=64")],
)
def test_recompute_that_differs_is_named_where_stages_become_fewer(program: str, shape: str) -> None:
    layout = replace(Candidate.parse(shape), recompute=parse_stages("none/full*3"))
    without_chunks = replace(WRITTEN[program].limits, schedules={"1f1b": "1F1B"})
    found = expressed(plan_at("llama3-8b", layout), replace(WRITTEN[program], limits=without_chunks))
    assert Difference(what="recompute none/full*3", instead="full everywhere") in found.differences
    assert found.candidate.recompute == (Recompute(kind="full"),)


@pytest.mark.parametrize("program", WRITTEN)
def test_every_precision_of_a_program_is_read_again(program: str) -> None:
    model, cluster = "llama3-8b", "trn1.32xlarge" if program == "nxdt" else "h100"
    candidate = Candidate(dp=load_cluster(cluster).ranks_per_node, zero=0)
    for name in WRITTEN[program].limits.precisions:
        plan = plan_at(model, candidate, name, cluster)
        found = expressed(plan, WRITTEN[program])
        assert not [change for change in found.differences if "precision" in change.what]
        question = imported(WRITTEN[program], plan, found)
        assert question.request.workload.precision == Precision.named(name)


@pytest.mark.parametrize(("key", "value"), [("optimizer", "sgd"), ("documents", "separate"), ("expert_capacity", 1.5)])
@pytest.mark.parametrize("name", WRITTEN)
def test_work_that_a_file_does_not_say_is_named_unless_it_stands_in_the_script(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    cluster, layout = ("trn1.32xlarge", Candidate(tp=8, dp=4)) if name == "nxdt" else ("h100", Candidate(dp=8))
    program, plan = WRITTEN[name], plan_at("mixtral-8x7b", layout, cluster=cluster)
    usual, plan = plan.workload, replace(plan, workload=replace(plan.workload, **{key: value}))
    expression = expressed(plan, program)
    lost = [change.what for change in expression.differences if change.what == f"{key} {value}"]
    if f"work.{key}" in program.limits.unsaid:
        assert not lost and expression.workload == plan.workload
    elif key in program.limits.workload:
        path = tmp_path / f"run.{SUFFIXES[program.form]}"
        path.write_text(text_of(program, plan, expression), encoding="utf-8")
        assert not lost and getattr(expression.workload, key) == imported_run(str(path)).facts[f"work.{key}"] == value
    else:
        assert lost and expression.workload == usual, "so that the price is that of what will run"


@pytest.mark.parametrize(
    ("name", "precision"), [("accelerate", "bf16,gradients=bf16"), ("deepspeed", "bf16,products=fp8")]
)
def test_formats_that_a_program_has_not_become_the_nearest(name: str, precision: str) -> None:
    expression = expressed(plan_at("llama3-8b", Candidate(dp=8), precision), WRITTEN[name])
    assert expression.workload.precision.name == "bf16"
    assert Difference(what=f"precision {precision}", instead="bf16") in expression.differences


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_losses_of_routers_go_to_megatron_and_back(over: BalancedOver) -> None:
    """Its coefficient is that of a loss which is divided by the number of chosen experts."""
    plan = plan_at("mixtral-8x7b", Candidate(tp=2, pp=1, dp=4, ep=2))
    work = replace(plan.workload, router_balance_loss=0.005, router_balance_over=over, router_z_loss=0.001)
    plan, program = replace(plan, workload=work), WRITTEN["megatron"]
    found = expressed(plan, program)
    balanced = "experts balanced over all ranks"
    assert [change.what for change in found.differences] == ([balanced] if over == "batch" else [])
    text = text_of(program, plan, found)
    kind = "aux_loss" if over == "batch" else "seq_aux_loss"
    assert f"--moe-router-load-balancing-type {kind}" in text and "--moe-aux-loss-coeff 0.01" in text
    question = imported(program, plan, found)
    read = question.request.workload
    assert (read.router_balance_loss, read.router_balance_over, read.router_z_loss) == (0.005, over, 0.001)
    assert ["one data-parallel rank" in remark for remark in question.run.remarks] == [True] * (over == "batch")
    for name in WRITTEN.keys() - {"megatron", "nxdt"}:
        assert "losses of routers" in {change.what for change in expressed(plan, WRITTEN[name]).differences}


@pytest.mark.parametrize("library", library_names())
def test_how_tokens_go_to_experts_goes_to_megatron_and_back(library: str) -> None:
    plan, program = plan_at("mixtral-8x7b", Candidate(ep=8, dp=8, kernels=f"te+{library}")), WRITTEN["megatron"]
    found = expressed(plan, program)
    assert found.candidate.kernels == f"mcore+{library}" and found.differences == ()
    assert f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {library}" in " ".join(
        text_of(program, plan, found).split()
    )
    assert imported(program, plan, found).candidate == found.candidate
    plain = plan_at("mixtral-8x7b", Candidate(ep=8, dp=8, kernels="te"))
    assert "dispatcher" not in text_of(program, plain, expressed(plain, program))
    assert expressed(plan, WRITTEN["torchtitan"]).candidate.kernels == "torch_compiled"


ROUTERS = {
    "of DeepSeek-V3": (
        Router(scores="sigmoid", scale=2.5, groups=4, chosen_groups=2, group_score="best two", correction=True),
        4,
    ),
    "of DeepSeek-V2": (Router(normalised=False, scale=16.0, groups=8, chosen_groups=4), 4),
    "softmax of all": (Router(normalised=False), 2),
    "softmax of the chosen, in groups": (Router(groups=4, chosen_groups=3), 3),
    "a single sigmoid": (Router(scores="sigmoid", normalised=False), 1),
}
UNSAID_ROUTERS = {
    "a single sigmoid that is always one": (Router(scores="sigmoid"), 1),
    "corrected probabilities": (Router(normalised=False, correction=True), 2),
    "sigmoids as they are": (Router(scores="sigmoid", normalised=False), 2),
    "groups by one expert, several in each": (Router(normalised=False, groups=4, chosen_groups=2), 4),
    "groups by two experts, one in each": (
        Router(scores="sigmoid", groups=4, chosen_groups=2, group_score="best two"), 2
    ),
    "groups by two probabilities": (Router(groups=4, chosen_groups=2, group_score="best two"), 4),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_and_shared_experts_go_to_megatron_and_back(name: str) -> None:
    router, chosen = ROUTERS[name]
    plan, program = plan_at("mixtral-8x7b", Candidate(tp=2, pp=1, dp=4, ep=2)), WRITTEN["megatron"]
    model = replace(plan.model, experts_per_token=chosen, router=router, shared_ffn=14336, num_layers=30)
    speed = 0.002 if router.correction else 0.0
    plan = replace(plan, model=model, workload=replace(plan.workload, router_bias_speed=speed))
    assert program.limits.unsayable(model) == ()
    text = text_of(program, plan, expressed(plan, program))
    assert ("--moe-router-bias-update-rate 0.002" in text) == router.correction
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.sh"
        path.write_text(text, encoding="utf-8")
        options = ImportOptions(cluster=plan.cluster.name)
        request = imported_question(imported_run(str(path)), options, plan.cluster.num_nodes).request
    assert (request.model.router, request.model.shared_ffn) == (router, 14336)
    assert request.workload.router_bias_speed == speed


@pytest.mark.parametrize("name", UNSAID_ROUTERS)
def test_a_router_that_megatron_would_compute_otherwise_has_no_key(name: str) -> None:
    router, chosen = UNSAID_ROUTERS[name]
    model = replace(load_model("mixtral-8x7b"), experts_per_token=chosen, router=router)
    assert WRITTEN["megatron"].limits.unsayable(model) == ("router",)


def test_differences_say_what_is_lost_and_what_is_done_instead() -> None:
    stages = tuple(map(Recompute.parse, ("full", "full:1", "none", "selective[norms]")))
    layout = Candidate(tp=2, pp=4, dp=1, schedule="zb_h1", recompute=stages, stages=(7, 8, 8, 9))
    plan = plan_at("llama3-8b", layout)
    by_name = {name: expressed(plan, program) for name, program in WRITTEN.items() if name != "nxdt"}
    words = {name: [f"{one.what} -> {one.instead}" for one in found.differences] for name, found in by_name.items()}
    assert words["megatron"] == [
        "schedule zb_h1 -> 1f1b",
        "recompute full/full:1/none/selective[layernorm] -> full in all stages",
    ]
    assert "zb_h1 -> 1f1b" in words["torchtitan"][0] and by_name["torchtitan"].candidate.stages == (7, 8, 8, 9)
    assert words["accelerate"][:2] == [
        "recompute full/full:1/none/selective[norms] -> full everywhere",
        "pipeline stages (pp=4) -> these ranks are replicas with ZeRO-3",
    ]
    assert by_name["deepspeed"].candidate.dp == 4


@pytest.mark.parametrize("stages", ["none+offload", "none/selective[norms]+offload"])
def test_programs_that_keep_activations_on_the_device_recompute_all_instead_of_offloading(stages: str) -> None:
    plan = plan_at("llama3-8b", Candidate(tp=2, pp=2, dp=2, recompute=parse_stages(stages)))
    for name, program in WRITTEN.items():
        if name == "nxdt":  # which takes no plan for GPUs
            continue
        layout = expressed(plan, program)
        assert layout.candidate.recompute == (Recompute(kind="full"),), name
        assert any("+offload" in loss.what and "full" in loss.instead for loss in layout.differences)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_sets_of_a_program_are_those_of_its_kernels(name: str) -> None:
    known = load_kernels(WRITTEN[name].kernels)
    operations = {op for ops in known.sets.values() for op in ops}
    sets = [choice for choice in WRITTEN[name].limits.selective or () if len(choice) == 1]
    assert all(choice[0] in known.sets for choice in sets), f"{operations} have other names"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_stages_survive_the_layout_of_megatron(stages: list[int]) -> None:
    read = stages_of_layout(layout_of_stages(tuple(stages)))
    assert [stage.num_layers for stage in read] == stages and not any(stage.predicts_further for stage in read)


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        ("tp=2,pp=1,dp=4", {"export CUDA_DEVICE_MAX_CONNECTIONS=1": True, "fsdp_dtensor": False, "MASTER_ADDR": False}),
        ("tp=1,pp=1,cp=2,dp=8", {"export CUDA_DEVICE_MAX_CONNECTIONS=1": True, "MASTER_ADDR": True}),
        ("tp=1,pp=1,dp=8", {"CUDA_DEVICE_MAX_CONNECTIONS": False}),
        ("tp=2,pp=1,dp=8,zero=3", {"CUDA_DEVICE_MAX_CONNECTIONS": False, "--ckpt-format fsdp_dtensor": True}),
    ],
)
def test_megatron_takes_the_script_as_it_is(layout: str, lines: Mapping[str, bool]) -> None:
    """What parse_args and validate_args of NVIDIA/Megatron-LM d98e8a6 refuse: --rotary-base 500000.0."""
    plan = plan_at("llama3-8b", Candidate.parse(layout))
    text = text_of(WRITTEN["megatron"], plan, expressed(plan, WRITTEN["megatron"]))
    assert "--rotary-base 500000\n" in text
    assert {line: line in text for line in lines} == lines


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("llama3.1-8b", ("--use-rope-scaling\n", "--rope-scaling-factor 8.0\n")),
        ("llama3.2-1b", ("--rope-scaling-factor 32.0\n",)),
        ("glm4.5-air", ("--rotary-percent 0.5\n",)),
    ],
)
def test_megatron_trains_the_model_of_the_plan(name: str, lines: tuple[str, ...]) -> None:
    plan = plan_at(name, Candidate.parse("tp=2,pp=1,dp=4"))
    text = text_of(WRITTEN["megatron"], plan, expressed(plan, WRITTEN["megatron"]))
    assert [line for line in lines if line not in text] == []


def test_megatron_has_no_parallel_residual_and_windows_of_all_layers_are_written_as_they_are_read() -> None:
    assert WRITTEN["megatron"].limits.unsayable(load_model("gpt-neox-20b")) == ("parallel_residual",)
    plan = plan_at("llama3-8b", Candidate.parse("tp=2,pp=1,dp=4"))
    plan = replace(plan, model=replace(plan.model, window=1024))
    text = text_of(WRITTEN["megatron"], plan, expressed(plan, WRITTEN["megatron"]))
    assert "--window-size 1024,0\n" in text
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.sh"
        path.write_text(text, encoding="utf-8")
        assert imported_question(imported_run(str(path)), ImportOptions()).request.model.window == 1024
