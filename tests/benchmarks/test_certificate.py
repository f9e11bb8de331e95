"""The adversary of certificates prices what ``--at`` prices, and refutes a certificate that promises too much."""

from dataclasses import replace

import pytest

from autoshard.plan.candidate import Candidate
from autoshard.search.ask.planner import SearchResult, search
from autoshard.search.bound.request import Request, plan_at
from autoshard.search.fill.stage_options import near_even_splits
from benchmarks import certificate
from benchmarks.certificate import Adversary, Finding, attack, judge
from tests.search.brute_force import ask

_WHOLE = ask("llama3-8b", "h100-80", pins="pp=4,tp=1,schedule=interleaved,vp=2,mbs=1,zero=1,cp=1", global_batch=16)
UNEVEN = replace(  # its embedding and head take as long as several of its layers
    _WHOLE, model=replace(_WHOLE.model, num_layers=16, hidden=2048, ffn=8192, num_heads=32, head_dim=64)
)
FOUND = Finding(question="1", value=2.0, bound=1.9, least=1.95, candidate="tp=1", num_priced=3)


def test_a_plan_below_the_bound_refutes_a_certificate_and_one_within_the_gap_does_not() -> None:
    refuted = replace(FOUND, least=1.8)
    nothing = replace(FOUND, value=float("inf"), bound=float("inf"), least=1.0)  # the search found no plan
    result = judge([FOUND, refuted, nothing])
    assert result.value == 2 and not result.holds
    assert result.extras["plan_beaten"] == 2 and result.extras["largest_gap"] == 0.05
    assert judge([FOUND]).holds


def test_the_adversary_prices_a_candidate_as_the_command_line_does() -> None:
    request, answer = UNEVEN, search(UNEVEN).plans[0]
    candidate = Candidate.parse("tp=2,pp=2,vp=2,schedule=zb_v,stages=5/4/4/3,recompute=full:2", num_ranks=8)
    adversary = Adversary.of(request, 0)
    for one in (candidate, answer.candidate):
        prediction = plan_at(request, one).prediction
        assert prediction and adversary.time_s(one) == prediction.step_time_s
    assert adversary.time_s(replace(candidate, tp=5)) == float("inf")  # no shape


@pytest.mark.slow
def test_a_search_of_near_even_splits_that_promises_the_best_of_all_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_few_splits(request: Request) -> SearchResult:
        splits = near_even_splits(request.model.num_layers, request.pins["pp"] * request.pins["vp"])
        pinned = (search(replace(request, pins={**request.pins, "stages": split})) for split in splits)
        return min(pinned, key=lambda answer: answer.certificate.value)

    assert not attack(UNEVEN, 0, (1, 60)).refuted
    monkeypatch.setattr(certificate, "search", of_few_splits)
    assert attack(UNEVEN, 0, (1, 60)).refuted
