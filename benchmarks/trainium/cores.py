"""One core of a Trainium as a program sees it: through torch_xla, through TorchNeuron, or as shapes in a dry run."""

# pyright: basic
# Neuron's packages are not installed where types are checked.

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from autoshard.spec.cluster import EngineName
from benchmarks.trainium.machine import Machine

Work = Callable[..., Any]  # of tensors on the core
_TIMES, _WARM_UP = 20, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """Where work is timed."""

    device: str
    engine: EngineName
    lnc: int

    def make(self, *shape: int, dtype: torch.dtype = torch.bfloat16, learns: bool = False) -> Tensor:
        """Return a tensor of random numbers, made on the host, so that making it is no graph."""
        if self.device == "meta":
            return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=learns)
        made = torch.randn(*shape, dtype=torch.float32).to(dtype).to(self.device)
        return made.requires_grad_(learns)

    def seconds(self, work: Work, inputs: Sequence[Tensor], times: int = _TIMES) -> float | None:
        """Return the seconds of a piece of work, run again and again without waiting between; None in a dry run."""
        if self.device == "meta":
            work(*inputs)
            return None
        call = torch.compile(work, backend="neuron") if self.engine == "torch" else work
        for _ in range(_WARM_UP):
            self._end_graph(call(*inputs))
        self.wait()
        start_s = time.perf_counter()
        for _ in range(times):
            self._end_graph(call(*inputs))
        self.wait()
        return (time.perf_counter() - start_s) / times

    def _end_graph(self, _: Any) -> None:
        if self.engine == "nxd":
            importlib.import_module("torch_xla").sync()

    def wait(self) -> None:
        """Wait until the core has done what it was asked to."""
        if self.engine == "nxd":
            importlib.import_module("torch_xla.core.xla_model").wait_device_ops()
        else:
            torch.accelerator.synchronize()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally, [batch, seq, heads, 1, head_dim], as the engine does: in NxD's kernel where there is one."""
        if self.device != "meta" and self.engine == "nxd":
            model: Any = importlib.import_module("autoshard.engine.nxd.model")
            named = importlib.import_module("autoshard.engine.nxd.library").named
            return model.flash_attend(named("nki_flash_attn_func"), self.lnc, query, key, value)
        queries, keys, values = (one.transpose(1, 2) for one in (query.flatten(2, 3), key, value))
        return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


def core_of(machine: Machine) -> Core:
    """Return a core of this machine; a dry run has shapes without numbers."""
    engine, lnc = machine.engines[0], machine.lncs[0] or 1
    if machine.dry:
        return Core(device="meta", engine=engine, lnc=lnc)
    device = "neuron" if engine == "torch" else str(importlib.import_module("torch_xla.core.xla_model").xla_device())
    return Core(device=device, engine=engine, lnc=lnc)
