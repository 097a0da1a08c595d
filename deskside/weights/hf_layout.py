"""Conversion between logical tensors and Hugging Face's layouts of them: stacked, interleaved, transposed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deskside.config.model import ModelConfig
from deskside.ops.logical import LogicalTensor
from deskside.weights.hf_family import Family


def to_hf_layout(
    values: Sequence[Tensor], parts: Sequence[LogicalTensor], family: Family, config: ModelConfig
) -> Tensor:
    """Return the tensor in which Hugging Face stacks these logical tensors, from their values."""
    tensor = values[0] if len(values) == 1 else torch.cat(list(values))
    if _has_stacked_experts(parts, family):
        tensor = tensor.unflatten(0, (config.num_experts, _projections(parts, config), -1))
        tensor = tensor.transpose(1, 2).flatten(1, 2)
        return tensor.mT if parts[0].kind == "matrix" else tensor
    if _is_stacked_by_head(parts, family):
        tensor = _exchange(tensor, len(parts), config.head_dim)
    return tensor.T if _is_transposed(parts, family) else tensor


def from_hf_layout(
    tensor: Tensor, parts: Sequence[LogicalTensor], family: Family, config: ModelConfig
) -> Tensor:
    """Return the logical tensors that Hugging Face stacks in `tensor`, one after the other along the rows."""
    if _has_stacked_experts(parts, family):
        tensor = tensor.mT if parts[0].kind == "matrix" else tensor
        return tensor.unflatten(1, (-1, _projections(parts, config))).transpose(1, 2).flatten(0, 2)
    tensor = tensor.T if _is_transposed(parts, family) else tensor
    return our_rows(tensor, parts, family, config)


def our_rows(tensor: Tensor, parts: Sequence[LogicalTensor], family: Family, config: ModelConfig) -> Tensor:
    """Return a tensor in which Hugging Face stacks the rows of `parts`, with one part after the other."""
    if not _is_stacked_by_head(parts, family):
        return tensor
    return _exchange(tensor, config.num_attention_heads, config.head_dim)


def hf_shape(parts: Sequence[LogicalTensor], family: Family, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of the tensor in which Hugging Face stores these logical tensors."""
    rows, columns = sum(len(part.view) for part in parts), tuple(parts[0].view.shape[1:])
    if _has_stacked_experts(parts, family):
        return config.num_experts, *columns, rows // config.num_experts
    return (*columns, rows) if _is_transposed(parts, family) else (rows, *columns)


def _is_transposed(parts: Sequence[LogicalTensor], family: Family) -> bool:
    return family.transposed and parts[0].kind == "matrix"


def _is_stacked_by_head(parts: Sequence[LogicalTensor], family: Family) -> bool:
    return family.stacked_by_head and len(parts) > 1


def _has_stacked_experts(parts: Sequence[LogicalTensor], family: Family) -> bool:
    return family.stacked_experts and ".experts." in parts[0].name


def _projections(parts: Sequence[LogicalTensor], config: ModelConfig) -> int:
    """Return the number of projections of an expert in a tensor of all experts: gate and up, or only down."""
    return len(parts) // config.num_experts


def _exchange(tensor: Tensor, blocks: int, head_dim: int) -> Tensor:
    """Transpose `blocks` blocks of rows, each of as many heads: q0 q1 k0 k1 v0 v1 <-> q0 k0 v0 q1 k1 v1."""
    return tensor.unflatten(0, (blocks, -1, head_dim)).transpose(0, 1).flatten(0, 2)
