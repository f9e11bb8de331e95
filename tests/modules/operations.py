"""One call of every operation that has a rule, and of some without; lengths that must not be taken for one differ."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Sample = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


def n(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def rows(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, shape)


def torch_call(name: str, *others: Any, result: int | None = None) -> Callable[..., Any]:
    """Return a function that calls one of torch, and gives numbers of floating point."""

    def called(*given: torch.Tensor) -> torch.Tensor:
        found = getattr(torch, name)(*given, *others)
        return (found if result is None else found[result]) * 1.0

    return called


def attention(*shapes: tuple[int, ...], **more: Any) -> Sample:
    return lambda *given: F.scaled_dot_product_attention(*given, **more), tuple(n(*shape) for shape in shapes)


def _losses() -> Mapping[str, Sample]:
    def chance(loss: Callable[..., Any]) -> Sample:
        return lambda x, y: loss(torch.sigmoid(x), torch.sigmoid(y)), (n(4, 6), n(4, 6))

    by_number = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
    found: dict[str, Sample] = {one.__name__: (one, (n(4, 6), n(4, 6))) for one in by_number}
    found["binary_cross_entropy"] = chance(F.binary_cross_entropy)
    found["mse_loss of each"] = lambda x, y: F.mse_loss(x, y, reduction="none"), (n(4, 6), n(4, 6))
    found["mse_loss summed"] = lambda x, y: F.mse_loss(x, y, reduction="sum"), (n(4, 6), n(4, 6))
    labels = rows(4, below=6)
    found["cross_entropy_loss"] = F.cross_entropy, (n(4, 6), labels)
    found["cross_entropy_loss summed"] = lambda x, y: F.cross_entropy(x, y, reduction="sum"), (n(4, 6), labels)
    found["cross_entropy_loss of each"] = lambda x, y: F.cross_entropy(x, y, reduction="none"), (n(4, 6), labels)
    pixels = n(4, 6, 5, 3), rows(4, 5, 3, below=6)
    found["cross_entropy_loss of pixels"] = F.cross_entropy, pixels
    found["cross_entropy_loss of each pixel"] = lambda x, y: F.cross_entropy(x, y, reduction="none"), pixels
    found["kl_div"] = lambda x, y: F.kl_div(x, y, log_target=True, reduction="sum"), (n(4, 6), n(4, 6))
    found["nll_loss_nd"] = lambda x, y: F.nll_loss(x, y, reduction="sum"), (n(4, 6), labels)
    return found


def _over() -> Mapping[str, Sample]:
    x = n(4, 6, 8)
    plain = (
        "amax", "amin", "logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "prod", "argmax",
        "argmin", "argsort", "sum", "mean", "var", "std", "all", "any",
    )  # fmt: skip
    found: dict[str, Sample] = {name: (torch_call(name, 1), (x,)) for name in plain}
    several = ("max", "min", "sort", "median", "cummax", "cummin")
    found |= {name: (torch_call(name, 1, result=0), (x,)) for name in several}
    found |= {name: (torch_call(name, 1, result=1), (x,)) for name in ("var_mean", "std_mean")}
    return found | {
        "sum of all": (torch.sum, (x,)),
        "mean of all": (torch.mean, (x,)),
        "mean of the first": (lambda x: x.mean(0, keepdim=True), (x,)),
        "cat with nothing": (lambda x: torch.cat([x.new_zeros(0), x], 1), (x,)),
        "topk": (lambda x: torch.topk(x, 3, 1)[0], (x,)),
        "max of two": (torch.max, (x, n(6, 8))),
        "differences of all pairs": (lambda x: x[:, :, None] - x[:, None], (n(4, 6),)),
        "norm": (lambda x: torch.linalg.vector_norm(x, dim=2), (x,)),
        "flip": (lambda x: x.flip(1), (x,)),
        "roll": (lambda x: x.roll(2, 1), (x,)),
        "glu": (lambda x: F.glu(x, 2), (x,)),
    }


def _views() -> Mapping[str, Sample]:
    x = n(4, 6, 8)
    return {
        "view": (lambda x: x.view(-1, x.shape[-1]), (x,)),
        "view apart": (lambda x: x.view(*x.shape[:2], 2, -1), (x,)),
        "view otherwise": (lambda x: x.view(x.shape[0] * 2, -1), (x,)),
        "view_as": (lambda x, y: x.view_as(y) * y, (x, n(24, 8))),
        "flatten": (lambda x: x.flatten(1), (x,)),
        "unflatten": (lambda x: x.unflatten(1, (2, 3)), (x,)),
        "transpose": (lambda x: x.transpose(0, 2), (x,)),
        "permute": (lambda x: x.permute(2, 0, 1), (x,)),
        "t": (lambda x: x.t(), (n(4, 6),)),
        "unsqueeze": (lambda x: x.unsqueeze(1), (x,)),
        "squeeze": (lambda x: x.squeeze(1), (n(4, 1, 6),)),
        "expand": (lambda x: x.expand(5, *x.shape) * 1, (n(4, 6),)),
        "broadcast_tensors": (lambda x, y: torch.mul(*torch.broadcast_tensors(x, y)), (n(4, 1), n(4, 6))),
        "repeat_interleave": (lambda x: x.repeat_interleave(3, 1) * 1, (x,)),
        "repeat": (lambda x: x.repeat(2, 1, 3, 1) * 1, (x,)),
        "as_strided": (lambda x: x.as_strided((4, 5, 2, 8), (48, 8, 8, 1)), (x,)),
        "slice": (lambda x: x[:, 1:4], (x,)),
        "slice in turns": (lambda x: x[:, 1::3], (x,)),
        "select": (lambda x: x[:, 2], (x,)),
        "narrow": (lambda x: x.narrow(2, 1, 3), (x,)),
        "split": (lambda x: x.split(2, 1)[1], (x,)),
        "split_with_sizes": (lambda x: x.split([2, 6], 2)[1], (x,)),
        "chunk": (lambda x: x.chunk(2, 2)[0], (x,)),
        "unbind": (lambda x: x.unbind(1)[2], (x,)),
        "cat": (lambda x, y: torch.cat([x, y], 1), (x, n(4, 3, 8))),
        "stack": (lambda x, y: torch.stack([x, y], 1), (x, n(4, 6, 8))),
        "copy": (lambda x: torch.ops.aten.copy(x.new_zeros(3, *x.shape), x), (n(6, 8),)),
        "zeros_like": (lambda x: torch.zeros_like(x) + x, (x,)),
        "new_ones": (lambda x: x.new_ones(x.shape[1:]) + x, (x,)),
        "full_like": (lambda x: torch.full_like(x, 3.0) * x, (x,)),
    }


def _products() -> Mapping[str, Sample]:
    mask = torch.ones(1, 1, 6, 10, dtype=torch.float64).tril()
    heads = (4, 3, 6, 8), (4, 3, 10, 8), (4, 3, 10, 5)
    return {
        "linear": (F.linear, (n(4, 6, 8), n(10, 8))),
        "linear with bias": (F.linear, (n(4, 6, 8), n(10, 8), n(10))),
        "addmm": (torch.addmm, (n(10), n(6, 8), n(8, 10))),
        "baddbmm": (lambda a, x, y: torch.baddbmm(a, x, y, alpha=0.5, beta=2), (n(4, 1, 10), n(4, 6, 8), n(4, 8, 10))),
        "matmul": (torch.matmul, (n(4, 6, 8), n(8, 10))),
        "matmul of many": (torch.matmul, (n(3, 4, 6, 8), n(3, 4, 8, 10))),
        "matmul of a vector": (torch.matmul, (n(4, 6, 8), n(8))),
        "bmm": (torch.bmm, (n(4, 6, 8), n(4, 8, 10))),
        "mm": (torch.mm, (n(6, 8), n(8, 10))),
        "mv": (torch.mv, (n(6, 8), n(8))),
        "dot": (torch.dot, (n(6), n(6))),
        "einsum": (lambda x, y: torch.einsum("bsh,ehf->bsef", x, y), (n(4, 6, 8), n(3, 8, 5))),
        "scaled_dot_product_attention": attention(*heads),
        "attention with a mask": (
            lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
            (*(n(*one) for one in heads), mask),
        ),
        "causal attention": attention((4, 3, 6, 8), (4, 3, 6, 8), (4, 3, 6, 5), is_causal=True),
        "grouped_mm": (
            lambda x, weights, ends: F.grouped_mm(x.bfloat16(), weights.bfloat16(), offs=ends),
            (n(6, 16), n(3, 16, 32), torch.tensor([1, 3, 6], dtype=torch.int32)),
        ),
        "attention in groups": attention((4, 6, 5, 8), (4, 3, 10, 8), (4, 3, 10, 7), enable_gqa=True),
    }  # fmt: skip


def _images() -> Mapping[str, Sample]:
    x, line = n(4, 6, 8, 10), n(4, 6, 8)
    pools = {
        "max_pool1d": (lambda x: F.max_pool1d(x, 2), (line,)),
        "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (line,)),
        "max_pool2d": (lambda x: F.max_pool2d(x, 2), (x,)),
        "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (x,)),
        "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (x,)),
        "upsample_nearest2d": (lambda x: F.interpolate(x, scale_factor=2), (x,)),
        "upsample_bilinear2d": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (x,)),
        "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (n(3, 4, 8, 6, 10),)),
        "tril": (torch.tril, (line,)),
        "triu": (torch.triu, (line,)),
        "pad": (lambda x: F.pad(x, (1, 2)), (x,)),
    }
    return pools | {
        "conv1d": (F.conv1d, (line, n(5, 6, 3))),
        "conv2d": (F.conv2d, (x, n(5, 6, 3, 3), n(5))),
        "conv3d": (F.conv3d, (n(4, 6, 3, 8, 10), n(5, 6, 2, 2, 2))),
        "conv_transpose2d": (F.conv_transpose2d, (x, n(6, 5, 3, 3))),
        "conv1d in groups": (lambda x, w: F.conv1d(x, w, groups=6), (line, n(12, 1, 3))),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (line, n(8), n(8))),
        "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), (line, n(8))),
        "group_norm": (lambda x, w: F.group_norm(x, 3, w), (x, n(6))),
        "weight_norm": (lambda v, g: torch.ops.aten._weight_norm(v, g, 2), (line, n(1, 1, line.shape[2]))),
        "batch_norm": (lambda x, m: F.batch_norm(x, m.detach(), m.detach() ** 2, m, m), (x, n(6))),
        "batch_norm beside a change in place": (
            lambda x, m: torch.ops.aten._native_batch_norm_legit_no_training(
                x, m, m, m.detach(), m.detach() ** 2, 0.1, 1e-5
            )[0],
            (x, n(6)),
        ),
        "gru": (
            lambda x, h, *weights: torch.gru(x, h, weights, False, 1, 0.0, False, False, True)[0],
            (n(4, 6, 8), n(1, 4, 5), n(15, 8), n(15, 5)),
        ),
        "batch_norm in training": (lambda x: F.batch_norm(x, None, None, training=True), (x,)),
    }


def _indexing() -> Mapping[str, Sample]:
    x, places = n(4, 6, 8), rows(5, below=6)
    return {
        "embedding": (lambda w, i: F.embedding(i, w), (n(10, 8), rows(4, 6, below=10))),
        "embedding of one row": (lambda w, i: F.embedding(i, w), (n(1, 8), rows(4, 6, below=1))),
        "embedding with padding": (lambda w, i: F.embedding(i, w, padding_idx=0), (n(10, 8), rows(4, 6, below=10))),
        "embedding by frequency": (
            lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
            (n(10, 8), rows(4, 6, below=10)),
        ),
        "one_hot": (lambda x: F.one_hot(x.argmax(-1), 8) * 1.0, (x,)),
        "index_select": (lambda x, i: x.index_select(1, i), (x, places)),
        "index": (lambda x, i: x[:, i], (x, places)),
        "index of two": (lambda x, i, j: x[:, i, j], (x, rows(3, 5, below=6), rows(5, below=8))),
        "gather": (lambda x, i: x.gather(1, i), (x, rows(4, 5, 8, below=6))),
        "scatter": (
            lambda x, i, y: x.scatter(1, i, y),
            (x, torch.arange(3)[None, :, None].expand(4, 3, 8), n(4, 3, 8)),
        ),
        "scatter_add": (lambda x, i, y: x.scatter_add(1, i, y), (x, rows(4, 3, 8, below=6), n(4, 3, 8))),
        "index_add": (lambda x, i, y: x.index_add(1, i, y), (x, places, n(4, 5, 8))),
        "index_put": (lambda x, i, y: x.index_put((i,), y), (x, torch.tensor([2, 0]), n(2, 6, 8))),
        "select_scatter": (lambda x, y: x.select_scatter(y, 1, 2), (x, n(4, 8))),
        "slice_scatter": (lambda x, y: x.slice_scatter(y, 1, 2, 5), (x, n(4, 3, 8))),
    }


def _pointwise() -> Mapping[str, Sample]:
    x, y = n(4, 6, 8), n(6, 8)
    names = ("exp", "relu", "tanh", "abs", "sign", "isfinite", "clone", "detach", "square", "sigmoid", "erf", "neg")
    found: dict[str, Sample] = {name: (torch_call(name), (x,)) for name in names}
    pairs = ("add", "sub", "mul", "div", "maximum", "minimum", "atan2", "pow", "eq", "logaddexp")
    found |= {name: (torch_call(name), (x, y)) for name in pairs}
    return found | {
        "where": (lambda x, y: torch.where(x > 0, x, y), (x, y)),
        "masked_fill": (lambda x, y: x.masked_fill(y > 0, 2.0), (x, y)),
        "clamp": (lambda x: x.clamp(-1, 1), (x,)),
        "to": (lambda x: x.to(torch.float32), (x,)),
        "gelu": (F.gelu, (x,)),
        "silu": (F.silu, (x,)),
        "softplus": (F.softplus, (x,)),
        "lerp": (torch.lerp, (x, n(4, 6, 8), n(8))),
        "fill": (lambda x, y: torch.ops.aten.fill(x, y) * x, (x, n())),
    }


def samples() -> Mapping[str, Sample]:
    torch.manual_seed(0)
    parts = (_views(), _products(), _over(), _losses(), _images(), _indexing(), _pointwise())
    return {name: sample for part in parts for name, sample in part.items()}
