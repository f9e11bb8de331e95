"""Random layouts of the models of 2025 and 2026, on ranks that the real torchrun starts, against one process."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from autoshard.errors import InputError
from autoshard.graph.router import BALANCE
from autoshard.plan.candidate import Candidate
from autoshard.run.protocol import EngineMode
from autoshard.search.bound.request import Request, plan_at, rejections_of
from autoshard.spec.model import ModelSpec
from autoshard.spec.model_parts import Router
from autoshard.spec.workload import Precision
from tests.ranks.cases import (
    MIXTRAL,
    Task,
    compare,
    deepseek,
    gemma,
    glm,
    gpt_oss,
    llama,
    olmo2,
    qwen3_next,
    request_of,
)
from tests.ranks.torchrun import on_torchrun, run_agreeing
from tests.soak.hunt import HuntResult

MOST_RANKS = 8
PATIENCE_S = 900.0  # compilers of eight ranks take minutes on a small machine
_DEEPSEEK: Mapping[str, Any] = {
    "num_layers": 4, "num_experts": 8, "experts_per_token": 2, "shared_ffn": 8,
    "kinds": glm().kinds, "order": "dense/layer*3",
    "router": Router(scores="sigmoid", scale=1.5, groups=4, chosen_groups=2, group_score="best two", correction=True),
}  # fmt: skip
FAMILIES: Mapping[str, ModelSpec] = {
    "DeepSeek-V3": deepseek(**_DEEPSEEK),
    "DeepSeek-V2": deepseek(query_rank=None, value_dim=5, **_DEEPSEEK | {"router": Router(groups=4, chosen_groups=2)}),
    "GLM-4.5": glm(num_layers=4, order="dense/layer*3"),
    "Qwen3-MoE": llama(qk_norm=True, num_layers=4, **MIXTRAL),
    "GPT-OSS": gpt_oss(num_layers=4, order="local/layer/local/layer"),
    "Gemma 3": gemma(num_layers=4, order="local*2/layer/local"),
    "Qwen3-Next": qwen3_next(num_layers=4, order="linear*3/layer"),
    "OLMo 2": olmo2(num_layers=4),
    "Llama 3.2": llama(num_layers=4, tied_embeddings=True),
}
KEYS: Mapping[str, tuple[str, ...]] = {
    "tp": ("1", "2", "4"), "pp": ("1", "2", "4"), "cp": ("1", "2"), "dp": ("1", "2", "4", "8"), "ep": ("1", "2", "4"),
    "vp": ("1", "2"), "mbs": ("1", "2"), "zero": ("0", "1", "3"), "zero_group": ("all", "1", "2", "4"),
    "weight_group": ("all", "all", "1", "2"),
    "cp_kind": ("ring", "all_to_all"),
    "cp_order": ("contiguous", "zigzag"), "schedule": ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"),
    "recompute": ("none", "full", "selective[attention]", "full:1"), "fold": ("none", "tp", "cp", "cp.tp"),
}  # fmt: skip
WORK: Mapping[str, tuple[Any, ...]] = {
    "documents": ("joined", "separate"),
    "router_balance_loss": (0.0, 0.5),
    "router_balance_over": ("batch", "sequence"),
    "router_z_loss": (0.0, 0.1),
    "expert_capacity": (None, None, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step of a family in a layout, by one mode of the engine."""

    family: str
    candidate: Candidate
    work: Mapping[str, Any]
    mode: EngineMode

    def __str__(self) -> str:
        work = ", ".join(f"{key} {value}" for key, value in self.work.items() if value not in (0.0, None))
        return f"{self.family} {self.mode} {self.candidate} {work}"

    @property
    def request(self) -> Request:
        """The question; compiled functions know FP32."""
        precision = {"precision": Precision.named("fp32")} if self.mode == "compiled" else {}
        return request_of(self.candidate, FAMILIES[self.family], global_batch=8, **self.work, **precision)

    def task(self) -> Task:
        """The plan, with weights and batches."""
        return Task.of(plan_at(self.request, self.candidate))


def random_cases(seed: int) -> Iterator[Case]:
    """Yield cases that may run, family after family and mode after mode, without end."""
    generator, modes = random.Random(seed), get_args(EngineMode)
    for number in itertools.count():
        family = [*FAMILIES][number % len(FAMILIES)]
        yield random_case(generator, family, modes[number // len(FAMILIES) % len(modes)])


def random_case(generator: random.Random, family: str, mode: EngineMode) -> Case:
    """Draw keys and work until no Rule refuses them."""
    while True:
        work = {name: generator.choice(values) for name, values in WORK.items()}
        keys = {name: generator.choice(values) for name, values in KEYS.items()}
        keys = {name: value for name, value in keys.items() if value != "all"}
        with suppress(InputError):
            case = Case(
                family=family,
                candidate=Candidate.parse(",".join(f"{name}={value}" for name, value in keys.items())),
                work=work if FAMILIES[family].num_experts else {"documents": work["documents"]},
                mode=mode,
            )
            if 2 <= case.candidate.num_ranks <= MOST_RANKS and not rejections_of(case.request, case.candidate, "torch"):
                return case


def hold(case: Case, folder: Path) -> None:
    """Loss, norm, losses of routers, every gradient and every new weight are those of one process."""
    task = case.task()
    expected, shares = (
        task.reference(),
        on_torchrun(folder, case.candidate.num_ranks, run_agreeing, task, case.mode, timeout_s=PATIENCE_S),
    )
    compare(expected, shares, most=1e-10 if FAMILIES[case.family].has_linear_layers else 1e-12)  # chunks sum otherwise
    for name, value in expected.router.items():
        for report in (share.router for share in shares):
            reported = report.balance_loss if name == BALANCE else report.z_loss
            assert reported == pytest.approx(value, rel=1e-12), name


def hunt(cases: int, seed: int, folder: Path) -> HuntResult:
    """Run so many cases."""
    failures, ranks, counts = list[str](), list[int](), Counter[str]()
    for number, case in enumerate(itertools.islice(random_cases(seed), cases), 1):
        (place := folder / str(number)).mkdir()
        begun_s = time.monotonic()
        try:
            hold(case, place)
            outcome = "held"
        except Exception as error:
            failures.append(f"{case}: {str(error).strip()[-400:]}")
            outcome = f"broken: {failures[-1]}"
        ranks.append(case.candidate.num_ranks)
        counts.update([case.family, case.mode])
        print(f"{number}/{cases} {case}: {time.monotonic() - begun_s:.0f} s, {outcome}", flush=True)
    times = f"each family {min(counts[name] for name in FAMILIES)} times or more"
    remark = f"{min(ranks)} to {max(ranks)} ranks, another hash seed on each; {times}; equal to 1e-12"
    return HuntResult(held=cases - len(failures), failures=failures, remark=remark)
