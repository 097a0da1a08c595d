"""Activations that a layer saves for its backward, and the temporary gradients of its backward, in bytes per token.

The activations in bfloat16 were read from the tensors that autograd (eager) and torch.compile's partitioner (compiled)
save for this project's blocks; a test repeats this:

    bytes per token and layer           compiled                 eager
    residual, deltas, norms             8 D + 8                  20 D + 8
    q, k, v, attention output           4 (Hc + Kc) + 4 H        4 (Hc + Kc) + 4 H
    q, k once more, if RoPE or QK-norm  2 (Hc + Kc)              2 (Hc + Kc)
    QK-norm                             4 (H + K)                8 (Hc + Kc) + 4 (H + K)
    MLP, gated                          6 F                      8 F
    MLP, not gated                      4 F                      4 F

D is the hidden size, F the MLP width, H the heads, K the key-value heads, Hc = H x head_dim, Kc = K x head_dim. In a
mixture of experts, F is the sum over the k chosen experts, and each of them has its own copy of input and output, 4 k D
in all. A fused one (`precision/fused_moe.py`) keeps no such copies and no output of the activation: 4 F, or 2 F without
a gate, and the routing, 2 bytes per expert and 20 per choice, which is saved even if the sublayer is recomputed. Fused
sublayers (`precision/fused_sublayers.py`) save what the table lists as compiled, without the statistics of QK-norm.

A recomputed sublayer saves its input, and no bfloat16 copies of its weights; a recomputed block saves the pair
(residual, delta), 4 D. Offloaded activations (`train/activation_offload.py`) leave those of two blocks on the GPU.

In FP8, the input of a projection is saved as transposed FP8 codes for the weight gradient. That takes one byte less per
value for the normed inputs (2 D) and the MLP's activation (F), but one byte more for attention's output (Hc), which
attention's own backward needs in 16 bits. Blocks that stay in BF16 are as in the table.

Temporary gradients of a fused sublayer were read from its code: they are the larger value of two moments. W is the
number of output channels of the first projection: 2 F in the MLP, F without a gate, Hc + 2 Kc in attention.

- Before the backward of this projection: 2 D + 2 F + 2 W in the MLP, and 2 D + 8 Hc + 4 Kc in attention, whose kernels
  accumulate dq in float32.
- Within it: 6 D + 2 W, with 2 W more in FP8 (also in the first step of delayed scales, which casts existing tensors)
  and 4 W more in emulated NVFP4. If the last blocks stay in BF16, they determine this number, because the backward
  begins with them.

In a mixture of experts, they are 2 D + 2 k D + 4 F + 2 W before the backward of the first product. FP8 casts rows while
it gathers them, saving 2 k D there, but needs 2 D + 2 W + 2 F and 1 byte (3 if emulated) of F + k D within the gradient
of the second weight; NVFP4 needs 2 D + 2 W + 4 F + 4 k D there. With dropout they are 2 D more, because the gradients
of residual and delta differ.

For blocks compiled by torch, RECOMPUTE_FACTOR was fitted to 63 configurations measured on an H200
(docs/planner-accuracy.md).
"""

from deskside.budget.format_costs import SAVED_BF16, product_formats, saved_input_bytes
from deskside.budget.shape import Shape, block_norms
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import Checkpointing, StepSpec
from deskside.budget.terms import named

# Memory of a sublayer that is recomputed and differentiated, relative to the activations that it saves otherwise.
RECOMPUTE_FACTOR = 1.36
GRADIENTS_FACTOR = RECOMPUTE_FACTOR - 1  # temporary gradients of a block, relative to its activations


class LayerActivations:
    """Bytes per token that one layer saves for its backward: residual stream and norms, attention, MLP.

    width: 1 for 16-bit activations, 2 for float32. saved_bytes: bytes per value of a projection's input that is saved
    for the weight gradient.
    """

    def __init__(self, sizes: Sizes, width: int, saved_bytes: float):
        s, shape, compiled = sizes, sizes.shape, sizes.spec.compiled or sizes.spec.fused
        self.sizes = s
        channels = s.queries + s.keys
        attention = 4 * channels + 4 * s.heads
        if shape.qk_norm or shape.position_embedding == "rope":
            attention += 2 * channels
        if shape.qk_norm and not s.spec.fused:  # fused sublayers recompute the statistics
            normed_vectors = s.heads + s.kv_heads if shape.qk_norm_over == "head" else 2
            attention += 4 * normed_vectors + (0 if compiled else 8 * channels)
        mlp = ((6 if compiled else 8) if shape.gated_mlp else 4) * s.mlp_width
        self.routing = 0.0  # saved even if the sublayer is recomputed
        if shape.num_experts:
            chosen = s.leaf("experts per token", shape.num_experts_per_tok)
            if s.spec.fused:
                mlp = (4 if shape.gated_mlp else 2) * s.mlp_width
                self.routing = 2 * shape.num_experts + 20 * chosen
            else:  # each chosen expert has its own copy of input and output
                mlp += chosen * 4 * s.hidden
        saving = SAVED_BF16 - saved_bytes
        # Attention's backward needs its output in 16 bits. The codes that the output projection saves are additional.
        output_codes = s.queries * saving
        per_token = "per token and layer"
        # Experts quantize their inputs again in the backward, from 16 bits.
        mlp_saving = 0.0 if shape.num_experts else saving
        # An eager RMSNorm saves its input and its result in float32, an eager LayerNorm its input.
        norm_input = 2 if compiled else (8 if shape.norm == "rmsnorm" else 4)
        norms = block_norms(shape) * (norm_input * s.hidden + 4)
        if shape.parallel_residual and compiled:  # both sublayers read one residual, which is saved once
            norms -= norm_input * s.hidden
        stream = width * (norms + 4 * s.hidden) - s.hidden * (saving + mlp_saving)
        self.stream = named(f"residual stream and norms, {per_token}", stream)
        self.attention = named(f"attention, {per_token}", width * attention + output_codes)
        self.mlp = named(f"MLP, {per_token}", width * mlp - s.mlp_width * mlp_saving)
        self.block_input = 4 * (width * s.hidden)  # the pair (residual, delta)
        # The saved normed inputs of attention and of the MLP.
        self.normed = 2 * (width * s.hidden) - s.hidden * saving
        self.mlp_normed = 2 * (width * s.hidden) - s.hidden * mlp_saving
        self.gradients: tuple[float, float] | None = None
        if s.spec.fused:
            attention_gradients, mlp_gradients = sublayer_gradient_bytes(s)
            self.gradients = (
                named(f"temporary gradients of attention, {per_token}", width * attention_gradients),
                named(f"temporary gradients of the MLP, {per_token}", width * mlp_gradients),
            )

    @property
    def block(self) -> float:
        """Activations that a block saves without checkpointing."""
        return self.stream + self.attention + self.mlp + self.routing

    @property
    def last_gradients(self) -> float:
        """Temporary gradients at the end of the backward, in the first block."""
        return self.block * GRADIENTS_FACTOR if self.gradients is None else self.gradients[0]

    def kept(self, checkpointing: Checkpointing) -> float:
        """Return the bytes that all layers save. A recomputed sublayer does not save its normed input."""
        if checkpointing == "block":
            # If offloaded, two are on the GPU: the last block's, and one on its way to the host or back.
            blocks = 2 if self.sizes.spec.activation_offloading else self.sizes.layers
            return blocks * self.block_input + self.sizes.layers * self.routing
        if checkpointing == "none":
            return self.sizes.layers * self.block
        other = self.mlp if checkpointing == "attention" else self.attention
        normed = self.mlp_normed if checkpointing == "mlp" else self.normed
        return self.sizes.layers * (self.stream - normed + other + self.routing)

    def backward(self, checkpointing: Checkpointing) -> float:
        """Return the temporary gradients and recomputed activations in the backward of the last block."""
        if self.gradients is None:
            if checkpointing == "none":
                return self.block * GRADIENTS_FACTOR
            if checkpointing == "block":
                return self.block * RECOMPUTE_FACTOR
            recomputed = self.attention if checkpointing == "attention" else self.mlp
            return (recomputed + self.stream / 2) * RECOMPUTE_FACTOR
        # Fused sublayers recompute and differentiate one after the other. The MLP is first, and its saved activations
        # are freed when attention begins.
        attention, mlp = self.gradients
        if checkpointing == "none":
            return mlp
        if checkpointing == "attention":
            return max(mlp, self.attention + attention - self.mlp)
        whole_mlp = self.mlp_normed + self.mlp + mlp
        sizes, chunk = self.sizes, self.sizes.spec.mlp_chunk_tokens
        if chunk is not None and chunk < sizes.spec.micro_tokens:
            # A chunk's share of these, the gradient of the residual, and float32 sums of the weight gradients.
            part = sizes.leaf("tokens of an MLP chunk", chunk) / sizes.pass_tokens
            sums = 4 * sizes.mlp_weights / sizes.pass_tokens
            whole_mlp = whole_mlp * part + self.block_input / 2 + sums
        return (
            whole_mlp if checkpointing == "mlp" else max(whole_mlp, self.normed + self.attention + attention)
        )


def saved_bytes_per_value(shape: Shape, spec: StepSpec) -> float:
    """Return the bytes per value of the inputs that projections save for weight gradients, averaged over weights."""
    share = spec.quantized_share(shape.num_hidden_layers)
    return (1 - share) * SAVED_BF16 + share * saved_input_bytes(spec.precision)


def sublayer_gradient_bytes(sizes: Sizes) -> tuple[float, float]:
    """Return the temporary gradients of a fused attention and a fused MLP, in bytes per token (module docstring)."""
    D, q, kv = sizes.hidden, sizes.queries, sizes.keys
    F, outputs = sizes.mlp_width, 2 if sizes.shape.gated_mlp else 1
    # Bytes per value of a projection's output gradient, in all formats in which products read it.
    backward_kind = product_formats(sizes.spec.precision)[1]
    output_gradient = (
        2 if sizes.spec.kept_blocks else {"fp32": 2, "bf16": 2, "fp8": 4, "nvfp4": 6}[backward_kind]
    )
    mlp: float = max(2 * D + 2 * F + 2 * outputs * F, 6 * D + output_gradient * outputs * F)
    if sizes.shape.num_experts:
        k = sizes.leaf("experts per token", sizes.shape.num_experts_per_tok)
        mlp = _expert_gradient_bytes(sizes, k * D, outputs)
    attention: float = max(2 * D + 8 * q + 4 * kv, 6 * D + output_gradient * (q + 2 * kv))
    if sizes.spec.dropout:
        attention, mlp = attention + 2 * D, mlp + 2 * D
    return attention, mlp


def _expert_gradient_bytes(sizes: Sizes, row: float, outputs: int) -> float:
    """Return the temporary gradients of fused experts in bytes per token (module docstring).

    row: values of a token's rows, k D. outputs: 2 with a gate, else 1.
    """
    D, F, spec = sizes.hidden, sizes.mlp_width, sizes.spec
    kind = "bf16" if spec.kept_blocks else product_formats(spec.precision)[1]
    before = 2 * D + (4 + 2 * outputs) * F
    if kind not in ("fp8", "nvfp4"):
        return before + 2 * row
    within = 2 * D + (2 * outputs + 2) * F
    if kind == "nvfp4":  # gathered rows and their quantized copies, in 16 bits
        return max(before + 2 * row, within + 2 * F + 4 * row)
    native = "fp8-grouped" in spec.native
    return max(before, within + (1 if native else 3) * (F + row))
