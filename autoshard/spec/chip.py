"""One accelerator package as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.errors import nearest, require
from autoshard.spec.sources import source_checks
from autoshard.spec.workload import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator package, with a source for every number."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    matrix_flops_per_s: Mapping[str, float] = field(hash=False)  # dense peak of the whole chip, by dtype
    vector_flops_per_s: float  # elementwise operations
    matrix_tile: int = 1  # rows and columns that the matrix unit works on at once, full or not
    sources: Mapping[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        """Refuse impossible numbers and numbers without a source."""
        rates = {f"matrix_flops_per_s.{dtype}": rate for dtype, rate in self.matrix_flops_per_s.items()}
        numbers: dict[str, float] = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            "vector_flops_per_s": self.vector_flops_per_s,
            "matrix_tile": self.matrix_tile,
            **rates,
        }
        known = list(DTYPE_BYTES)
        require(
            (bool(self.name.strip()), "name", "must not be empty"),
            (bool(rates), "matrix_flops_per_s", "must give the rate of at least one dtype"),
            *(
                (dtype in known, f"matrix_flops_per_s.{dtype}", f"not a dtype. {nearest(dtype, known)}")
                for dtype in self.matrix_flops_per_s
            ),
            *((number > 0, name, f"must be positive, not {number}") for name, number in numbers.items()),
            *source_checks([name for name in numbers if name != "matrix_tile" or self.matrix_tile > 1], self.sources),
        )
