import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autoshard.errors import InputError
from autoshard.plan.rules.check import all_rules, legality
from autoshard.plan.rules.columns import Columns, effective_names
from autoshard.plan.rules.rule import judge, rule
from autoshard.plan.rules.strategy import (
    DATA_RULES,
    NXD_RULES,
    TP_RULES,
    AtomCut,
    nxd_router,
    strategy_rules,
    with_sp,
    without_sp,
)
from autoshard.spec.kernels import kernels_names, load_kernels
from autoshard.spec.mesh import Mesh
from autoshard.spec.model import LayerKind
from autoshard.spec.model_parts import LatentAttention, RotaryScaling, TracedDecoder
from tests.plan.cases import any_candidates, ask, questions, reasons

GPU = {"cluster_name": "h100-80", "nodes": 2}
EXPERTS = {"model_name": "mixtral-8x7b"}
LOCAL_MODEL = {"model_name": "gpt2-xl", "seq_len": 1024}

DIFFERENT = {"kinds": (LayerKind(name="local", window=4096),), "order": "local/layer*79"}
TRACED = TracedDecoder(embed=("a",), layer=("b",), head=("c",), sizes={}, num_parameters=1)
OF_DATA = dataclasses.replace(TRACED, data=("images",))

# rule, and what is special -> (question, candidate that breaks it, what the message must say, the same put right)
NARROW = {
    "num_kv_heads": 64,
    "latent": LatentAttention(query_rank=1536, kv_rank=512, rotary_dim=64, value_dim=64),
    "rotary_scaling": RotaryScaling(
        kind="yarn", factor=4, high_frequency_factor=32, original_positions=2048, mscale=1.0
    ),
}  # fmt: skip
BREAKS = {
    "ranks": ({}, "tp=32,pp=8,dp=4", "uses 1024 ranks, but the cluster has 512. Use dp=2", "tp=32,pp=8,dp=2"),
    "heads": ({}, "tp=6,dp=1", "64 query heads of llama3-70b do not divide by 6. Use"
              " tp 1, 8 or 32 on trn1.32xlarge (at 32 every KV head is held 4 times)", "tp=8"),
    "heads, of no attention": (GPU | {"model_changes": {"traced": TRACED, "num_heads": 1, "num_kv_heads": 1}}, "tp=8",
                               "has no attention with several heads, which tp cuts", "tp=1"),
    "kv-heads": (GPU | {"model_name": "llama3-8b"}, "tp=6,dp=1", "8 KV heads of llama3-8b neither", "tp=16"),
    "ffn": (GPU | {"model_name": "gpt2-xl"}, "tp=3,dp=1", "the MLP width 6400", "tp=2"),
    "cp-linear": (GPU | {"model_name": "tiny-qwen3-next"}, "cp=2", "whole sequences, token by token. Use cp=1", "cp=1"),
    "linear-documents": (GPU | {"model_name": "tiny-qwen3-next", "documents": "separate"}, "tp=1",
                         "earlier documents. Use documents=joined", None),
    "layers": ({}, "tp=1,pp=128", "80 layers of llama3-70b cannot fill 128 stages", "tp=1,pp=64"),
    "stages-count": ({}, "tp=32,pp=8,stages=40*2", "lists 2 stages, but pp*vp is", "tp=32,pp=8,stages=10*8"),
    "stages-sum": ({}, "tp=32,pp=2,stages=40/41", "81 layers together, but llama3-70b has 80: remove 1",
                   "tp=32,pp=2,stages=39/41"),
    "recompute-count": ({}, "tp=32,pp=8,recompute=full*3", "names 3 stages, but pp*vp is 8",
                        "tp=32,pp=8,recompute=full*8"),
    "recompute-layers": ({}, "tp=32,pp=8,recompute=full:11", "some stages have fewer layers",
                         "tp=32,pp=8,recompute=full:10"),
    "batch": ({"global_batch": 1000}, "tp=32,pp=1", "does not divide by dp*mbs=16. Use a global batch of 992"
              " or 1008", "tp=32,pp=2"),
    "experts": (GPU | {"model_name": "mixtral-8x7b"}, "tp=1,ep=16", "8 experts of mixtral-8x7b", "tp=1,ep=8"),
    "ep-in-dp": (GPU | {"model_name": "mixtral-8x7b"}, "tp=4,ep=8,dp=4", "ep is cut out of dp", "tp=2,ep=8"),
    "positions": (GPU | {"model_name": "gpt2-xl"}, "tp=1", "learned positions for 1024 tokens only", None),
    "positions-of-data": (GPU | {"seq_len": 4096, "model_changes": {"traced": OF_DATA}}, "tp=8",
                          "positions. Leave --seq-len out", None),
    "interleaved-rounds": ({"global_batch": 1020}, "tp=32,pp=8,schedule=interleaved,vp=2",
                           "510 micro-batches do not divide by pp=8", None),
    "cp-seq": (GPU | {"seq_len": 8190}, "tp=1,cp=4", "a sequence of 8190 does not divide by 4", "tp=1,cp=2"),
    "zigzag-seq": (GPU | {"seq_len": 8196}, "tp=1,cp=4,cp_order=zigzag", "does not divide by 2*cp=8",
                   "tp=1,cp=2,cp_order=zigzag"),
    "sp-seq": (GPU | {"seq_len": 4100}, "tp=8", "the 4100 tokens of a sequence on each rank do not divide by",
               "tp=8,sp=false"),
    "cp-heads": (GPU | LOCAL_MODEL, "cp=2,cp_kind=all_to_all", "25 KV heads of gpt2-xl do not divide by cp=2", "cp=2"),
    "cp-heads-tp": (GPU, "tp=2,cp=2,cp_kind=all_to_all", "cannot be cut over tp=2 too", "tp=1,cp=2,cp_kind=all_to_all"),
    "sp-effect": ({}, "tp=1,sp=true", "tp is 1", "tp=8,sp=true"),
    "cp-kind-effect": (GPU, "tp=1,cp_kind=all_to_all", "cp is 1", "tp=1,cp=2,cp_kind=all_to_all"),
    "zero-group": (GPU, "tp=1,cp=2,zero_group=3", "a multiple of 2 that divides", "tp=1,cp=2,zero_group=4"),
    "weight-group": (GPU, "tp=1,cp=2,zero=3,zero_group=16,weight_group=32", "a multiple of 2 that divides 16",
                     "tp=1,cp=2,zero=3,zero_group=16,weight_group=4"),
    "nxd-zero-group": ({}, "tp=8,pp=8,zero_group=2", "NxD divides states over all ranks", "tp=8,pp=8"),
    "nxd-weight-group": ({}, "tp=8,pp=8,weight_group=2", "NxD's parameters stay whole", "tp=8,pp=8"),
    "cp-order-effect": (GPU, "tp=1,cp_order=zigzag", "cp is 1", "tp=1,cp=2,cp_order=zigzag"),
    "fold-effect": (GPU, "tp=2,fold=tp", "a mixture", "tp=2"),
    "ep-effect": (GPU, "tp=1,ep=2", "llama3-70b is dense", "tp=1"),
    "vp-schedule": ({}, "tp=32,pp=8,vp=2", "Use schedule=inter", "tp=32,pp=8,vp=2,schedule=interleaved"),
    "vp-schedule, interleaved": ({}, "tp=32,pp=8,schedule=interleaved", "runs several stages per rank. Use vp=2",
                                 "tp=32,pp=8"),
    "vp-schedule, zb_v": (GPU, "tp=8,pp=2,schedule=zb_v", "runs 2 stages per rank. Use vp=2",
                          "tp=8,pp=2,vp=2,schedule=zb_v"),
    "schedule-effect": (GPU, "tp=8,schedule=gpipe", "no pipeline with pp=1", "tp=8,pp=2,schedule=gpipe"),
    "zero-effect": (GPU, "tp=8,pp=2,zero=3", "nothing to spread over", "tp=8,pp=1,zero=3"),
    "boundary": (GPU, "tp=8,boundary=[batch, seq/dp, hidden]", "Write batch/dp",
                 "tp=8,boundary=[batch/dp, seq, hidden/tp]"),
    "lnc": ({"cluster_name": "trn2.48xlarge", "lnc": 2}, "tp=32,lnc=1", "Use lnc=2, or leave lnc out", "tp=32,lnc=2"),
    "place": (GPU, "tp=8,place=3/0-2", "places 4 ranks, but a node of h100-80 has 8", "tp=8,place=7-0"),
    "library-effect": (GPU, "tp=8,kernels=te+deepep", "is dense; it has no experts to which deepep would send tokens. "
                       "Use kernels=te", "tp=8,kernels=te"),
    "kernels": (GPU, "tp=8,kernels=tee", "Did you mean te?", "tp=8,kernels=torch_cuda"),
    "recompute-ops": ({}, "tp=8,recompute=selective[CoreAtention]", "Did you mean CoreAttention",
                      "tp=8,recompute=selective[CoreAttention,act]"),
    "trn1-tp": ({}, "tp=4", "older guides list 2", "tp=8"),
    "trn1-dp": ({"nodes": 2}, "tp=8,pp=4,dp=2", "dp*cp must be 1 or at least 4, not 2", "tp=8,pp=2"),
    "trn1-dp, tp 1": ({"nodes": 2}, "tp=1,pp=16,dp=4", "dp*cp must be 1, 8 or at least 32, not 4", "tp=1,pp=8,dp=8"),
    "trn2-tp": ({"cluster_name": "trn2.48xlarge", "lnc": 2}, "tp=8", "runs tp 1, 4, 16, 32 or 64", "tp=16"),
    "node-symmetry": ({"nodes": 3}, "tp=8,dp=3,pp=4", "edp (3 ranks, 8 apart), pp (4 ranks, 24 apart)",
                      "tp=8,dp=12"),
    "nxd-boundary": ({}, "tp=8,boundary=[batch/dp, seq, hidden/tp]", "along their tokens", "tp=8"),
    "nxd-cluster": (GPU | {"engine": "nxd"}, "tp=8", "Use --engine torch", None),
    "nxd-schedule": ({}, "tp=32,pp=8,schedule=gpipe", "Use schedule=1f1b", "tp=32,pp=8"),
    "nxd-stages": ({}, "tp=32,pp=4,stages=0/40*2/0", "every stage of NxD holds at least one layer", "tp=32,pp=4"),
    "layers,ends": (GPU | {"model_name": "llama3.1-405b"}, "tp=1,pp=16,vp=8", "or --at with stages=0/1*126/0",
                    "tp=1,pp=16,vp=8,stages=0/1*126/0"),
    "nxd-zero": ({}, "tp=32,pp=8,zero=0", "fp32 masters only inside ZeRO-1", "tp=32,pp=8"),
    "nxd-states": ({"precision": "bf16-sr"}, "tp=32,zero=0", "NxD keeps both in bf16. Use bf16", None),
    "nxd-zero-groups": ({"cluster_name": "trn2.48xlarge", "lnc": 2, "precision": "fp32"}, "tp=32,zero=0",
                        "mix the shards of different ranks", "tp=16,zero=0"),
    "nxd-odd-pp": ({"nodes": 3, "global_batch": 1536}, "tp=32,pp=3", "Use pp=2 or 4", "tp=32"),
    "nxd-ep": ({"model_name": "mixtral-8x7b"}, "tp=32,ep=2", "all ranks instead of tp", "tp=32"),
    "nxd-tied": (LOCAL_MODEL, "tp=1,pp=4", "gpt2-xl ties its output head", "tp=1"),
    "nxd-cp-form": ({}, "tp=32,cp=2,cp_order=zigzag", "Use cp_kind=ring,cp_order=contiguous", "tp=32,cp=2"),
    "nxd-cp-trn1": ({"cluster_name": "trn2.48xlarge"}, "tp=32,cp=2", "on trn1 only", "tp=32"),
    "nxd-ring-seq": ({"seq_len": 2560}, "tp=32,cp=2", "multiple of 2048", "tp=32"),
    "nxd-head-dim": ({"model_changes": {"head_dim": 256}}, "tp=32", "heads of 256, and NxD's attention kernels take"
                     " up to 128. Use kernels=nxd_core with cp=1", "tp=32,kernels=nxd_core"),
    "nxd-ring-head-dim": ({"model_changes": {"head_dim": 64}}, "tp=32,cp=2", "sums of other queries. Use cp=1",
                          "tp=32"),
    "nxd-flash-seq": ({"seq_len": 3072}, "tp=32", "Use --seq-len 4096, or kernels=nxd_core",
                      "tp=32,kernels=nxd_core"),
    "nxd-core-cp": ({"seq_len": 4096}, "tp=32,cp=2,kernels=nxd_core", "Use cp=1 or kernels=nxd", "tp=32,cp=2"),
    "nxd-qkv-bias": ({"model_changes": {"qkv_bias": True}}, "tp=32", "has biases on q, k and v", "tp=8"),
    "nxd-layers": ({"model_changes": DIFFERENT}, "tp=8", "has layers of several kinds (1 local, 79 layer)", None),
    "nxd-options": ({"model_changes": {"norm_place": "after", "scaled_embeddings": True}}, "tp=8",
                    "llama3-70b has norm_place 'after', scaled_embeddings true, for which the nxd engine builds", None),
    "nxd-options, biases of experts": ({**EXPERTS, "model_changes": {"mlp_bias": True, "sinks": True}}, "tp=8",
                                       "mixtral-8x7b has sinks true, mlp_bias of experts true, for which", None),
    "nxd-options, narrow states": ({"model_changes": NARROW}, "tp=8",
                                   "llama3-70b has latent, rotary_scaling.mscale 1.0, for which", None),
    "nxd-window": ({"model_changes": {"window": 4096}}, "tp=8", "Use --seq-len 4096 or less", None),
    "nxd-code": ({"model_changes": {"traced": TRACED}}, "tp=8", "Use --engine torch", None),
    "nxd-documents": ({"documents": "separate"}, "tp=8", "Use documents=joined", None),
    "nxd-dropout": ({"model_changes": {"hidden_dropout": 0.1, "attention_dropout": 0.2}}, "tp=8",
                    "has hidden_dropout 0.1 and attention_dropout 0.2, but NxD", None),
    "nxd-dropout, trn2": ({"cluster_name": "trn2.48xlarge", "model_changes": {"attention_dropout": 0.2}}, "tp=16",
                          "Write 0 in its config, or use --engine torch", None),
    "routers": (GPU | {"router_balance_loss": 0.01}, "tp=8", "llama3-70b has no experts, so no router", None),
    "routers, z-loss": (GPU | {"router_z_loss": 0.01}, "tp=8", "router_z_loss=0.01: llama3-70b has no experts", None),
    "router-bias": (GPU | {"router_bias_speed": 0.001}, "tp=8", "llama3-70b has no correction bias", None),
    "nxd-router-losses": ({**EXPERTS, "router_balance_loss": 0.01}, "tp=32", "tokens. Leave both out", None),
    "nxd-router-losses, trn2": ({**EXPERTS, "cluster_name": "trn2.48xlarge", "router_z_loss": 0.001}, "tp=32",
                                "router_z_loss=0.001: NxD has no z-loss, and its balance loss is that of all layers "
                                "together and of a rank's own tokens. Leave both out, or use --engine torch", None),
    "nxd-fp16": ({"precision": "fp16"}, "tp=8", "returns bf16 for every type but fp32", "tp=1"),
    "nxd-kernel-fp16": ({"precision": "fp16"}, "tp=1", "multiply fp16 in bf16", "tp=1,kernels=nxd_core"),
    "nxd-expert-capacity": ({**EXPERTS, "expert_capacity": 6.0}, "tp=32", "from 4 on no token is dropped", None),
    "nxd-expert-slots": ({**EXPERTS, "expert_capacity": 1.1}, "tp=8,dp=64", "such as expert_capacity=1.125",
                         "tp=32,pp=16"),
    "nxd-expert-order": ({**EXPERTS, "expert_capacity": 2.0}, "tp=32,mbs=2", "Use mbs=1 or sp=false",
                         "tp=32,mbs=2,sp=false"),
    "nxd-dropless": ({**EXPERTS, "model_changes": {"ffn": 14080}}, "tp=32", "multiples of 16", "tp=8"),
    "nxd-dropless, small": ({**EXPERTS, "model_changes": {"hidden": 2048}}, "tp=32", "of 512 from 4096 to 8192", None),
    "nxd-dropless, two cores": ({**EXPERTS, "cluster_name": "trn2.48xlarge", "lnc": 2, "model_changes":
                                {"hidden": 4608}}, "tp=32", "multiples of 1024", None),
    "nxd-expert-ffn": ({**EXPERTS, "model_changes": {"ffn": 4096}}, "tp=32", "above 128, not 4096 / 32", "tp=8"),
    "nxd-expert-tokens": (EXPERTS, "tp=8", "clears 640 of 1792 rows", "tp=32"),
    "nxd-expert-tokens, few": ({**EXPERTS, "seq_len": 4096}, "tp=8,mbs=4", "clears 1280 of 1792", "tp=8,mbs=8"),
    "nxd-expert-precision": ({**EXPERTS, "precision": "fp32"}, "tp=32", "multiply in bf16, whatever", None),
    "nxd-expert-cores": ({**EXPERTS, "cluster_name": "trn2.48xlarge", "lnc": 2, "model_changes": {"num_experts": 7}},
                         "tp=32", "share the 7 experts of mixtral-8x7b", None),
    "nxd-expert-recompute": (EXPERTS, "tp=32,recompute=selective[ActivationMultiplyMLP]", "keeps all it needs",
                             "tp=32,recompute=full"),
    "nxd-zero, without masters": ({"precision": "bf16-sr"}, "tp=32,pp=8,zero=1", "these bf16 weights have none",
                                  "tp=32,pp=8,zero=0"),
    "nxd-ring-seq, long parts": ({"seq_len": 20480}, "tp=32,cp=4", "tiles of 2048 tokens, and each rank has 5120",
                                 "tp=32,cp=2"),
    "nxd-documents, trn2": ({"cluster_name": "trn2.48xlarge", "documents": "separate"}, "tp=8",
                            "Use documents=joined, or --engine torch", None),
    "torch-trn1": ({"engine": "torch"}, "tp=8", "Use --engine nxd", None),
    "native-kernels": ({"cluster_name": "trn3", "nodes": 36}, "tp=8,kernels=te", "Use kernels=neuron_native", "tp=8"),
    "offload-program": (GPU, "tp=8,kernels=te,recompute=full+offload", "Leave +offload out, or use kernels=torch",
                        "tp=8,recompute=full+offload"),
    "offload-program, nxd": ({}, "tp=32,recompute=none+offload", "nxd keeps activations on the device", "tp=32"),
    "offload-code": (GPU | {"model_changes": {"traced": TRACED}}, "tp=8,recompute=none+offload", "runs as its own code",
                     "tp=8"),
    "offload-link": (GPU | {"cluster_name": "h800"}, "tp=8,recompute=full/none+offload",
                     "how fast a chip of h800 reaches host memory", "tp=8,recompute=full"),
    "native-kernels, GPU": (GPU, "tp=8,kernels=neuron_native", "Use kernels=torch_engine_gpu", "tp=8"),
    "nxd-cluster, trn3": ({"cluster_name": "trn3", "nodes": 36, "engine": "nxd"}, "tp=8", "Use --engine torch", None),
}  # fmt: skip


def question_for(facts):
    changes = facts.get("model_changes", {})
    question = ask(**{name: fact for name, fact in facts.items() if name != "model_changes"})
    return dataclasses.replace(question, model=dataclasses.replace(question.model, **changes))


def test_every_rule_is_broken_by_a_case_of_this_file():
    rules = all_rules()
    assert {case.partition(",")[0] for case in BREAKS} == {rule.id for rule in rules}
    assert len({rule.id for rule in rules}) == len(rules)
    assert all(rule.source.strip() and rule.subject.strip() for rule in rules)


@pytest.mark.parametrize("case", BREAKS)
def test_the_rule_refuses_its_case_and_accepts_the_remedy(case):
    rule_id, (facts, text, says, remedy) = case.partition(",")[0], BREAKS[case]
    question = question_for(facts)
    found = reasons(question, text)
    assert rule_id in found, f"{text} is not refused by {rule_id}, only by {list(found)}"
    assert says is None or says in found[rule_id].message
    if question.cluster.platform == "trn1":  # where no other engine runs
        assert "Use --engine torch" not in found[rule_id].message.replace("torch, on trn2 or GPUs", "")
    assert found[rule_id].source == next(rule.source for rule in all_rules() if rule.id == rule_id)
    if remedy is not None:
        assert rule_id not in reasons(question, remedy)


def test_symmetry_by_arithmetic_equals_symmetry_of_the_real_groups():
    (symmetry,) = (rule for rule in all_rules() if rule.id == "node-symmetry")
    for nodes in (1, 2, 3, 6):
        question = ask("mixtral-8x7b", nodes=nodes)
        ranks = question.cluster.num_ranks
        sizes = [size for size in range(1, 13) if ranks % size == 0]
        for tp, cp in ((tp, cp) for tp in sizes for cp in sizes if ranks % (tp * cp) == 0):
            for pp in (size for size in sizes if ranks % (tp * cp * size) == 0):
                columns = question.columns(tp=tp, cp=cp, pp=pp, dp=ranks // (tp * cp * pp))
                mesh = Mesh.laid_on(question.cluster, {"tp": tp, "cp": cp, "pp": pp, "dp": ranks // (tp * cp * pp)})
                real = all(meets_nodes_alike(group) for axis in ("tp", "cp", "dp", "pp") for group in mesh.groups(axis))
                assert bool(symmetry.allows(columns)) == real, (nodes, tp, cp, pp)


def meets_nodes_alike(group):
    by_node = {}
    for rank in group:
        by_node.setdefault(rank // 32, set()).add(rank % 32)
    return len(set(map(frozenset, by_node.values()))) == 1


@given(questions(), any_candidates(), st.lists(any_candidates(), min_size=1, max_size=20))
def test_columns_and_single_candidates_get_the_same_answers(question, shared, candidates):
    alike = {name: getattr(shared, name) for name in ("stages", "recompute", "place", "kernels", "boundary", "lnc")}
    candidates = [dataclasses.replace(one, **alike) for one in candidates]
    # Where as many stages as there are items have one kind of recompute, it is named once.
    candidates = [one for one in candidates if one.recompute == candidates[0].recompute]
    rows = [Columns.of(candidate, *question.facts) for candidate in candidates]
    one_by_one = [judge(row, all_rules()) for row in rows]
    assert all(isinstance(one.allows(row), bool) for one in all_rules() for row in rows)
    assert all(rejection.message and rejection.source for found in one_by_one for rejection in found)
    columns = Columns.stack(rows)
    assert legality(columns).tolist() == [not found for found in one_by_one]
    for one in all_rules():
        alone = [one.id in {rejection.rule_id for rejection in found} for found in one_by_one]
        assert np.broadcast_to(one.allows(columns), len(rows)).tolist() == [not refused for refused in alone]


@rule("dp", source="a test")
def with_if(c):
    yield not (c.dp > 2)
    yield "too wide"


@rule("dp", source="a test")
def no_sentence(c):
    return c.dp > 2


@rule("dp", source="a test")
def numpy_fails(c):
    yield c.dp == np.array([1, 2]) + np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        (with_if, "rule with-if: asks a column of candidates for one truth value. Write & for and, | for or, ^ True"),
        (no_sentence, "rule no-sentence: must yield whom it allows, and then a sentence"),
        (numpy_fails, "operands could not be broadcast"),
    ],
)
def test_a_users_rule_that_cannot_judge_columns_is_told_how(mine, says):
    columns = ask().columns(dp=np.array([1, 4]))
    with pytest.raises(ValueError if mine is numpy_fails else InputError, match=re.escape(says)):
        legality(columns, [mine])


def test_only_sets_that_hold_operations_have_an_effect_and_engines_run_their_own_kernels():
    for name in kernels_names():
        table = load_kernels(name)
        assert all(table.resolve((one,)) for one in effective_names(name))
        assert set(table.selective) - set(effective_names(name)) == ({"CoreAttention"} if name == "nxd" else set())
        assert not table.stated.keys() & set(effective_names(name)), "no search tries them"
        further = sorted({*table.stated, *(op for ops in table.stated.values() for op in ops)})
        text = f"tp=8,kernels={name},recompute=" + (f"selective[{','.join(further)}]" if further else "full")
        assert "recompute-ops" not in reasons(ask(engine=table.engine or "torch"), text)
        for engine in ("nxd", "torch"):
            found = reasons(ask(engine=engine), f"tp=8,kernels={name}")
            assert ("kernels" in found) == (name.startswith("nxd") != (engine == "nxd"))
    # A framework's own names are right even where they compute nothing again, as in AWS's recipes.
    assert "recompute-ops" not in reasons(ask(), "tp=32,pp=2,recompute=full/selective[CoreAttention,LlamaMLP]")


AXES = (*DATA_RULES, *TP_RULES)
ULYSSES = strategy_rules("torch", sequence_parallel=False, cp_kind="all_to_all")
RING = strategy_rules("torch", sequence_parallel=False)

QUERY = ("batch", "seq", "hidden", "kv_heads", "q_group", "head_dim")
PRODUCT = {"dims": QUERY, "matrix": ("kv_heads", "q_group", "head_dim", "hidden")}
KEYS = {"dims": QUERY, "matrix": ("kv_heads", "head_dim", "hidden")}
NORM = {"dims": ("batch", "seq", "hidden"), "matrix": ()}
EXPERT = {"dims": ("experts", "slots", "ffn", "hidden"), "matrix": ("experts", "ffn", "hidden")}
ROUTER = {"dims": ("batch", "seq", "hidden", "experts"), "matrix": ("hidden", "experts")}
DISPATCH = {"dims": ("batch", "seq", "hidden", "experts", "slots", "choices"), "matrix": ()}
OWN_KEYS = {"dims": ("batch", "seq", "hidden", "kv_heads", "head_dim"), "matrix": ("kv_heads", "head_dim", "hidden")}
POSITIONS = {"dims": ("positions", "hidden", "seq"), "matrix": ("positions", "hidden")}
LOGITS = {"dims": ("batch", "seq", "vocab"), "matrix": ()}
TOKENS = {"dims": ("batch", "seq"), "matrix": ()}
TABLE = {"dims": ("vocab", "hidden", "batch", "seq"), "matrix": ("vocab", "hidden")}
ATTENTION = {"dims": ("batch", "seq", "kv_seq", "kv_heads", "q_group", "head_dim"), "matrix": ()}

# Rules, atom, dim, operation, the ids of those that refuse it
CASES = [
    (AXES, "edp", "batch", NORM, ""), (AXES, "edp", None, NORM, "dp-batch"),
    (AXES, "edp", "hidden", PRODUCT, "dp-batch"), (AXES, "edp", "slots", EXPERT, ""),
    (AXES, "ep", "experts", EXPERT, ""), (AXES, "ep", "slots", EXPERT, "dp-batch"), (AXES, "ep", "batch", ROUTER, ""),
    (AXES, "cp", "seq", PRODUCT, ""), (AXES, "cp", None, PRODUCT, "cp-sequence"), (AXES, "cp", "slots", EXPERT, ""),
    (AXES, "kv", "kv_heads", PRODUCT, ""), (AXES, "kv", "hidden", PRODUCT, ""),
    (AXES, "kv", "seq", PRODUCT, "tp-tokens"), (AXES, "kv", "batch", NORM, "tp-tokens"),
    (AXES, "kv", "experts", EXPERT, ""), (AXES, "kv", "slots", EXPERT, "tp-tokens"),
    (AXES, "cp", "experts", EXPERT, ""), (AXES, "kv", "experts", ROUTER, "tp-tokens"),
    (AXES, "kv", None, PRODUCT, "tp-weights"),
    (AXES, "kv", None, KEYS, "tp-weights"), (AXES, "rep", None, KEYS, ""), (AXES, "rep", None, PRODUCT, "tp-weights"),
    (AXES, "kv", "seq", ROUTER, ""), (AXES, "kv", None, ROUTER, ""), (AXES, "kv", "hidden", NORM, "tp-hidden"),
    (AXES, "kv", "vocab", TABLE, ""), (AXES, "kv", "hidden", TABLE, "tp-vocabulary"),
    (NXD_RULES, "kv", "seq", NORM, ""), (NXD_RULES, "kv", "seq", ROUTER, ""),
    (NXD_RULES, "kv", "seq", DISPATCH, "nxd-sequence"), (NXD_RULES, "kv", "hidden", PRODUCT, "nxd-weights nxd-heads"),
    (NXD_RULES, "kv", "head_dim", KEYS, "nxd-weights nxd-heads"), (NXD_RULES, "kv", "ffn", EXPERT, ""),
    (NXD_RULES, "edp", "hidden", PRODUCT, ""), (NXD_RULES, "kv", "positions", POSITIONS, "nxd-weights"),
    (NXD_RULES, "kv", "seq", POSITIONS, ""), (NXD_RULES, "kv", "kv_heads", OWN_KEYS, ""),
    (NXD_RULES, "kv", None, OWN_KEYS, "nxd-heads"), (NXD_RULES, "rep", None, OWN_KEYS, ""),
    (NXD_RULES, "rep", "kv_heads", OWN_KEYS, "nxd-heads"), (NXD_RULES, "rep", "q_group", PRODUCT, ""),
    (NXD_RULES, "rep", "kv_heads", PRODUCT, "nxd-heads"), (NXD_RULES, "kv", "vocab", LOGITS, ""),
    (NXD_RULES, "kv", None, LOGITS, "nxd-loss"), (NXD_RULES, "kv", None, TOKENS, ""),
    (NXD_RULES, "kv", "seq", TOKENS, "nxd-loss"),
    # Sequence parallelism is a promise about what lies between products; losses are no hidden state.
    ((with_sp,), "kv", None, NORM, "sp"), ((with_sp,), "kv", "seq", NORM, ""), ((with_sp,), "kv", None, TOKENS, ""),
    ((without_sp,), "kv", "seq", NORM, "sp"), ((without_sp,), "kv", None, NORM, ""),
    ((with_sp, without_sp), "cp", "seq", NORM, ""),
    # With it NxD routes tokens where they lie.
    ((nxd_router,), "kv", None, ROUTER, "nxd-router"), ((nxd_router,), "kv", "seq", ROUTER, ""),
    ((nxd_router,), "cp", None, ROUTER, ""), *(((nxd_router,), "kv", None, op, "") for op in (EXPERT, DISPATCH, NORM)),
    # An all-to-all over cp cuts heads in attention, and tokens elsewhere.
    (ULYSSES, "cp", "kv_heads", ATTENTION, ""), (ULYSSES, "cp", "seq", ATTENTION, "cp-heads"),
    (ULYSSES, "cp", "seq", NORM, ""), (ULYSSES, "cp", None, NORM, "cp-heads"),
    (RING, "cp", "kv_heads", ATTENTION, "cp-sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("rules", "atom", "dim", "op", "why"), CASES)
def test_an_axis_is_for_one_thing_and_an_engine_runs_what_it_has_layers_for(rules, atom, dim, op, why):
    cut = AtomCut(op="some", atom=atom, dim=dim, **op)
    assert [found.rule_id for rule in rules if (found := rule.rejection(cut))] == why.split()


def test_a_refusal_says_what_where_and_what_instead():
    (found,) = [found for rule in AXES if (found := rule.rejection(AtomCut(op="q", **PRODUCT, atom="kv", dim=None)))]
    assert str(found).startswith("q is not cut over kv: tp cuts every matrix") and found.source
    for engine, sp in itertools.product(("nxd", "torch"), (True, False)):
        rules = strategy_rules(engine, sequence_parallel=sp)
        assert (nxd_router in rules) == (engine == "nxd" and sp) and (with_sp in rules, without_sp in rules) == (
            sp,
            not sp,
        )
