"""What operations of torch do to dims: which positions they read alike, which they make, and which they need whole."""

from collections.abc import Callable, Mapping

from autoshard.modules.nodes import Node, is_repeated
from autoshard.modules.rules import images, indexing, norms, products, recurrent, reductions, strides, views
from autoshard.modules.rules.reader import Reader

Rule = Callable[[Reader, Node], None]
_BY_RULE: Mapping[Rule, tuple[str, ...]] = {
    views.reshape: ("view", "view_as", "reshape", "reshape_as", "_unsafe_view", "flatten", "unflatten"),
    views.transposed: ("transpose", "permute", "t", "numpy_T", "mT"),
    views.squeezed: ("unsqueeze", "squeeze"),
    views.expanded: ("expand", "expand_as", "broadcast_to", "broadcast_tensors"),
    views.repeated: ("repeat_interleave", "repeat"),
    views.copied: ("copy",),
    views.full_tensor: (
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
    ),
    strides.strided: ("as_strided", "as_strided_scatter"),
    views.sliced: ("slice", "select", "narrow"),
    views.split_axis: ("split", "split_with_sizes", "chunk", "unbind"),
    views.concatenated: ("cat", "stack"),
    products.linear: ("linear",),
    products.addmm: ("addmm", "baddbmm"),
    products.matmul: ("matmul", "bmm", "mm", "mv", "dot"),
    products.einsum: ("einsum",),
    products.grouped: ("_grouped_mm", "transformers::grouped_mm_fallback"),  # for what torch's kernel does not take
    products.attention: ("scaled_dot_product_attention",),
    reductions.over: (
        "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "logsumexp", "softmax", "log_softmax",
        "cumsum", "cumprod", "logcumsumexp", "norm", "linalg_vector_norm", "prod", "all", "any", "flip", "roll",
        "argmax", "argmin", "glu", "topk", "sort", "argsort", "median", "cummax", "cummin",
    ),
    reductions.total: ("sum", "mean"),
    reductions.loss_of_classes: ("cross_entropy_loss", "nll_loss_nd", "nll_loss"),
    reductions.loss_of_each: (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "kl_div",
    ),
    norms.layer_norm: ("layer_norm", "rms_norm"),
    norms.weight_norm: ("_weight_norm",),
    norms.group_norm: ("group_norm",),
    norms.batch_norm: (
        "batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
    ),
    images.convolution: tuple(f"conv{turned}{count}d" for turned in ("", "_transpose") for count in (1, 2, 3)),
    images.last_axes_whole: (
        "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
        "adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d",
        "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
        "upsample_trilinear3d", "tril", "triu", "pixel_shuffle", "pixel_unshuffle",
    ),
    images.padded: ("pad", "constant_pad_nd"),
    recurrent.recurrent: ("lstm", "gru", "rnn_tanh", "rnn_relu"),
    indexing.embedding: ("embedding",),
    indexing.one_hot: ("one_hot",),
    indexing.take_rows: ("index_select", "index"),
    indexing.along: ("gather", "scatter", "scatter_add", "scatter_reduce"),
    indexing.put: ("index_add", "index_put"),
    indexing.put_part: ("select_scatter", "slice_scatter"),
}  # fmt: skip
RULES: Mapping[str, Rule] = {name: rule for rule, names in _BY_RULE.items() for name in names}
_BY_PLACE: frozenset[Rule] = frozenset({  # which read a tensor of its own in each place
    products.linear, images.convolution, reductions.loss_of_each, reductions.loss_of_classes, indexing.put,
    indexing.put_part,
})  # fmt: skip


def rule_of(name: str, node: Node) -> Rule | None:
    """Return the rule of an operation; what reads one tensor in two places may need it whole."""
    rule = RULES.get(name)
    return _whole if rule in _BY_PLACE and is_repeated(node) else rule


def _whole(reader: Reader, node: Node) -> None:
    reader.whole(node)
