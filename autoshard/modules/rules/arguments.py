"""Which arguments of operations the rules understand; an operation with any other is read as one that nobody knows."""

from collections.abc import Mapping
from typing import Any

import torch.fx

from autoshard.errors import InputError
from autoshard.modules.nodes import Node, argument, line_of

_ONE, _SHIFTED = "self", "input weight bias"
_OVER = "self dim keepdim dtype"
_SPREAD = "self dim unbiased correction keepdim"
_POOLED = "self kernel_size stride padding ceil_mode"
_SCALED = "self input output_size scale_factors"
_CONVOLVED = "input weight bias stride padding dilation groups"
_NET = "input hx params has_biases num_layers dropout train bidirectional batch_first data batch_sizes"
_STATISTICS = "input weight bias running_mean running_var momentum eps"
_BY_ARGUMENTS = {
    _ONE: "alias clone contiguous lift_fresh_copy detach t numpy_T mT adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d",
    "self other": "type_as to expand_as view_as reshape_as matmul",
    "self dtype": "to _to_copy zeros_like ones_like empty_like",
    "input p train": "dropout feature_dropout",
    "self size": "view _unsafe_view expand broadcast_to",
    "self size dtype": "new_zeros new_ones new_empty",
    "self size fill_value dtype": "new_full",
    "self fill_value dtype": "full_like",
    "self shape": "reshape",
    "self size stride storage_offset": "as_strided as_strided_scatter",
    "self start_dim end_dim": "flatten",
    "self dim sizes": "unflatten",
    "self dim0 dim1": "transpose",
    "v g dim": "_weight_norm",
    "self dims": "permute flip",
    "self dim": "squeeze unsqueeze unbind argsort logcumsumexp cummax cummin glu",
    "tensors": "broadcast_tensors",
    "tensors dim": "cat stack",
    "self repeats dim output_size": "repeat_interleave",
    "self repeats": "repeat",
    "self src": "copy",
    "self value": "fill",
    "self dim start end step": "slice",
    "self dim start length": "narrow",
    "self split_size split_sizes dim": "split",
    "self split_sizes dim": "split_with_sizes",
    "self chunks dim": "chunk",
    _SHIFTED: "linear",
    "self mat1 mat2 beta alpha": "addmm",
    "self batch1 batch2 beta alpha": "baddbmm",
    "self mat2": "bmm mm",
    "self mat2 offs": "_grouped_mm",
    "self vec": "mv",
    "self tensor": "dot",
    "equation tensors path": "einsum",
    "query key value attn_mask dropout_p is_causal scale enable_gqa": "scaled_dot_product_attention",
    "self dim keepdim": "amax amin logsumexp all any argmax argmin median",
    "self dim keepdim other": "max min",
    _SPREAD: "var std var_mean std_mean",
    "self dim dtype": "softmax log_softmax cumsum cumprod",
    _OVER: "prod sum mean",
    f"{_OVER} p": "norm",
    f"{_OVER} ord": "linalg_vector_norm",
    "self shifts dims": "roll",
    "self k dim largest sorted": "topk",
    "self stable dim descending": "sort argsort",
    "self target weight reduction ignore_index label_smoothing": "cross_entropy_loss",
    "self target weight reduction ignore_index": "nll_loss_nd nll_loss",
    "self target reduction": "mse_loss l1_loss",
    "self target reduction log_target": "kl_div",
    "self target reduction beta": "smooth_l1_loss",
    "self target reduction delta": "huber_loss",
    "self target weight reduction": "binary_cross_entropy",
    "self target weight pos_weight reduction": "binary_cross_entropy_with_logits",
    f"{_SHIFTED} normalized_shape eps": "layer_norm",
    "input weight normalized_shape eps": "rms_norm",
    f"{_SHIFTED} num_groups eps": "group_norm",
    f"{_STATISTICS} training": "batch_norm _native_batch_norm_legit_functional",
    _STATISTICS: "_native_batch_norm_legit_no_training",
    _CONVOLVED: "conv1d conv2d conv3d",
    f"{_CONVOLVED} output_padding": "conv_transpose1d conv_transpose2d conv_transpose3d",
    f"{_POOLED} dilation": "max_pool1d max_pool2d max_pool3d",
    f"{_POOLED} count_include_pad": "avg_pool1d",
    f"{_POOLED} count_include_pad divisor_override": "avg_pool2d avg_pool3d",
    "self output_size": "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
    f"{_SCALED} scales": "upsample_nearest1d upsample_linear1d",
    f"{_SCALED} scales_h scales_w": "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d",
    f"{_SCALED} scales_d scales_h scales_w": "upsample_nearest3d upsample_trilinear3d",
    "align_corners": "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d",
    "self diagonal": "tril triu",
    "self upscale_factor": "pixel_shuffle",
    "self downscale_factor": "pixel_unshuffle",
    "self pad value": "pad constant_pad_nd",
    "mode": "pad",
    _NET: "lstm gru rnn_tanh rnn_relu",
    "weight indices padding_idx scale_grad_by_freq": "embedding",
    "self num_classes": "one_hot",
    "self indices": "index",
    "self dim index": "select index_select gather scatter scatter_add scatter_reduce",
    "src": "scatter scatter_add scatter_reduce as_strided_scatter",
    "reduce": "scatter scatter_reduce",
    "value": "scatter",
    "include_self": "scatter_reduce",
    "self dim index source alpha": "index_add",
    "self indices values accumulate": "index_put",
    "self src dim index": "select_scatter",
    "self src dim start end step": "slice_scatter",
}  # fmt: skip
READ: Mapping[str, frozenset[str]] = {
    name: frozenset(
        " ".join(arguments for arguments, operations in _BY_ARGUMENTS.items() if name in operations.split()).split()
    )
    for names in _BY_ARGUMENTS.values()
    for name in names.split()
}
# Where and how numbers lie, and which function of a library computes them: no number depends on it.
PLACING = frozenset({
    "layout", "device", "pin_memory", "non_blocking", "copy", "memory_format", "implicit", "cudnn_enable",
    "cudnn_enabled",
})  # fmt: skip
SPARSE = frozenset({"sparse", "sparse_grad"})


def understands(node: Node) -> bool:
    """Say whether the rule of an operation knows all arguments that are not at their defaults.

    Sparse gradients are refused.
    """
    name, schema = node.target._opname, node.target._schema
    understood = READ.get(name)
    if understood is None:  # a pointwise operation, which is given all of them
        return True
    changed = {parameter.name for parameter in schema.arguments if _is_changed(node, parameter)}
    if changed & SPARSE:
        raise InputError.of(line_of(node), f"{name} makes a sparse gradient, which is not supported; leave sparse out")
    return changed <= understood | PLACING


def _is_changed(node: Node, parameter: Any) -> bool:
    value = argument(node, parameter.name)
    return not parameter.has_default_value() or isinstance(value, torch.fx.Node) or value != parameter.default_value
