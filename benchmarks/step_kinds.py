"""Classification of kernels by kind of work, from their name and from the operators that launched them.

Kernel names are not sufficient: projections and Muon's iteration use the same matmul kernels, and compiled element-wise
kernels have similar names. A kernel is therefore classified by its name and by the names of the operators and
annotations that enclose its launch on the host. The first matching rule decides. A kernel that matches no rule is
`unclassified` and is shown by name, so that a new kernel is not misclassified unnoticed.
"""

import re
from dataclasses import dataclass

OPTIMIZER_MARK = "deskside: optimizer"  # the annotation around clipping and update

KINDS = {
    "gemm": "matrix products",
    "attention": "attention",
    "elementwise": "norm, rope, activation",
    "loss": "loss (no products)",
    "optimizer": "optimizer",
    "quantisation": "quantization",
    "memory": "casts, sums, copies",
    "embedding": "embedding",
    "host": "framework (CPU only)",
    "unclassified": "unclassified",
}


@dataclass(frozen=True)
class Rule:
    """A rule: the kind of a kernel with a matching name.

    where: "name" matches the kernel's name; "inside" also matches the names of enclosing operators and annotations.
    """

    kind: str
    where: str
    pattern: re.Pattern[str]


def _rule(kind: str, where: str, pattern: str) -> Rule:
    return Rule(kind, where, re.compile(pattern, re.IGNORECASE))


# Names of compiled kernels list all their fused operators, which may include names of matmuls.
_COMPILED = r"^triton_(poi|red|per|mul|for)_fused"
_ATEN_ELEMENTWISE = (
    "add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|square|exp|log|tanh|sigmoid|silu|gelu|relu|threshold|sum|mean|amax|max|"
    "cat|stack|where|clamp|rms_norm|native_layer_norm|layer_norm|eq|ge|gt|le|lt|ne|bitwise_and|sigmoid_backward|"
    "silu_backward|gelu_backward|tanh_backward|threshold_backward|native_layer_norm_backward|_fused_rms_norm|"
    "_fused_rms_norm_backward|bitwise_not|bitwise_or|__or__|__and__|isfinite|all|any|abs|reciprocal|maximum|minimum|linalg_vector_norm|var_mean"
)
# Operators that only emulated formats need.
_ATEN_ROUNDING = (
    "floor|ceil|round|trunc|signbit|sign|copysign|ldexp|frexp|nextafter|uniform|rand|randint|random|bernoulli|"
    "__lshift__|__rshift__|bitwise_left_shift|bitwise_right_shift|log2|exp2|remainder|sgn"
)
_ATEN_MEMORY = (
    "copy|clone|to|_to_copy|contiguous|zeros|zeros_like|zero|fill|full|full_like|ones|ones_like|empty|empty_like|"
    "empty_strided|new_empty|new_zeros|resize|view|reshape|_reshape_alias|_unsafe_view|t|transpose|permute|expand|"
    "as_strided|select|slice|split|split_with_sizes|chunk|unsqueeze|squeeze|flatten|unflatten|detach|alias|unbind|"
    "narrow|slice_backward|select_backward|expand_as|view_as|arange|lift_fresh|result_type|item|_local_scalar_dense|"
    "is_nonzero|ones_like|numpy_T|matrix_H|mT|broadcast_tensors|size|type_as|resolve_conj|resolve_neg|promote_types|repeat|unfold|scalar_tensor|tile"
)

RULES = (
    _rule("optimizer", "inside", f"^{OPTIMIZER_MARK}$"),
    _rule("optimizer", "name", r"FusedAdam|multi_tensor_apply|newton_schulz"),
    _rule(
        "attention",
        "inside",
        r"^aten::_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention)"
        r"|flash_?attn|flex_attention|varlen_attn",
    ),
    _rule(
        "attention",
        "name",
        rf"(?!{_COMPILED})(^.*)(fmha|sdpa|flash_?(fwd|bwd|attn|attention)|flex_attention|cudnn::fusion)",
    ),
    _rule(
        "gemm",
        "name",
        r"^(?!triton_(poi|red|per|mul|for)_fused).*"
        r"(gem[mv]|nvjet|xmma|cublas|split_?k|cutlass.*(tensorop|sm\d+)|scaled_mm|grouped_mm|matmul|^triton_tem_fused"
        r"|^grouped_weight_gradient$|^gathered_gated$|^aten::(mm|bmm|addmm|baddbmm|addbmm|linear|einsum)$|^mkldnn|sgemm|wgmma)",
    ),
    # The routing of tokens to experts, and their rows.
    _rule("elementwise", "name", r"^(choose|offsets|place|route_at_once|route_backward|dispatch|combine)$"),
    _rule("loss", "inside", r"cross_?entropy|nll_loss"),
    _rule("loss", "name", r"cross_?entropy|log_?softmax|logsumexp|nll_?loss|^loss_and_grad$"),
    # Quantization that is fused into the kernel that produces the tensor counts as that kernel's work.
    _rule(
        "elementwise",
        "name",
        rf"^(?!{_COMPILED[1:]}).*(norm|rope|rotary|gated|silu|swiglu|activat|column_sums)",
    ),
    _rule(
        "quantisation",
        "name",
        r"quant|amax|fp8|e4m3|e5m2|float8|fp4|hadamard|^(turn|transpose(_rows)?|scale_of_experts)$|^cast_(both|rows|columns)$",
    ),
    _rule("quantisation", "name", rf"^aten::({_ATEN_ROUNDING})_?$"),
    _rule("embedding", "inside", r"embedding|index_?select|vectorized_gather"),
    _rule("memory", "inside", r"AccumulateGrad"),
    _rule(
        "memory",
        "name",
        r"^triton_poi_fused(__to_copy|_clone|_t|_transpose|_view|_permute|_zeros|_zeros_like|_full)+_\d+$"
        r"|copy_kernel|direct_copy|CatArrayBatchedCopy|FillFunctor|Memcpy|Memset|CUDAFunctor(OnSelf)?_add<float>"
        rf"|^(aten::)?({_ATEN_MEMORY})_?$",
    ),
    _rule(
        "elementwise",
        "name",
        rf"{_COMPILED}|elementwise_kernel|reduce_kernel|^aten::({_ATEN_ELEMENTWISE})_?$|indexing_backward|index_put",
    ),
)


def kind_of(name: str, inside: tuple[str, ...], operator: bool = False) -> str:
    """Return a key of `KINDS` for a kernel, or for an operator on a CPU, given the operators that enclose its launch.

    operator: True for an operator on a CPU. Those without `aten::` that match no rule are entries of autograd, which
    count as framework time.
    """
    for rule in RULES:
        names = (name,) if rule.where == "name" else (name, *inside)
        if any(rule.pattern.search(candidate) for candidate in names):
            return rule.kind
    return "host" if operator and not name.startswith("aten::") else "unclassified"
