"""What torch says of experts: who goes where, what comes back, biases, and gates that are clamped."""

from typing import Any

import pytest

from tests.graph.attention_references import Reference, Sizes

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional


def reference_places(expert: Any, sizes: Sizes) -> Any:
    """Hand out the places one token after the other."""
    taken = [0] * sizes["experts"]
    places: list[int] = []
    for chosen in expert.flatten().tolist():
        places.append(taken[chosen] if taken[chosen] < sizes["slots"] else -1)
        taken[chosen] += 1
    return torch.tensor(places).reshape(expert.shape)


def sending(expert: Any, place: Any, sizes: Sizes) -> Any:
    """A 0/1 tensor over batch, seq, choices, experts, slots: who goes where."""
    to_expert = F.one_hot(expert, sizes["experts"]).double()
    to_slot = F.one_hot(place.clamp(min=0), sizes["slots"]).double() * (place >= 0)[..., None]
    return torch.einsum("bsce,bscn->bscen", to_expert, to_slot)


def reference_dispatch(x: Any, expert: Any, place: Any, sizes: Sizes) -> Any:
    return torch.einsum("bsh,bscen->enh", x, sending(expert, place, sizes))


def reference_combine(slots: Any, weight: Any, expert: Any, place: Any, sizes: Sizes) -> Any:
    return torch.einsum("enh,bsc,bscen->bsh", slots, weight, sending(expert, place, sizes))


def reference_clamped_glu(limit: float, slope: float) -> Reference:
    def run(gate: Any, up: Any, _: Sizes) -> Any:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * gate * torch.sigmoid(slope * gate)

    return run


def reference_chosen_bias(weight: Any, expert: Any, bias: Any, *rest: Any) -> Any:
    *place, _ = rest
    found = weight * (place[0] >= 0) if place else weight
    return torch.einsum("bsc,bsch->bsh", found, bias[expert])
