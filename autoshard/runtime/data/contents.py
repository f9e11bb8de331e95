"""What the sets of a run hold, as far as some spots of each show: between starts, and between the ranks of one."""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.runtime.data.batches import SampleSource
from autoshard.runtime.data.functions import MixedData
from autoshard.runtime.data.mixture import DataMixture

Sums = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetContents:
    """How many tokens or samples each set has, by which samples are numbered, and a checksum of some of its tokens.

    What a user's functions make has no checksum: they may draw. Of data that is drawn nothing is noted.
    """

    sizes: Sums = ()
    checksums: Sums = ()

    @classmethod
    def of(cls, source: SampleSource) -> "SetContents":
        """Look into the sets of a source, which takes milliseconds for any size."""
        if isinstance(source, DataMixture):
            streams = [cut_stream.stream for cut_stream in source.sets]
            return cls(
                sizes=tuple((stream.name, stream.num_tokens) for stream in streams),
                checksums=tuple((stream.name, stream.checksum()) for stream in streams),
            )
        sets = source.sets if isinstance(source, MixedData) else ()
        return cls(sizes=tuple((data_set.name, len(data_set)) for data_set in sets))

    def differing(self, elsewhere: "SetContents") -> list[str]:
        """Name the sets of other contents elsewhere under the same name."""
        pairs = (self.sizes, elsewhere.sizes), (self.checksums, elsewhere.checksums)
        return sorted({name for here, there in pairs for name, value in there if dict(here).get(name, value) != value})

    def notes(self, now: "SetContents") -> list[str]:
        """Say how a run goes on that has read these sets, and reads those of now.

        Samples are numbered by sizes, and sets by their paths: copies elsewhere may stand in another order.
        """
        was = dict(self.sizes)
        drawn = "Its samples come in another order: some of them come again before the rest was seen"
        begin, curve = "changed since the last start:", "The curve is no longer that of one set"
        resized = [
            f"{begin} {name} had {was[name]:,} tokens or samples, now {size:,}. {drawn}"
            for name, size in now.sizes
            if was.get(name, size) != size
        ]
        if resized or not self.sizes:
            return resized
        if _values(self.sizes) != _values(now.sizes):
            return [f"{begin} the sets are others, or their paths have another order. {drawn}"]
        places = zip(_values(self.checksums), now.checksums, strict=False)  # as sizes: copies may have other names
        names = [name for was_there, (name, checksum) in places if checksum != was_there]
        return [f"{begin} {name} holds other tokens, though as many. {curve}" for name in names]


def refuse_other_contents(contents: SetContents, of_first: SetContents, fails: Callable[[str], Exception]) -> None:
    """Refuse a rank that reads other tokens than the first one under the same name: a copy on its node is old."""
    if names := of_first.differing(contents):
        what = f"{', '.join(names)} holds other tokens on {socket.gethostname()} than on the node of rank 0"
        raise fails(f"{what}. Copy it there again, or name a folder that all nodes share")


def _values(sums: Sequence[tuple[str, int]]) -> list[int]:
    return [value for _, value in sums]
