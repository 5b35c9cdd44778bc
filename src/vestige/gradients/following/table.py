"""Which family follows which operation, by name. In-place forms are what they are out of place."""

from __future__ import annotations

from vestige.gradients.following import indexing, moving, pointwise, products
from vestige.gradients.following.base import Family

_TABLE: list[tuple[Family, str]] = [
    (
        pointwise.pointwise,
        """
        abs absolute sign sgn exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow float_power
        sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh sinc
        sigmoid logit erf erfc erfinv lgamma digamma polygamma i0 ceil floor round trunc frac fix
        clamp clip clamp_min clamp_max hardtanh relu relu6 elu selu celu gelu silu mish softplus
        softsign tanhshrink hardshrink softshrink leaky_relu rrelu threshold hardsigmoid hardswish
        logsigmoid dropout alpha_dropout nan_to_num reciprocal deg2rad rad2deg isnan isinf isfinite
        isposinf isneginf signbit bitwise_not logical_not floor_divide remainder fmod maximum
        minimum fmax fmin atan2 arctan2 hypot copysign heaviside eq ne lt le gt ge greater
        greater_equal less less_equal not_equal isclose logical_and logical_or logical_xor
        bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ldexp xlogy
        logaddexp logaddexp2 lerp addcmul addcdiv masked_fill conj conj_physical resolve_conj angle
        __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __iand__ __ior__ __ixor__ __invert__
        __pow__ __rpow__ __mod__ __rmod__ __imod__ __floordiv__ __rfloordiv__ __rtruediv__ __rdiv__
        __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __lshift__ __rshift__ __ilshift__ __irshift__
        __ipow__ copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ bernoulli tanh_ .real
        .imag special_expit special_erf
        """,
    ),
    (
        pointwise.linear_pointwise,
        """
        add sub subtract rsub neg negative positive __add__ __radd__ __iadd__ __sub__ __rsub__
        __isub__ __neg__ __pos__
        """,
    ),
    (
        pointwise.unchanged,
        """
        to type type_as float double half bfloat16 long int bool short char byte cpu cuda
        contiguous clone detach detach_ requires_grad_ .data alias pin_memory __deepcopy__
        as_subclass
        """,
    ),
    (
        moving.reshaped,
        """
        reshape view flatten unflatten squeeze unsqueeze view_as reshape_as ravel atleast_1d
        atleast_2d atleast_3d _unsafe_view squeeze_ unsqueeze_
        """,
    ),
    (
        pointwise.like,
        """
        zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros
        new_ones new_empty new_full
        """,
    ),
    (
        pointwise.leading,
        """
        max_pool1d max_pool2d max_pool3d boolean_dispatch _max_pool1d _max_pool2d _max_pool3d
        fractional_max_pool2d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
        adaptive_max_pool3d lp_pool1d lp_pool2d lp_pool3d max_pool2d_with_indices
        max_pool1d_with_indices max_pool3d_with_indices max_unpool1d max_unpool2d
        adaptive_max_pool2d_with_indices adaptive_max_pool1d_with_indices interpolate upsample
        affine_grid pixel_shuffle pixel_unshuffle channel_shuffle local_response_norm group_norm
        instance_norm dropout1d dropout2d dropout3d im2col col2im fold feature_dropout
        native_channel_shuffle embedding_bag stft
        """,
    ),
    (
        pointwise.entrywise_loss,
        """
        mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss soft_margin_loss
        multilabel_soft_margin_loss
        """,
    ),
    (pointwise.binary_loss, "binary_cross_entropy binary_cross_entropy_with_logits"),
    (pointwise.loss, "cross_entropy nll_loss nll_loss_nd cross_entropy_loss"),
    (
        pointwise.convolved,
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    (pointwise.multiplying, "mul multiply __mul__ __rmul__ __imul__"),
    (pointwise.scaling, "div divide true_divide __truediv__ __itruediv__"),
    (pointwise.leading_pair, "grid_sample lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    (pointwise.first_alone, "prelu bucketize"),
    (pointwise.where, "where"),
    (pointwise.renormed, "renorm"),
    (pointwise.searched, "searchsorted"),
    (pointwise.batch_norm, "batch_norm"),
    (pointwise.trailing, "layer_norm rms_norm"),
    (pointwise.along(1, linear=True), "sum mean nansum nanmean"),
    (
        pointwise.along(1),
        """
        amax amin prod std var std_mean var_mean logsumexp argmax argmin all any median
        count_nonzero softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp aminmax
        nanmedian special_softmax _softmax special_logsumexp
        """,
    ),
    (pointwise.extreme, "max min"),
    (pointwise.quantile, "quantile nanquantile"),
    (pointwise.along(9, 0, name="_"), "msort"),
    (pointwise.along(2), "norm vector_norm linalg_vector_norm linalg_norm"),
    (pointwise.along(2, -1), "topk kthvalue diff"),
    (pointwise.along(1, -1), "mode"),
    (pointwise.along(2, 1), "normalize"),
    (pointwise.along(1, -1), "glu"),
    (pointwise.along(9, -1), "trapezoid trapz cumulative_trapezoid"),
    (pointwise.along(4, -1), "gumbel_softmax"),
    (pointwise.compared, "cosine_similarity"),
    (
        pointwise.matrices,
        """
        linalg_inv linalg_det linalg_qr linalg_svd linalg_eigh linalg_cholesky matrix_exp inverse
        linalg_svdvals linalg_eigvalsh linalg_slogdet linalg_matrix_exp svd linalg_pinv pinverse
        linalg_matrix_norm linalg_cond
        """,
    ),
    (pointwise.along(2, -1), "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"),
    (pointwise.along(2, (-2, -1)), "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"),
    (pointwise.along(9, (-2, -1), name="_"), "tril triu tril_ triu_"),
    (pointwise.sort, "sort argsort"),
    (pointwise.gather, "gather take_along_dim"),
    (pointwise.taken, "take"),
    (pointwise.filled, "put put_ masked_scatter masked_scatter_"),
    (pointwise.scatter, "scatter scatter_ scatter_add scatter_add_ scatter_reduce"),
    (moving.complex_pairs, "view_as_complex view_as_real"),
    (moving.appended, "one_hot"),
    (moving.permuted(moving.permute_order), "permute"),
    (moving.permuted(moving.transpose_order), "transpose swapaxes swapdims transpose_"),
    (moving.permuted(moving.reversed_order), "t .T .H numpy_T"),
    (moving.permuted(moving.last_two_swapped), ".mT .mH adjoint"),
    (moving.permuted(moving.movedim_order), "movedim moveaxis"),
    (moving.expanded, "expand expand_as broadcast_to"),
    (moving.broadcast, "broadcast_tensors"),
    (moving.repeated, "repeat tile"),
    (moving.interleaved, "repeat_interleave"),
    (moving.joined, "cat concat concatenate"),
    (moving.stacked, "stack"),
    (moving.constructed, "tensor as_tensor asarray"),
    (moving.lent, "new_tensor"),
    (moving.padded_together, "pad_sequence"),
    (moving.one_below_the_other, "vstack row_stack"),
    (moving.split, "split chunk tensor_split split_with_sizes unsafe_chunk"),
    (moving.unbound, "unbind"),
    (moving.selected, "select"),
    (moving.narrowed, "narrow"),
    (moving.flipped, "flip"),
    (moving.flipped_along(0), "flipud"),
    (moving.flipped_along(1), "fliplr"),
    (moving.rotated, "rot90"),
    (moving.split_along(0), "vsplit"),
    (moving.split_along(1), "hsplit"),
    (moving.split_along(2), "dsplit"),
    (moving.rolled, "roll"),
    (moving.padded, "pad"),
    (moving.unfolded, "unfold"),
    (indexing.index_selected, "index_select"),
    (indexing.indexed, "__getitem__"),
    (indexing.assigned, "__setitem__"),
    (indexing.index_put, "index_put"),
    (indexing.index_added, "index_add index_copy index_reduce"),
    (products.linear, "linear"),
    (products.matmul, "matmul mm bmm mv __matmul__"),
    (products.rmatmul, "__rmatmul__"),
    (products.addmm, "addmm baddbmm addmv"),
    (products.einsum, "einsum"),
    (products.tensordot, "tensordot"),
    (products.bilinear, "bilinear"),
    (products.attention, "scaled_dot_product_attention"),
    (products.embedding, "embedding"),
    (products.cdist, "cdist"),
    (products.recurrent, "lstm gru rnn_tanh rnn_relu"),
]
FAMILIES: dict[str, Family] = {name: family for family, names in _TABLE for name in names.split()}
FAMILIES |= {
    f"{name}_": family
    for name, family in list(FAMILIES.items())
    if not name.startswith((".", "_")) and not name.endswith("_")
}

# Their results may be as long as the contents of all rows say.
RAGGED = set(
    "nonzero argwhere masked_select unique unique_consecutive where __getitem__ repeat_interleave "
    "bincount one_hot arange linspace narrow index zeros ones full empty".split()
)
# The second argument only lends its shape or type.
LENDING_SHAPE = {"to", "new_tensor", "type_as", "view_as", "reshape_as", "expand_as"}
