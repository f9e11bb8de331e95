"""What a rank sends for a layer of Llama-3 8B, beside what GSPMD sends in the same cuts: lowered now, and recorded."""

from collections.abc import Mapping

from autoshard.spec.cluster_catalogue import load_cluster
from benchmarks.result import Result

BAR = 1.0  # of GSPMD's bytes, in every layout
NODE = "h100-80"  # whose speeds the solver is told
_DTYPE_BYTES = 2  # of all elements, on both sides


def run() -> Result:
    """Lower every layout, and let the solver choose one for the ends of Megatron's; torch is imported here."""
    from tests.gspmd.cases import CASES, LLAMA_3_8B, MEGATRON
    from tests.gspmd.record import recorded, sent_by_autoshard
    from tests.gspmd.sent import sent_bytes, without_weights
    from tests.gspmd.traced import TracedLayer, sent_in_solution

    ours, theirs = sent_by_autoshard("llama3-8b"), recorded("gspmd")
    mesh, key = CASES[MEGATRON].mesh, f"llama3-8b, {MEGATRON}"
    chosen = sent_in_solution(CASES[MEGATRON], TracedLayer.of(LLAMA_3_8B, "meta"), load_cluster(NODE, 1))
    pairs = {
        name: (ours[f"llama3-8b, {name}"], theirs[f"llama3-8b, {name}"], case.mesh) for name, case in CASES.items()
    }
    pairs["without gradients of weights"] = without_weights(ours[key]), without_weights(theirs[key]), mesh
    pairs["solver, beside GSPMD in Megatron's"] = chosen, theirs[key], mesh
    sent = {
        name: (sent_bytes(one, laid, _DTYPE_BYTES), sent_bytes(other, laid, _DTYPE_BYTES))
        for name, (one, other, laid) in pairs.items()
    }
    return judge(sent, MEGATRON)


def judge(sent: Mapping[str, tuple[float, float]], shown: str) -> Result:
    """Show one layout, and hold all against the bar; ``sent`` gives our bytes and GSPMD's."""
    shares = {name: ours / theirs for name, (ours, theirs) in sent.items()}
    return Result(
        name="bytes_vs_gspmd",
        value=round(shares[shown], 4),
        unit="of the bytes that a rank sends under GSPMD",
        bar=BAR,
        holds=max(shares.values()) <= BAR,
        extras={
            "layout": shown,
            **{f"{name}.share": round(share, 4) for name, share in shares.items()},
            **{f"{name}.bytes": ours for name, (ours, _) in sent.items()},
        },
    )
