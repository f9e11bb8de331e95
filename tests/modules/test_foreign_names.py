"""Operations of users that have the names of torch's: each is computed as its user wrote it."""

import torch

from autoshard.modules.capture import _IGNORED, _SAME
from autoshard.modules.rewriting import complex_numbers, randomness
from autoshard.modules.rules import RULES
from autoshard.modules.shard import shard_module

NAMES = sorted(
    name
    for name in {*RULES, *_SAME, *_IGNORED, "detach", "fill", *randomness._WRITTEN, *complex_numbers._WRITTEN}
    if "::" not in name
)


def define(name: str, factor: float) -> None:
    """Give running sums along the first dim, which a cut of that dim changes, a name of torch."""

    def running(x: torch.Tensor) -> torch.Tensor:
        return factor * x.cumsum(0)

    def back(_: object, upstream: torch.Tensor) -> torch.Tensor:
        return factor * upstream.flip(0).cumsum(0).flip(0)

    operation = torch.library.custom_op(f"names_of_torch::{name}", running, mutates_args=())
    operation.register_fake(torch.empty_like)
    operation.register_autograd(back)


class Named(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return sum((getattr(torch.ops.names_of_torch, name)(y) for name in NAMES), torch.zeros_like(y))


def test_an_operation_of_a_user_with_a_name_of_torch_is_computed_as_the_user_wrote_it() -> None:
    for number, name in enumerate(NAMES):
        define(name, 1 + number / len(NAMES))
    x = torch.randn(16, 8, dtype=torch.float64, requires_grad=True)
    module = Named()
    found = shard_module(module, [x], "h100-80", "dp=8", batch="dp")
    assert max(part.error for part in found.prove(module, [x])) < 1e-12
