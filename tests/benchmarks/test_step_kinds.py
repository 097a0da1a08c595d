"""Kernel names as they appear in GPU traces (cuBLAS, cuDNN, CUTLASS, Inductor,
ATen; Ampere to Hopper), and our own kernels.
"""

import pytest

from benchmarks.step_kinds import KINDS, OPTIMIZER_MARK, kind_of

FLASH = "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel"
NAMES = [
    ("loss", "loss_and_grad"),
    ("quantisation", "turn"),  # the name of `transpose` in older traces
    ("quantisation", "transpose"),
    ("quantisation", "cast_both"),
    ("quantisation", "cast_rows"),
    ("quantisation", "cast_columns"),
    ("quantisation", "dispatch_fp8"),
    ("quantisation", "transpose_rows"),
    ("quantisation", "scale_of_experts"),
    ("quantisation", "column_amax"),
    ("quantisation", "row_col_amax"),
    ("elementwise", "weighted_gated_backward_fp8"),
    ("gemm", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"),
    ("gemm", "nvjet_qqtst_256x128_128x4_2x1_v_bz_coopB_TNN"),
    ("gemm", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_kernel__5x_cublas"),
    ("gemm", "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64_stage4_warpsize2x2x1_tensor16x8x32"),
    ("gemm", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"),
    ("gemm", "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_nn_align8>"),
    ("gemm", "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>"),
    ("gemm", "void cutlass::device_kernel<enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"),
    ("gemm", "triton_tem_fused_mm_t_4"),
    ("gemm", "aten::mm"),
    ("gemm", "grouped_matmul"),
    ("gemm", "grouped_weight_gradient"),
    ("gemm", "gathered_gated"),
    ("elementwise", "weighted_gated"),
    ("elementwise", "route_at_once"),
    ("elementwise", "combine"),
    ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"),
    ("attention", "void cudnn::fusion::compute_dot_do_o_specialized<true, false, 128>"),
    ("attention", "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel"),
    ("attention", "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__"),
    ("attention", "triton_tem_fused_flex_attention_2"),
    ("attention", FLASH),
    ("elementwise", "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1"),
    ("elementwise", "triton_poi_fused_mm_silu_mul_split_2"),
    ("elementwise", "triton_poi_fused__scaled_dot_product_cudnn_attention_add_cat_mul_neg_3"),
    ("elementwise", "add_norm_fp8"),
    ("elementwise", "qk_norm_rope_backward"),
    ("elementwise", "gated_backward"),
    ("elementwise", "column_sums"),
    ("elementwise", "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float"),
    ("loss", "triton_red_fused__log_softmax_nll_loss_forward_7"),
    ("loss", "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, LogSoftMaxForwardEpilogue"),
    ("optimizer", "void at::native::multi_tensor_apply_kernel<TensorListMetadata, FusedAdamMathFunctor<float, 4"),
    ("quantisation", "cast_fp8"),
    ("quantisation", "triton_red_fused_abs_amax_0"),
    ("memory", "triton_poi_fused__to_copy_t_3"),
    ("memory", "Memset (Device)"),
    ("memory", "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array"),
    ("memory", COPY),
    ("embedding", "triton_poi_fused_embedding_dense_backward_9"),
    ("unclassified", "some_new_kernel"),
    ("unclassified", "spinForEventKernel"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_by_name(kind: str, name: str) -> None:
    assert kind in KINDS
    assert kind_of(name, ()) == kind


@pytest.mark.parametrize(
    ("kind", "name", "inside"),
    [
        # Muon's products, and the copies around them, belong to Muon.
        ("optimizer", "nvjet_tst_128x256_64x4", (OPTIMIZER_MARK, "aten::bmm")),
        ("optimizer", "triton_poi_fused__to_copy_0", ("deskside: step", OPTIMIZER_MARK)),
        # The head's products within the loss count as products; the kernels between them count as the loss.
        ("gemm", "nvjet_tst_128x256_64x4", ("_LinearCrossEntropy", "aten::mm")),
        ("loss", "triton_red_fused__to_copy_amax_exp_sub_sum_0", ("_LinearCrossEntropy", "## Call Compiled ##")),
        ("loss", "void at::native::vectorized_elementwise_kernel<4, MulFunctor", ("_LinearCrossEntropyBackward",)),
        # Everything that an attention operator launches counts as attention, including the products of its plain
        # form.
        ("attention", "ampere_bf16_s16816gemm", ("aten::scaled_dot_product_attention", "aten::bmm")),
        ("attention", "void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>", (
            "aten::_scaled_dot_product_cudnn_attention_backward",)),
        ("memory", "void at::native::vectorized_elementwise_kernel<4, X", ("torch::autograd::AccumulateGrad",)),
        ("embedding", "void cub::DeviceRadixSortOnesweepKernel", ("aten::embedding_dense_backward",)),
    ],
)  # fmt: skip
def test_by_what_launched_it(kind: str, name: str, inside: tuple[str, ...]) -> None:
    assert kind_of(name, inside) == kind


def test_the_framework_is_a_kind_of_operators_alone() -> None:
    for name in (
        "_Attention",
        "autograd::engine::evaluate_function: MmBackward0",
        "Optimizer.step#AdamW.step",
    ):
        assert kind_of(name, (), operator=True) == "host"
        assert kind_of(name, ()) == "unclassified"
    assert kind_of("aten::something_new", (), operator=True) == "unclassified"
