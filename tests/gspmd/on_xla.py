"""Run the layer under GSPMD on virtual CPU devices, laid out as cases say; for an environment with torch-xla.

``record.py`` starts it with a folder that has ``cases.json`` and ``given.npz``. It leaves XLA's own dump of the program
of every case there, partitioned, and in ``found.npz`` the results and gradients of those that are not only compiled. It
imports nothing of autoshard.
"""

# pyright: basic, reportMissingImports=false
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime
from layer import Layer
from torch.overrides import TorchFunctionMode


class LaidOut(torch.autograd.Function):
    """A tensor laid out as a partition spec says, and its gradient as another says; None leaves it to GSPMD."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Any, spec: Any, gradient_spec: Any) -> torch.Tensor:
        ctx.mesh, ctx.spec = mesh, gradient_spec
        return annotated(x, mesh, spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return annotated(gradient, ctx.mesh, ctx.spec), None, None, None


def annotated(x: torch.Tensor, mesh: Any, spec: Any) -> torch.Tensor:
    x = x.clone()
    if spec is not None:
        spmd.annotate_custom_sharding(x, mesh, tuple(tuple(axes) or None for axes in spec))
    return x


class AsEinsum(TorchFunctionMode):
    """Products by einsum: torch-xla otherwise makes one axis of batch and sequence, which GSPMD cannot cut both of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            return torch.einsum("bsi,oi->bso", args[0], args[1])
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            return torch.einsum("bkgsi,bkio->bkgso", args[0], args[1].squeeze(2))
        return func(*args, **(kwargs or {}))


def traced(case: dict[str, Any], given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the result and the gradients as torch-xla records them: nothing has run yet."""
    sizes = tuple(case["mesh"].values())
    mesh = spmd.Mesh(np.arange(math.prod(sizes)), sizes, tuple(case["mesh"]))
    with torch.device("meta"):
        layer = Layer(**case["sizes"])

    def before(module: Any, args: Any) -> Any:
        return tuple(LaidOut.apply(x, mesh, *specs) for x, specs in zip(args, module.specs["reads"], strict=True))

    def after(module: Any, args: Any, made: Any) -> Any:
        return LaidOut.apply(made, mesh, *module.specs["makes"])

    for path, specs in case["operations"].items():
        module = layer.get_submodule(path)
        module.specs = specs
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    leaves = {name: tensor.requires_grad_(name in case["wanted"]) for name, tensor in given.items()}
    arrived: Any = {name: LaidOut.apply(leaves[name], mesh, spec, spec) for name, spec in case["specs"].items()}
    weights = {name: arrived[name] for name, _ in layer.named_parameters()}
    with AsEinsum():
        made = torch.func.functional_call(layer, weights, tuple(arrived[name] for name in case["inputs"]))
        made = LaidOut.apply(made, mesh, case["leaves"], case["leaves"])
        gradients = torch.autograd.grad(made, [leaves[name] for name in case["wanted"]], arrived["seed"])
    return {"result": made, **dict(zip(case["wanted"], gradients, strict=True))}


def main(folder: Path) -> None:
    torch_xla.runtime.use_spmd()
    device, dump = torch_xla.device(), folder / "dump"
    arrays: dict[str, np.ndarray] = {}
    given = np.load(folder / "given.npz")
    for number, (name, case) in enumerate(json.loads((folder / "cases.json").read_text(encoding="utf-8")).items()):
        before = {*dump.iterdir()}
        if case["compiled_only"]:  # its inputs are numbers that are never drawn, because nobody has the memory
            own = {key: torch.rand(shape, device=device, dtype=torch.float64) for key, shape in case["shapes"].items()}
            torch_xla._XLAC._xla_warm_up_cache(list(traced(case, own).values()), [])
        else:
            own = {key: torch.from_numpy(given[f"{name}/{key}"]).to(device) for key in case["shapes"]}
            found = traced(case, own)
            torch_xla.sync()
            arrays |= {f"{name}/{key}": tensor.detach().cpu().numpy() for key, tensor in found.items()}
        new = (path for path in {*dump.iterdir()} - before if "after_spmd-partitioning" in path.name)
        programs = [path.read_text(encoding="utf-8") for path in new]
        (folder / f"{number}.hlo").write_text(max(programs, key=len), encoding="utf-8")  # others move numbers
    np.savez(folder / "found.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
