"""Modules that draw random numbers: the same ones in every layout, and such as torch's own operations draw."""

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from autoshard.engine.torch.kernels.philox import Distribution, philox, random_part
from autoshard.errors import InputError
from autoshard.modules.export import ExportedModule
from autoshard.modules.rewriting.randomness import new_key
from autoshard.modules.shard import ModuleSharding, shard_module, sizes_of
from autoshard.modules.sharded import run_on, shard
from autoshard.spec.cluster_catalogue import load_cluster
from tests.modules.comparing import cut_at_random, devices_of, difference
from tests.modules.models import model
from tests.ranks.spawn import on_ranks
from tests.slower import rest_is_slow

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# Of the authors of Philox: Random123 1.14, tests/kat_vectors, philox4x32 10.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_generator_is_that_of_its_authors(counter: Sequence[int], key: Sequence[int], words: Sequence[int]):
    found = philox([torch.tensor([word]) for word in counter], key)
    assert [int(word) for word in found] == list(words)


@given(st.data())
def test_a_part_has_the_numbers_of_the_whole(data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=4))
    bounds = [tuple(sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in sizes]
    kind: Distribution = data.draw(st.sampled_from(["uniform", "normal"]))
    key = torch.tensor(data.draw(st.integers(0, 2**63 - 2)))
    whole = random_part(kind, sizes, [(0, size) for size in sizes], 3, key)
    inner = random_part(kind, [math.prod(sizes)], [(0, math.prod(sizes))], 3, key)
    assert torch.equal(whole.flatten(), inner) and len(inner.unique()) >= len(inner) - 3
    for axis, (start, stop) in enumerate(bounds):
        whole = whole.narrow(axis, start, stop - start)
    assert torch.equal(random_part(kind, sizes, bounds, 3, key), whole)


def test_numbers_are_as_good_as_random_and_those_of_other_streams_keys_and_places_tell_nothing():
    count, keys = 2**18, [torch.tensor(one) for one in (0, 1, 2**32, 2**62 + 12345)]
    drawn = [random_part("uniform", [count], [(0, count)], stream, key) for key in keys for stream in (0, 1)]
    drawn.append(random_part("uniform", [2**40], [(2**34, 2**34 + count)], 0, keys[0]))
    expected = count / 64
    for one in drawn:
        assert float(one.min()) >= 0.0 and float(one.max()) < 1.0
        counts = torch.histc(one, 64, 0.0, 1.0)
        assert float(((counts - expected) ** 2).sum() / expected) < 63 + 5 * math.sqrt(2 * 63)
    bound = 5 / math.sqrt(count)
    shifted = [one.roll(places) for one in drawn[:1] for places in (1, 2, 3, 64, 4096)]
    for one, other in itertools.combinations([*drawn, *shifted], 2):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < bound
    normal = random_part("normal", [count], [(0, count)], 5, keys[0]).double()
    fours = torch.corrcoef(normal.reshape(-1, 4).T) - torch.eye(4)
    assert float(fours.abs().max()) < 2 * bound, "those of one counter"
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert abs(float((normal**power).mean()) - moment) < 5 * math.sqrt(105 / count)


class Drawing(nn.Module):
    """Two layers with something random between them."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(8, 16), nn.Linear(16, 8), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.draw(self.a(x)))) + self.draw(x)[..., :8]


def drop_path(x: torch.Tensor) -> torch.Tensor:
    """Drop whole samples, as timm does."""
    keep = 0.7
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * mask.div_(keep)


def channels(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout1d(x, 0.3)


def gumbel(x: torch.Tensor) -> torch.Tensor:
    return functional.gumbel_softmax(x, tau=0.5)


def noise(x: torch.Tensor) -> torch.Tensor:
    """Noise of all kinds."""
    found = torch.randn_like(x) + torch.normal(1.0, 2.0, x.shape) + torch.rand_like(x)
    return x * 0.5 + found + torch.zeros_like(x).uniform_(-1, 2) + torch.zeros_like(x).normal_(1, 0.5)


def shared_noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape[-1], dtype=x.dtype) + torch.randn(1, dtype=x.dtype)


def with_probabilities(x: torch.Tensor) -> torch.Tensor:
    return x * torch.bernoulli(torch.sigmoid(x.detach())) + torch.randint(-3, 4, x.shape).to(x.dtype)


class Attending(nn.Module):
    """Heads that share keys, as fused kernels take them."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.q, self.kv, self.o, self.causal = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = None if self.causal else torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(-1)
        made = functional.scaled_dot_product_attention(q, k, v, mask, 0.2, self.causal, enable_gqa=True)
        return self.o(made.transpose(1, 2).flatten(2))


class Normed(nn.Module):
    """What changes buffers is exported in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.a(x).transpose(1, 2)).transpose(1, 2)
        return self.b(self.drop(y))


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Dropout(0.2)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Drawing(nn.Dropout(0.3)),
    "channels": lambda: Drawing(channels),
    "slopes": lambda: Drawing(nn.RReLU()),
    "alpha": lambda: Drawing(nn.AlphaDropout(0.2)),
    "drop path": lambda: Drawing(drop_path),
    "gumbel": lambda: Drawing(gumbel),
    "noise": lambda: Drawing(noise),
    "shared noise": lambda: Drawing(shared_noise),
    "bits and integers": lambda: Drawing(with_probabilities),
    "attention": lambda: Attending(causal=True),
    "attention with a mask": lambda: Attending(causal=False),
    "batch norm": Normed,
    "tied": Tied,
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    "layers": lambda: nn.Sequential(*(Drawing(nn.Dropout(0.1)) for _ in range(2))),
}


_SHORT = ("dropout", "noise", "attention", "tied")


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return MODULES[name]().double(), torch.randn(6, 4, 8, dtype=torch.float64)


@functools.cache
def traced(name: str, mesh: str) -> ModuleSharding:
    module, x = made(name)
    ranks = math.prod(sizes_of(mesh).values())
    return shard_module(module, [x], load_cluster("local", ranks=ranks), mesh, precision="fp32")


@pytest.mark.parametrize("name", rest_is_slow([*_SHORT, *(name for name in MODULES if name not in _SHORT)], 2, 3))
def test_what_is_drawn_is_the_same_in_the_chosen_layouts_and_in_random_ones(name: str):
    found, (module, x) = traced(name, "a=2,b=2"), made(name)
    assert not found.kept_whole
    for one in (found, *(cut_at_random(found, random.Random(seed)) for seed in range(3))):
        errors = {each.name: each.error for each in one.prove(copy.deepcopy(module), [x])}
        assert max(errors.values()) < 1e-6, errors  # alpha dropout has constants in FP32


@pytest.mark.slow
@pytest.mark.parametrize("name", rest_is_slow(["GPT-2", "BERT with padding", "T5", "ViT"], 1, 2))
def test_whole_models_drop_the_same_in_any_cuts(name: str):
    module, inputs = model(name, 2)
    dropouts = [one for one in module.modules() if isinstance(one, nn.Dropout)]
    for one in dropouts:
        one.p = one.p or 0.1
    found = shard_module(module.train(), inputs, load_cluster("local", ranks=4), "a=2,b=2", precision="fp32")
    assert len(found.captured.exported.random) > 4 and not found.kept_whole
    for one in (found, cut_at_random(found, random.Random(1))):
        assert max(each.error for each in one.prove(module, inputs)) < 1e-6


class Numbered:
    """A hook that gives each call of a module a seed of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1
        torch.manual_seed(self.calls)


def on_one_rank(module: nn.Module, sharding: ModuleSharding) -> nn.Module:
    """Let a module compute what was exported, whole."""
    exported = sharding.captured.exported
    part = exported.part([node for _, node, _ in exported.returned()])
    places = [(place, is_buffer) for place, _, is_buffer in exported.returned()]

    class OnOneRank(type(module)):
        def forward(self, x: torch.Tensor) -> Any:
            buffers = {name: one.clone() for name, one in self.named_buffers()}
            arguments, key = dict.fromkeys(exported.arguments, x), new_key(x.device)
            found = exported.values(part, arguments, buffers, key, dict(self.named_parameters()))
            for (place, is_buffer), one in zip(places, found, strict=True):
                if is_buffer:
                    self.get_buffer(place).copy_(one.detach())
            return found[[is_buffer for _, is_buffer in places].index(False)]

    module.__class__ = OnOneRank
    return module


def trained(mesh: str, seed: int, names: Sequence[str]) -> dict[str, float]:
    devices, found = devices_of(mesh), dict[str, float]()
    for name in names:
        (whole, x), sharding = made(name), traced(name, mesh)
        plain, module = on_one_rank(copy.deepcopy(whole), sharding), copy.deepcopy(whole)
        run_on(module, cut_at_random(sharding, random.Random(seed)) if seed else sharding, devices)
        for one in (plain, module):
            one.register_forward_pre_hook(Numbered())
        found[name] = difference(plain, module, [x])
    return found


def held(mesh: str, seed: int, names: Sequence[str]) -> None:
    for found in on_ranks(math.prod(sizes_of(mesh).values()), trained, mesh, seed, names, timeout_s=600):
        assert max(found.values()) < 1e-6, found


@pytest.mark.slow
def test_two_steps_on_four_processes_are_those_of_one():
    held("data=2,model=2", 1, ("dropout", "attention"))  # the others: the slow test below


@pytest.mark.parametrize(
    ("mesh", "seed"), rest_is_slow([("a=3", 3), ("a=2,b=2", 0), ("b=1", 0), ("a=2,b=2", 2), ("a=4", 4)], 0)
)
def test_two_steps_in_layouts_of_all_kinds_are_those_of_one(mesh: str, seed: int):
    held(mesh, seed, tuple(MODULES))


# Each draws from an input of many equal rows what torch draws from it.
ALIKE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": nn.Dropout(0.3),
    "channels": channels,
    "slopes": nn.RReLU(),
    "alpha": nn.AlphaDropout(0.2),
    "drop path": drop_path,
    "gumbel": gumbel,
    "noise": noise,
    "bits and integers": with_probabilities,
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0) * x,
}


class Alone(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.draw = nn.Parameter(torch.ones(())), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x * self.scale)


@pytest.mark.parametrize("name", rest_is_slow([*ALIKE], 2, 3))
def test_what_is_drawn_has_the_distribution_of_torchs_own(name: str):
    """By a test of Kolmogorov and Smirnov; of other calls are other numbers."""
    torch.manual_seed(3)
    module, x = Alone(ALIKE[name]), torch.linspace(-1, 1, 4).expand(5000, 2, 4).contiguous()
    exported = ExportedModule.of(module, [x])
    part = exported.part([node for _, node, _ in exported.returned()])
    first, second = (
        exported.values(part, {"x": x}, {}, torch.tensor(key), dict(module.named_parameters()))[0].detach()
        for key in (1, 2)
    )
    own = module(x).detach()
    assert not torch.equal(first, second)
    for column in range(4):
        one, other = (torch.sort(each[:, 0, column])[0] for each in (first, own))
        points = torch.cat([one, other]).unique()
        gap = torch.searchsorted(one, points, right=True) - torch.searchsorted(other, points, right=True)
        assert float(gap.abs().max()) / 5000 < 2.2 * math.sqrt(2 / 5000), "one in 100,000"


def two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([functional.dropout(x, 0.5), functional.dropout(x, 0.5)])


def test_two_tensors_of_a_call_and_those_of_two_calls_have_nothing_in_common():
    module, x = Alone(two), torch.ones(100, 200)
    exported = ExportedModule.of(module, [x])
    part = exported.part([node for _, node, _ in exported.returned()])
    drawn = [
        one.flatten()
        for key in (5, 6, 5 + 2**32)
        for one in exported.values(part, {"x": x}, {}, torch.tensor(key), {"scale": module.scale})[0].detach()
    ]
    correlations = torch.corrcoef(torch.stack(drawn)) - torch.eye(6)
    assert float(correlations.abs().max()) < 5 / math.sqrt(x.numel())


def off_by_one(kind: Any, sizes: Sequence[int], bounds: Sequence[tuple[int, int]], *others: Any) -> torch.Tensor:
    return random_part(kind, sizes, [(start - bool(start), stop - bool(start)) for start, stop in bounds], *others)


@pytest.mark.slow
def test_a_rank_that_counts_places_wrongly_is_caught():
    replaced = [("autoshard.modules.rewriting.randomness", "random_part", off_by_one)]
    assert max(max(one.values()) for one in on_ranks(4, trained, "a=2,b=2", 1, ["dropout"], replaced=replaced)) > 1e-2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.LSTM(8, 8, 2, dropout=0.5), "lstm draws random numbers"),
        (Drawing(lambda x: x[torch.randperm(x.shape[0])]), "randperm draws random numbers"),
        (Drawing(lambda x: x * torch.randint(2**40, x.shape)), "draws whole numbers from 0 to 1099511627776"),
    ],
)
def test_what_nobody_has_written_by_places_is_refused_by_name(module: nn.Module, says: str):
    with pytest.raises(InputError, match=says):
        shard_module(module, [torch.randn(6, 4, 8)], "local", "a=2,b=2")


def steps(module: nn.Module, x: torch.Tensor, count: int) -> Iterator[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(count):
        optimizer.zero_grad()
        loss = cast(torch.Tensor, module(x)).pow(2).mean()
        loss.backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        yield float(loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach())


def losses(mesh: str, seeds: Sequence[int], folder: str, compile: bool) -> list[float]:
    """Train two steps, save the state and that of the generator, and train two from it with a new module."""
    rank = torch.distributed.get_rank()
    found = list[float]()
    for number in range(2):
        module, x = made("encoder")
        torch.manual_seed(seeds[rank % len(seeds)])  # ranks need not agree
        shard(module, [x], mesh, compile=compile)
        if number:
            saved = cast(Any, torch.load(Path(folder, f"{rank}.pt"), weights_only=False))
            module.load_state_dict(saved["module"])
            torch.set_rng_state(saved["generator"])
        found += steps(module, x, 2)
        torch.save({"module": module.state_dict(), "generator": torch.get_rng_state()}, Path(folder, f"{rank}.pt"))
    return found


@pytest.mark.parametrize("compile", rest_is_slow([False, True], 0, 1))
def test_a_run_goes_on_with_the_numbers_that_it_would_have_drawn(compile: bool, tmp_path: Path):
    """On one rank and on four: keys are those of rank 0's generator."""
    one, four = (
        on_ranks(ranks, losses, mesh, (7, 8), str(tmp_path), compile, timeout_s=600)[0]
        for ranks, mesh in ((1, "a=1"), (4, "a=2,b=2"))
    )
    (uncut,) = on_ranks(1, uninterrupted)
    assert uncut == pytest.approx(one, rel=1e-12) and len({*uncut}) == 4
    assert one == pytest.approx(four, rel=1e-5 if compile else 1e-9)


def uninterrupted() -> list[float]:
    module, x = made("encoder")
    torch.manual_seed(7)
    return [*steps(shard(module, [x], "a=1"), x, 4)]
