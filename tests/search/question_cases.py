"""Random small questions, and Rules that leave few kinds of recompute, so that everything can be tried."""

from dataclasses import replace
from typing import Any

from hypothesis import note, strategies as st

from autoshard.cost.calibration import built_in
from autoshard.plan.recompute import Recompute, parse_stages
from autoshard.plan.rules.columns import Columns
from autoshard.plan.rules.rule import Rule, Verdict, rule
from autoshard.search.request import Request
from tests.search.brute_force import FULL, PLAIN, ask, kinds_of_recompute

MODELS = ("tiny-llama", "tiny-llama", "tiny-mixtral")
KERNELS = (None, "torch_cuda", "te", "mcore")  # None: those of the cluster
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v")
PINNED_RECOMPUTE = ((PLAIN,), (FULL,), (Recompute(kind="full", num_layers=1),))


def only_kinds(kinds: tuple[Recompute, ...]) -> Rule:
    """A user's Rule: layers do nothing else than this."""

    @rule("recompute", source="this test")
    def mine(c: Columns) -> Verdict:
        yield all(kind in kinds for stage in parse_stages(str(c.recompute)) for kind in stage.kinds)
        yield f"not {c.recompute}"

    return mine


@st.composite
def requests(draw: Any) -> Request:
    """A small model on up to eight ranks with something pinned; it has few points and few ways for each."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 4, 6, 8, 8]))
    layers = draw(st.integers(2, 5))
    pp = draw(st.sampled_from([size for size in (1, 2, 2, 3, 4, 4, 5) if ranks % size == 0 and size <= layers]))
    pins: dict[str, Any] = {"pp": pp}
    for key, values in {
        "mbs": (1, 1, 2), "tp": (1, 2), "zero": (0, 1, 3), "sp": (False,), "cp": (1, 1, 2), "vp": (1, 2),
        "schedule": SCHEDULES,
    }.items():  # fmt: skip
        if draw(st.sampled_from([True, key != "vp" and key != "sp", False])):
            pins[key] = draw(st.sampled_from(values))
    if draw(st.booleans()) and pp > 1:
        pins["schedule"] = draw(st.sampled_from(SCHEDULES))
    kernels = draw(st.sampled_from(KERNELS))
    if kernels:
        pins["kernels"] = kernels
    kinds: tuple[Recompute, ...] = ()
    if draw(st.integers(0, 4)) == 0:
        pins["recompute"] = draw(st.sampled_from(PINNED_RECOMPUTE))
    else:
        known = kinds_of_recompute(kernels or "torch_cpu")
        most = 2 if pp > 3 else 4 if pp > 2 else 13
        kinds = tuple(draw(st.lists(st.sampled_from(known), min_size=1, max_size=most, unique=True)))
    batch = draw(st.sampled_from([1, 2, 4, 4, 6, 8, 12]))
    request = ask(
        draw(st.sampled_from(MODELS)), ranks=ranks, global_batch=batch, seq_len=draw(st.sampled_from([8, 64, 256]))
    )
    constants = replace(
        built_in("local"),
        step_s=draw(st.sampled_from([0.0, 0.01])),
        collective_s=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
    )
    model = replace(request.model, num_layers=layers)
    rules = (only_kinds(kinds),) if kinds else ()
    note(f"{model.name}, {layers} layers, {ranks} ranks, batch {batch}, {pins}, kinds {kinds or 'all'}, {constants}")
    return replace(request, model=model, pins=pins, extra_rules=rules, calibration=constants)
