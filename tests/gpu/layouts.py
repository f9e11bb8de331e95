"""Twenty layouts that together send everything that ranks can send."""

from collections.abc import Mapping
from typing import Any

from autoshard.spec.model import ModelSpec
from tests.ranks.cases import MIXTRAL, Task, gpt, llama, plan_of

_HEADS: Mapping[str, Any] = {"head_dim": 8}  # as fused attention takes them
_DEEP: Mapping[str, Any] = {**_HEADS, "num_layers": 4}
LAYOUTS: Mapping[str, tuple[ModelSpec, Mapping[str, Any]]] = {
    "tp=2,pp=1,dp=1": (llama(**_HEADS), {}),
    "tp=2,pp=1,dp=1,sp=false": (gpt(**_HEADS), {}),
    "tp=4,pp=1,dp=1": (llama(num_kv_heads=4, vocab=32, **_HEADS), {}),
    "tp=1,pp=2,dp=1": (gpt(**_DEEP), {}),
    "tp=1,pp=2,dp=1,schedule=gpipe,recompute=full": (llama(**_DEEP), {}),
    "tp=1,pp=2,dp=1,vp=2,schedule=interleaved": (llama(**_DEEP), {}),
    "tp=1,pp=2,dp=1,schedule=zb_h1": (llama(**_DEEP), {}),
    "tp=1,pp=2,dp=1,vp=2,schedule=zb_v": (gpt(**_DEEP), {}),
    "tp=1,pp=1,dp=2,zero=0": (llama(**_HEADS), {}),
    "tp=1,pp=1,dp=2,zero=1": (gpt(**_HEADS), {}),
    "tp=1,pp=1,dp=2,zero=3": (llama(**_HEADS), {}),
    "tp=1,pp=1,dp=4,zero=3": (gpt(**_HEADS), {}),
    "tp=1,pp=1,cp=2,dp=1": (llama(vocab=32, **_HEADS), {}),
    "tp=1,pp=1,cp=2,dp=1,cp_order=zigzag": (llama(vocab=32, **_HEADS), {"documents": "separate"}),
    "tp=1,pp=1,cp=2,dp=1,cp_kind=all_to_all": (llama(vocab=32, **_HEADS), {}),
    "tp=1,pp=1,dp=2,ep=2": (llama(**_HEADS, **MIXTRAL), {}),
    "tp=2,pp=1,dp=2,ep=2": (llama(vocab=32, **_HEADS, **MIXTRAL), {}),
    "tp=2,pp=2,dp=1": (llama(vocab=32, **_DEEP), {}),
    "tp=1,pp=2,dp=2,zero=1": (gpt(**_DEEP), {}),
    "tp=2,pp=1,cp=2,dp=1": (llama(vocab=32, window=3, **_HEADS), {}),
}


def task_of(text: str) -> Task:
    """A step of a layout."""
    model, changes = LAYOUTS[text]
    return Task.of(plan_of(text, model, **changes))
