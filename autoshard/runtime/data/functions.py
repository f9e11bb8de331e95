"""Samples that are no tokens: of data sets that a user's functions make, or drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from autoshard.errors import Fault, InputError, RunFailed, require
from autoshard.extensions import user_function
from autoshard.graph.op import Array
from autoshard.plan.code import DataArgument
from autoshard.runtime.data.batches import Samples
from autoshard.runtime.data.mixture import WeightTree, sample_places

_HOW = "write FILE.py:FUNCTION, a function that returns a data set: len(data), and data[k] with the tensors of sample k"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnData:
    """A source that needs no files."""

    arguments: tuple[DataArgument, ...]
    seq_len: int
    seed: int

    def samples(self, first: int, count: int) -> Samples:
        """Draw each sample from a generator of its own."""
        generators = [np.random.default_rng((self.seed, 3, number)) for number in range(first, first + count)]
        data = {
            argument.name: np.stack([argument.drawn(generator) for generator in generators])
            for argument in self.arguments
        }
        return _samples(data, count, self.seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSet:
    """A data set of a user's function: what it returned, under the name that the recipe has."""

    name: str
    content: Any
    arguments: tuple[DataArgument, ...]

    @classmethod
    def opened(cls, name: str, arguments: tuple[DataArgument, ...]) -> "MapSet":
        """Call the function, and read the first sample."""
        require((":" in name, name, f"holds tokens or is no data set; samples bring tensors: {_HOW}"))
        function = user_function(name, name)
        try:
            content = function()
            length = len(content)
        except Exception as error:
            raise InputError.of(name, f"raised {type(error).__name__}: {error}; {_HOW}") from error
        require((length > 0, name, "holds no sample"))
        data_set = cls(name=name, content=content, arguments=arguments)
        try:
            data_set.sample(0)
        except RunFailed as error:
            raise InputError.of(name, str(error).removeprefix(f"{name}: ")) from error
        return data_set

    def __len__(self) -> int:
        return len(self.content)

    def sample(self, number: int) -> Mapping[str, Array]:
        """Return the arrays of a sample by argument."""
        try:
            sample = self.content[number]
        except Exception as error:
            raise RunFailed(f"{self.name}: sample {number}: {type(error).__name__}: {error}") from error
        values = self._by_name(number, sample)
        return {argument.name: self._array(number, argument, values[argument.name]) for argument in self.arguments}

    def _by_name(self, number: int, sample: Any) -> Mapping[str, Any]:
        names = [argument.name for argument in self.arguments]
        if isinstance(sample, tuple | list) and len(cast(Sequence[Any], sample)) == len(names):
            return dict(zip(names, cast(Sequence[Any], sample), strict=True))
        lost = [name for name in names if not isinstance(sample, Mapping) or name not in sample]
        if lost:
            forms = f"a mapping with {', '.join(names)}, or a tuple of {len(names)} in this order"
            raise RunFailed(f"{self.name}: sample {number} must be {forms}; it has no {', '.join(lost)}")
        return cast(Mapping[str, Any], sample)

    def _array(self, number: int, argument: DataArgument, value: Any) -> Array:
        try:
            array = np.asarray(value)
        except Exception as error:  # of tensors on another device, or with a gradient
            raise RunFailed(f"{self.name}: sample {number}: {argument.name}: {error}") from error
        if array.shape != argument.shape or array.dtype.kind not in "biuf":
            due = f"and the plan has {list(argument.shape)} of {argument.dtype}"
            what = f"{argument.name} is {list(array.shape)} of {array.dtype}"
            raise RunFailed(f"{self.name}: sample {number}: {what}, {due}")
        return array.astype(_format(argument))


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedData:
    """A source of samples from several data sets, in another order in each epoch."""

    sets: tuple[MapSet, ...]
    shares: WeightTree
    seq_len: int
    seed: int

    @classmethod
    def opened(
        cls, weights: Mapping[str, float], arguments: tuple[DataArgument, ...], seq_len: int, seed: int
    ) -> "MixedData":
        """Open all sets; raise one error with every fault."""
        faults, sets = list[Fault](), list[MapSet]()
        for name in sorted(weights):  # a file may list them in any order
            try:
                sets.append(MapSet.opened(name, arguments))
            except InputError as error:
                faults += error.faults
        if faults:
            raise InputError(faults)
        shares = WeightTree.of([weights[data_set.name] for data_set in sets])
        return cls(sets=tuple(sets), shares=shares, seq_len=seq_len, seed=seed)

    def samples(self, first: int, count: int) -> Samples:
        """Read the samples of these numbers."""
        places = sample_places(self.shares, [len(data_set) for data_set in self.sets], self.seed, (first, count))
        read = [self.sets[which].sample(number) for which, number in zip(*places, strict=True)]
        data = {name: np.stack([sample[name] for sample in read]) for name in read[0]}
        return _samples(data, count, self.seq_len)


def _samples(data: Mapping[str, Array], count: int, seq_len: int) -> Samples:
    """Return samples whose positions count as tokens, all of them."""
    return Samples(
        tokens=np.zeros((count, seq_len + 1), np.int64), counted=np.ones((count, seq_len), np.bool_),
        document_starts=np.zeros((count, seq_len), np.int64), data=data,
    )  # fmt: skip


def _format(argument: DataArgument) -> type:
    """Return the format in which samples hold an argument; the engine turns it into that of the plan."""
    return np.int64 if argument.is_whole else np.bool_ if argument.dtype == "bool" else np.float32
