"""Calls of a sharded module that differ from the first: other shapes, modes, gradients, formats."""

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from autoshard.errors import InputError
from autoshard.modules.shard import shard_module
from autoshard.modules.sharded import ShardedModule, shard
from autoshard.spec.cluster_catalogue import load_cluster
from tests.modules.comparing import cut_on_ranks, devices_of
from tests.modules.models import model
from tests.modules.modules import Own
from tests.ranks.spawn import Replaced, each_rank, on_ranks
from tests.slower import each_third_is_fast, rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Convnet(nn.Module):
    """A net with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.first(x))).flatten(1))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(module: nn.Module, inputs: Any, seed: int, results: list[str] | None = None) -> nn.Module:
    """A module with random legal cuts of all operations, and weights that rest in random pieces."""
    cluster = load_cluster("local", ranks=4)
    found = shard_module(module, inputs, cluster, "data=2,model=2", precision="fp32", results=results)
    return cut_on_ranks(module, found, seed, devices_of("data=2,model=2"))


def gradients(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """Return the whole gradients, which lie as their parameters do, and drop them."""
    found = {path: None if one.grad is None else whole(one.grad).clone() for path, one in module.named_parameters()}
    for one in module.parameters():
        if isinstance(one, DTensor) and isinstance(one.grad, DTensor):
            assert one.grad.placements == one.placements
    module.zero_grad()
    return found


def differences(plain: nn.Module, module: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> float:
    """Compare results, gradients and buffers after a call of both."""
    results = [whole(run(one)) for one in (plain, module)]
    worst = float((results[0] - results[1]).detach().abs().max())
    if results[0].requires_grad:
        for one in results:
            one.square().sum().backward()  # pyright: ignore[reportUnknownMemberType]
    (wanted, found) = (gradients(one) for one in (plain, module))
    for path, one in wanted.items():
        other = found[path]
        assert (one is None) == (other is None), path
        worst = max(worst, float((one - other).abs().max()) if one is not None and other is not None else 0.0)
    pairs = zip(plain.buffers(), module.buffers(), strict=True)
    return max(worst, *(float((one - other).abs().max()) for one, other in pairs))


@pytest.mark.parametrize("seed", rest_is_slow([0, 1], 0, 1))
@each_rank(4)
def test_a_module_is_traced_again_for_other_shapes_modes_and_gradients(seed: int):
    """As it was traced, with fewer images, evaluating, with a part that evaluates or is frozen, and for an input."""
    torch.manual_seed(0)
    plain, x = Convnet().double(), torch.randn(8, 3, 4, 4, dtype=torch.float64)
    module = sharded(copy.deepcopy(plain), [x], seed)

    def both(change: Callable[[Any], object]) -> None:
        for one in (plain, module):
            change(one)

    assert differences(plain, module, lambda one: one(x)) < 1e-12
    assert differences(plain, module, lambda one: one(x[:5])) < 1e-12
    both(lambda one: one.eval())
    with torch.no_grad():
        assert differences(plain, module, lambda one: one(x)) < 1e-12
    both(lambda one: one.train().norm.eval())
    assert differences(plain, module, lambda one: one(x)) < 1e-12
    both(lambda one: (one.norm.train(), one.first.requires_grad_(False)))
    assert differences(plain, module, lambda one: one(x)) < 1e-12
    both(lambda one: one.first.requires_grad_(True))
    image = x.clone().requires_grad_()
    assert differences(plain, module, lambda one: one(image)) < 1e-12
    wanted = cast(torch.Tensor, image.grad) / 2  # both have added theirs
    image.grad = None
    plain(image).square().sum().backward()
    assert float((wanted - cast(torch.Tensor, image.grad)).abs().max()) < 1e-12
    assert len(cast(ShardedModule, module).autoshard.runners) == 6


@pytest.mark.slow
@pytest.mark.thorough
@each_rank(4)
def test_a_language_model_is_evaluated_without_labels():
    """A Llama is trained with whole and partial batches before."""
    torch.manual_seed(0)
    plain, inputs = model("Llama", 2)
    tokens, module = inputs["input_ids"], sharded(copy.deepcopy(plain), inputs, 0, ["loss"])
    for count in (4, 3, 4):
        words = {"input_ids": tokens[:count], "labels": tokens[:count]}
        assert differences(plain, module, lambda one, words=words: one(**words)["loss"]) < 1e-5
    with torch.no_grad():
        assert differences(plain, module, lambda one: one(input_ids=tokens[:2]).logits) < 1e-5


@pytest.mark.parametrize("name", rest_is_slow(["Llama", "GPT-2", "torch's TransformerEncoder"], 0, 1))
@each_rank(4)
def test_autocast_rounds_as_it_does_in_the_plain_module(name: str):
    torch.manual_seed(0)
    plain, drawn = model(name, 2)
    inputs = {name: one.float() if one.is_floating_point() else one for name, one in drawn.items()}
    plain = plain.float()
    module = sharded(copy.deepcopy(plain), inputs, 0, ["loss", "logits"])
    logits, rows = list[torch.Tensor](), list[torch.Tensor]()
    for one, casts in ((plain, False), (plain, True), (module, True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            result = one(**inputs)
        result["loss"].backward()
        logits.append(whole(result["logits"]).detach())
        rows.append(torch.cat([cast(torch.Tensor, own).flatten() for own in gradients(one).values()]))
    assert logits[1].dtype == logits[2].dtype
    for exact, own, ours in (logits, rows):
        assert 0.5 < float((ours - exact).norm() / (own - exact).norm()) < 1.4  # of numbers in FP32 it would be 0


def without_numbers(kind: str) -> float:
    """Shard a module that has no numbers yet, and give each rank its part of them."""
    torch.manual_seed(0)
    plain, inputs = (Convnet(), {"x": torch.randn(4, 3, 4, 4)}) if kind == "net" else model("Llama", 2)
    plain = plain.float()
    module = shard(copy.deepcopy(plain).to("meta"), inputs, "data=2,model=2", pins={"*head.weight": "[/model, _]"})
    assert all(cast(DTensor, one).to_local().is_meta for one in module.parameters())
    module.to_empty(device="cpu")
    whole_state = {path: one.detach().clone() for path, one in plain.state_dict().items()}
    set_model_state_dict(module, whole_state, options=StateDictOptions(full_state_dict=True))
    for one, own in zip(plain.buffers(), module.buffers(), strict=True):  # not all are part of the state
        own.copy_(one)
    return differences(plain, module, lambda one: one(**inputs) if kind == "net" else one(**inputs)["loss"])


@pytest.mark.parametrize("kind", rest_is_slow(["net", "Llama"], 0, 2))
def test_a_module_may_get_its_numbers_after_it_was_sharded(kind: str):
    assert max(on_ranks(4, without_numbers, kind)) < 2e-5


def no_driver(check_available: bool = False) -> torch.device | None:
    """What PyTorch built for CUDA says of a machine without a GPU."""
    return None if check_available else torch.device("cuda")


def test_a_module_without_numbers_lies_on_processors_where_no_accelerator_is_there():
    known: list[Replaced] = [(torch.accelerator, "current_accelerator", no_driver)]
    assert max(on_ranks(4, without_numbers, "net", replaced=known)) < 2e-5


class Shifted(nn.Module):
    """Its parameters are read by the last operations, so their gradients are given to the block or follow at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


LONE: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 4),
    "linear without bias": lambda: nn.Linear(4, 4, bias=False),
    "frozen linear": lambda: nn.Linear(4, 4).requires_grad_(False),
    "norm": lambda: nn.LayerNorm(4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "activation first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
    "shift": Shifted,
}


@pytest.mark.parametrize("trains_input", [False, True])
@pytest.mark.parametrize("name", each_third_is_fast(LONE))
def test_a_module_of_one_operation_is_priced_as_every_other(name: str, trains_input: bool):
    module, x = LONE[name](), torch.randn(4, 4, requires_grad=trains_input)
    found = shard_module(module, [x], load_cluster("local", ranks=2), "data=2")
    weights_bytes = sum(4 * one.numel() for one in module.parameters())
    assert found.sharding.memory_bytes >= weights_bytes / 2 and found.sharding.time_s > 0


@pytest.mark.slow
@each_rank(2)
def test_many_kinds_of_calls_are_told_once():
    module = shard(nn.Linear(4, 4), [torch.ones(1, 4)], "data=2")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for count in range(1, 12):
            module(torch.ones(count, 4))
    (message,) = (str(one.message) for one in told if "kinds of calls" in str(one.message))
    assert "traced for 8 kinds of calls" in message


@each_rank(2)
def test_a_call_that_cannot_be_traced_is_refused_and_changes_nothing():
    plain = Own(lambda own, x: x[torch.randperm(x.shape[0])] if own.training else own.a(x)).eval()
    module = shard(plain, [torch.ones(2, 8)], "data=2")
    paths = [path for path, _ in module.named_parameters()]
    with pytest.raises(InputError, match="randperm draws random numbers"):
        module.train()(torch.ones(2, 8))
    module.eval()(torch.ones(2, 8))
    assert [path for path, _ in module.named_parameters()] == paths and "Sharded" in type(module).__name__


def test_inputs_hints_and_meshes_of_other_kinds_are_refused_by_their_names() -> None:
    module, x = nn.Linear(8, 8), torch.randn(4, 8)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (5, "data=1", {}, "inputs: must be what forward takes, in order or by name, not a value of int"),
        ("x", "data=1", {}, "inputs: must be what forward takes"),
        (x, 5, {}, "mesh: 5 is no mesh. Write it like"),
        (x, "data=1", {"hints": {"y": ("batch",)}}, "hints.y: is no input. "),
        (x, "data=1", {"optimizer": torch.optim.SGD(module.parameters())}, "optimizer: SGD "),
    ]
    for inputs, mesh, options, says in cases:
        with pytest.raises(InputError, match=f"^{re.escape(says)}"):
            shard_module(module, inputs, load_cluster("local", ranks=1), mesh, **options)


def test_a_tensor_alone_is_the_only_input_and_no_sequence_of_its_rows() -> None:
    x = torch.randn(1, 8)  # a row of which forward would take as well
    alone = shard_module(nn.Linear(8, 8), x, load_cluster("local", ranks=1), "data=1")
    assert [tuple(example.shape) for example in alone.captured.exported.examples] == [(1, 8)]
