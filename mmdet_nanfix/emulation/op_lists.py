"""CUDA autocast's lists of operations, and what a CPU lacks beside them.

Source of the lists: ``ATen/autocast_mode.h`` of PyTorch. An operation that a
version of torch does not have is passed over.
"""
from __future__ import annotations

__all__ = [
    'BANNED', 'FP32', 'FP32_APPEND', 'FP32_OUTPUT', 'IN_PLACE',
    'IN_PLACE_BEFORE_24', 'LOWER', 'LOWER_CUDNN', 'NORMS',
    'NO_HALF_BEFORE_24', 'NO_HALF_ON_CPU', 'PROMOTE'
]

# Run in half: inputs rounded to the autocast dtype, fp32 accumulation.
LOWER = ('_convolution _convolution.deprecated '
         '_scaled_dot_product_flash_attention _thnn_fused_gru_cell '
         '_thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm '
         'chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d '
         'conv_transpose2d.input conv_transpose3d.input convolution einsum '
         'gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm '
         'mv prelu rnn_relu_cell rnn_tanh_cell '
         'scaled_dot_product_attention').split()

# Sent to cuDNN on a GPU, whose binding casts everything to half by itself.
# cuDNN's state between time steps, in half too, is kept in fp32 here.
LOWER_CUDNN = ('gru.data gru.input lstm.data lstm.input rnn_relu.data '
               'rnn_relu.input rnn_tanh.data rnn_tanh.input').split()

# Run in fp32: half inputs are widened first.
FP32 = ('_upsample_bicubic2d_aa _upsample_bilinear2d_aa '
        '_upsample_nearest_exact1d _upsample_nearest_exact2d '
        '_upsample_nearest_exact3d acos asin '
        'binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss '
        'cosine_similarity dist erfinv exp expm1 frobenius_norm.dim '
        'group_norm hinge_embedding_loss huber_loss kl_div l1_loss '
        'layer_norm log log10 log1p log2 logsumexp margin_ranking_loss '
        'mse_loss multi_margin_loss multilabel_margin_loss '
        'native_layer_norm nll_loss nll_loss2d nuclear_norm '
        'nuclear_norm.dim pdist poisson_nll_loss pow.Scalar '
        'pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm '
        'rsqrt sinh smooth_l1_loss soft_margin_loss softplus tan '
        'triplet_margin_loss upsample_bicubic2d upsample_bilinear2d '
        'upsample_linear1d upsample_nearest1d upsample_nearest2d '
        'upsample_nearest3d upsample_trilinear3d').split()

# Reductions that take an output dtype: fp32 where the caller names none.
FP32_OUTPUT = ('cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord '
               'linalg_vector_norm log_softmax.int prod prod.dim_int '
               'softmax.int sum sum.dim_IntList').split()

# Overloads without an output dtype: sent to the overload that has one.
FP32_APPEND = {'norm.Scalar': 'norm.ScalarOpt_dtype',
               'norm.ScalarOpt_dim': 'norm.ScalarOpt_dim_dtype'}

# Run in the widest dtype among the inputs.
PROMOTE = ('addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put '
           'scatter_add tensordot vdot').split()

BANNED = ('binary_cross_entropy', )

# On no list of CUDA's. Without weights the CPU keeps their statistics in
# half, where CUDA keeps them in fp32: a variance above 65504 would be inf.
NORMS = ('batch_norm', 'instance_norm')

# On no list of CUDA's, which has half kernels where the CPU has none.
NO_HALF_ON_CPU = ('avg_pool3d', 'rrelu', 'round.decimals')

# Of these what is written in place.
IN_PLACE = ('rrelu_', )

# Likewise before torch 2.4, which brought half kernels for the CPU (seen to
# be missing in 2.1.2).
NO_HALF_BEFORE_24 = (
    'adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d '
    'adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d '
    'alpha_dropout aminmax avg_pool1d avg_pool2d bernoulli bernoulli.p '
    'cummax cummin dropout feature_alpha_dropout feature_dropout '
    'fractional_max_pool2d fractional_max_pool3d grid_sampler_2d '
    'grid_sampler_3d hypot isin.Tensor_Scalar isin.Tensor_Tensor kthvalue '
    'linalg_cross logaddexp logaddexp2 logcumsumexp logit matrix_exp '
    'max_pool1d max_pool1d_with_indices max_pool2d_with_indices '
    'max_pool3d_with_indices max_unpool2d max_unpool3d median median.dim '
    'multinomial nanmedian nanmedian.dim native_dropout reflection_pad1d '
    'reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d '
    'replication_pad3d topk trace').split()

# What is written in place, likewise.
IN_PLACE_BEFORE_24 = (
    'addbmm_ addcdiv_ addmm_ addmv_ addr_ alpha_dropout_ atan2_ baddbmm_ '
    'bernoulli_.float bernoulli_.Tensor cumprod_ cumsum_ dropout_ '
    'feature_alpha_dropout_ feature_dropout_ hypot_ logit_').split()
