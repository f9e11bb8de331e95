"""Text logs of torchtitan, with colours or without: pytorch/torchtitan 00fbaaf (torchtitan/components/metrics.py).

``tps``, once ``wps``, counts the tokens of a data-parallel rank over the seconds and over the ranks that share them,
so that it is of one device. The memory is the most that the allocator reserved since the report before.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from autoshard.imports.logs.lines import LogLine
from autoshard.imports.logs.log import LogReport, RateUnit
from autoshard.imports.logs.text import TextReader, as_number

_STEP = re.compile(
    r"(?<!validate )step:\s*(\d+)\s+loss:.*?memory:\s*([\d.]+)GiB\([\d.]+%\)\s+(?:tps|wps):\s*([\d,]+)\s+\w"
)
_BATCH = re.compile(
    r"local batch size (\d+),(?: global batch size (\d+),)?(?: gradient accumulation steps \d+,)? sequence length (\d+)"
)
_MESH = re.compile(r"Building \d+-D device mesh with (\[[^\]]*\]), (\[[\d, ]*\])")
_MODEL = re.compile(r"Building (\w+) (\w+) with ")
_RECOMPUTE = re.compile(r"Applied (\w+) activation checkpointing")
_CHIP = re.compile(r"CUDA capacity: (.+?) with ([\d.]+)GiB memory")
_TOTAL = re.compile(r"total steps (\d+)")
_DEGREES: Mapping[str, str] = {
    "dp_replicate": "data_parallel_replicate_degree", "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree", "tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree",
    "dp": "data_parallel_shard_degree",
}  # fmt: skip


@dataclass(slots=True)
class TorchtitanReader(TextReader):
    """Reads lines of torchtitan: reports, and what it says at its start of the mesh, the model and the batch."""

    program: ClassVar[str] = "torchtitan"
    configurations: ClassVar[tuple[str, ...]] = ("torchtitan",)
    marks: ClassVar[tuple[str, ...]] = (
        "step:", "device mesh with", "local batch size", "Building ", "activation checkpointing", "torch.compile",
        "CUDA capacity: ",
    )  # fmt: skip

    def take(self, line: LogLine) -> None:
        """Read a line."""
        text = line.text
        if match := _STEP.search(text):
            rank = int(line.rank) if line.rank else None
            self.rate = RateUnit(what="tokens", per_rank=True)
            self.add(line, LogReport(number=int(match[1]), rate=as_number(match[3])))
            if int(match[1]) > 1:
                self.peak(rank, float(match[2]), "reserved", int(match[1]))
        elif match := _MESH.search(text):
            self._mesh(match[1], match[2])
        elif match := _BATCH.search(text):
            local, batch, length = match.groups()
            self.config |= {"training.local_batch_size": int(local), "training.seq_len": int(length)}
            self.config |= {"training.global_batch_size": int(batch)} if batch else {}
            total = _TOTAL.search(text)
            self.num_steps = int(total[1]) if total else self.num_steps
        elif match := _CHIP.search(text):
            self.facts |= {"chip": match[1], "chip_gib": float(match[2])}
        elif match := _MODEL.search(text):
            self.config |= {"model.name": match[1], "model.flavor": match[2]}
        elif match := _RECOMPUTE.search(text):
            self.config["activation_checkpoint.mode"] = match[1]
        elif "with torch.compile" in text and "ompil" in text:
            self.config["compile.enable"] = True

    def _mesh(self, names: str, sizes: str) -> None:
        """Read the mesh; an axis that it does not name has one rank, so that a mesh states them all."""
        try:
            mesh: dict[str, Any] = dict(zip(ast.literal_eval(names), ast.literal_eval(sizes), strict=True))
        except (ValueError, SyntaxError):
            return
        if self.series.steps:  # another run begins
            self.restart()
        ranks = 1
        for size in mesh.values():
            ranks *= int(size)
        if not mesh.keys() <= _DEGREES.keys():  # meshes of experts count ranks twice
            return
        self.facts["cluster.ranks"] = ranks
        degrees = dict.fromkeys(_DEGREES.values(), 1) | {_DEGREES[name]: int(size) for name, size in mesh.items()}
        self.config |= {f"parallelism.{name}": size for name, size in degrees.items()}
