"""One block in few kernels, for steps of decoding and for prompts.

With one new token per row a kernel takes a few microseconds, whatever it does: the step is as long as its list of
kernels. A block is written here in ten of them: add + norm, product, QK-norm + RoPE + write into the cache, attention
and its join, product; add + norm, product, activation, product. The weights, and the numbers up to rounding, are those
of the model as it is written, which takes over for the halves that are not covered. The first tokens of all rows
attend among themselves, and are only written into the cache.
"""

from torch import Tensor

from deskside.config.dimensions import uncovered_reason
from deskside.kernels import fused
from deskside.kernels.decode import qk_norm_rope_into_cache
from deskside.kernels.fused import QkvLayout
from deskside.model.block import MLP, Attention, Block, CachedBlocks, LayerCache
from deskside.model.transformer import Transformer
from deskside.ops.composite import AddNormLinear, RMSNorm, attention


class FusedBlocks(CachedBlocks):
    """`model.forward_cached(..., blocks=FusedBlocks(model))`."""

    def __init__(self, model: Transformer):
        self._model = model

    def block(
        self, block: Block, residual_BTD: Tensor, delta_BTD: Tensor, layer_cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        if covers_attention(block.attn):
            residual_BTD, delta_BTD = self._attention(block.attn, residual_BTD, delta_BTD, layer_cache)
        else:
            residual_BTD, delta_BTD = block.attn.forward_cached(residual_BTD, delta_BTD, layer_cache)
        if isinstance(block.mlp, MLP) and covers_mlp(block.mlp):
            return self._mlp(block.mlp, residual_BTD, delta_BTD)
        residual_BTD, delta_BTD, *_ = block.mlp(residual_BTD, delta_BTD)
        return residual_BTD, delta_BTD

    def final(self, operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> Tensor:
        """The hidden states after the last norm."""
        if isinstance(operator.norm, RMSNorm) and operator.position == "pre":
            return _add_norm(operator, residual_BTD, delta_BTD)[1].view_as(residual_BTD)
        return super().final(operator, residual_BTD, delta_BTD)

    def _attention(
        self, half: Attention, residual_BTD: Tensor, delta_BTD: Tensor, layer_cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        B, T, _ = residual_BTD.shape
        residual_ND, normed_ND = _add_norm(half.input, residual_BTD, delta_BTD)
        (projection,) = half.input.projections
        qkv_NW = projection(normed_ND)
        q_norm, k_norm = half.q_norm, half.k_norm
        norms = None if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        layout = QkvLayout(half.heads, half.kv_heads, half.head_dim, 0.0 if q_norm is None else q_norm.eps)
        slots, rotation = layer_cache.slots, layer_cache.rotation
        if layer_cache.context is not None:
            angles = None if rotation is None else (rotation[0].flatten(0, 2), rotation[1].flatten(0, 2))
            q_weight, k_weight = norms or (None, None)
            q_NHC, k_NKC = fused.qk_norm_rope(qkv_NW, q_weight, k_weight, angles, layout)
            q_BTHC, k_BTKC, v_BTKC = (x.unflatten(0, (B, T)) for x in (q_NHC, k_NKC, layout.split(qkv_NW)[2]))
            layer_cache.cache.write(layer_cache.layer, slots, k_BTKC, v_BTKC)
            o_BTHC = attention(q_BTHC, k_BTKC, v_BTKC, layer_cache.context)
        else:
            cos, sin = self._model.rope_cos, self._model.rope_sin
            tables = None if cos is None or sin is None else (cos, sin)
            where = (slots.position_BT.flatten(), slots.page_BT.flatten(), slots.offset_BT.flatten())
            q_BTHC = qk_norm_rope_into_cache(
                qkv_NW, norms, tables, layout, layer_cache.keys_values, where
            ).unflatten(0, (B, T))
            o_BTHC = layer_cache.attention(q_BTHC, half.window)
        return residual_ND.view_as(residual_BTD), half.output(o_BTHC.flatten(2))

    @staticmethod
    def _mlp(half: MLP, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        residual_ND, normed_ND = _add_norm(half.input, residual_BTD, delta_BTD)
        (projection,) = half.input.projections
        hidden_NF = fused.gated(
            projection(normed_ND),
            half.output.activation,
            len(projection.slices) == 2,  # type: ignore[arg-type]
        )
        assert isinstance(hidden_NF, Tensor)
        return residual_ND.view_as(residual_BTD), half.output.projection(hidden_NF).view_as(residual_BTD)


def covers_attention(half: Attention) -> bool:
    """Return whether the fused kernels compute this attention. Decoding runs biases and adapters unfused."""
    return _covers(half.input, half.head_dim)


def covers_mlp(half: MLP) -> bool:
    """Return whether the fused kernels compute this MLP."""
    return _covers(half.input)


def _covers(operator: AddNormLinear, head_dim: int = 1) -> bool:
    norm_first = isinstance(operator.norm, RMSNorm) and operator.position == "pre"
    reason = uncovered_reason(
        rmsnorm_first=norm_first, num_projections=len(operator.projections), head_dim=head_dim
    )
    return reason is None


def _add_norm(operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(operator.norm, RMSNorm)
    norm = operator.norm
    residual_ND, normed_ND, _ = fused.add_norm(
        residual_BTD.flatten(0, 1), delta_BTD.flatten(0, 1), norm.weight, norm.eps
    )
    assert isinstance(normed_ND, Tensor)
    return residual_ND, normed_ND
