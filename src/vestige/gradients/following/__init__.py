"""How torch's operations move the rows of the batch: the label of a result from its arguments.

Each function below covers a family of operations (pointwise, along an axis, moving entries,
products) by name. An operation that no family names gives a result whose rows are lost; it is
refused where a parameter or the loss would meet it.

Guarantee: a result is labelled `Rows` only if each of its entries depends on the one row that the
label says, for any contents. (What the position in the lot does to an entry, such as a constant
that differs from row to row, no label tells: the self-check compares rows with rows alone.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from vestige.gradients.following import indexing, moving, pointwise, products
from vestige.gradients.following.base import SUMMED, Args, Family, Lost, Meet, Result, agreed
from vestige.gradients.rows import Label, Meeting, Rows, Summed


def follow(
    func: Any, labels: Mapping[int, Label], args: Args, kwargs: dict[str, Any], out: Any
) -> Result:
    """The label of what `func(*args, **kwargs)` gave, or one for each tensor in it.

    `labels` has those of the arguments, by their identity, at least one.
    """

    unseen = set(labels)

    def see(tensor: Tensor) -> Label | None:
        unseen.discard(id(tensor))
        return labels.get(id(tensor))

    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    family = _family(func)
    try:
        ones = [x for x in labels.values() if isinstance(x, Rows) and x.count == 1]
        if ones and family not in (pointwise.like, moving.joined, moving.stacked):
            # Whatever is made of one row belongs to it; with others it makes a meeting.
            if len(ones) < len(labels):
                raise Meet
            return agreed(ones)
        if family is None:
            raise Lost
        found = family(see, args, kwargs, out)
        if unseen and name_of(func) not in _AS:  # a length or a place that rows have given
            raise Lost
        return Summed(f"{name_of(func)!r}") if found is SUMMED else found
    except (Lost, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = f" ({error})" if isinstance(error, Lost) and error.args else ""
        found = Meeting(f"{name_of(func)!r}{why}", lost=True)
    except Meet:
        found = Meeting(f"{name_of(func)!r}")
    ragged = name_of(func) in _RAGGED or any(getattr(x, "ragged", False) for x in labels.values())
    return replace(_carried_on(labels.values()) or found, ragged=ragged)


_known: dict[Any, Family | None] = {}  # families by function: names are looked up once


def _family(func: Any) -> Family | None:
    if func not in _known:
        _known[func] = FAMILIES.get(name_of(func))
    return _known[func]


def keeps_places(func: Any) -> bool:
    """Whether an operation is pointwise, so that one argument's rows are those of the result."""
    family = _family(func)
    return family is pointwise.pointwise or family is pointwise.linear_pointwise


def name_of(func: Any) -> str:
    """The name of an operation, of the property that is read, or of an overload without its end.

    An operation of somebody's library is not torch's of the same name.
    """
    if func is F.unfold:  # Tensor.unfold is another operation
        return "im2col"
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f".{func.__self__.__name__}"
    if isinstance(func, OpOverload | OpOverloadPacket):
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        return str(packet).removeprefix("aten.")
    return name


def _carried_on(labels: Iterable[Label]) -> Meeting | None:
    """A meeting among the arguments says more than the operation after it."""
    found = [x for x in labels if isinstance(x, Meeting)]
    found += [Meeting(x.what) for x in labels if isinstance(x, Summed)]
    return next((m for m in found if not m.lost), found[0] if found else None)


_POINTWISE = """
abs absolute sign sgn exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow float_power sin cos
tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh sinc sigmoid logit erf erfc
erfinv lgamma digamma polygamma i0 ceil floor round trunc frac fix clamp clip clamp_min clamp_max
hardtanh relu relu6 elu selu celu gelu silu mish softplus softsign tanhshrink hardshrink softshrink
leaky_relu rrelu threshold hardsigmoid hardswish logsigmoid dropout alpha_dropout nan_to_num
reciprocal deg2rad rad2deg isnan isinf isfinite isposinf isneginf signbit bitwise_not logical_not
floor_divide remainder fmod maximum minimum fmax fmin atan2 arctan2 hypot copysign heaviside eq ne
lt le gt ge greater greater_equal less less_equal not_equal isclose logical_and logical_or
logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ldexp xlogy
logaddexp logaddexp2 lerp addcmul addcdiv masked_fill conj conj_physical resolve_conj angle
__and__ __or__ __xor__ __rand__ __ror__ __rxor__ __iand__ __ior__ __ixor__ __invert__ __pow__
__rpow__ __mod__ __rmod__ __imod__ __floordiv__ __rfloordiv__ __rtruediv__ __rdiv__ __eq__ __ne__
__lt__ __le__ __gt__ __ge__ __lshift__ __rshift__ __ilshift__ __irshift__ __ipow__
copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ bernoulli tanh_ .real .imag special_expit
special_erf
""".split()
_LINEAR = """
add sub subtract rsub neg negative positive __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__
__neg__ __pos__
""".split()
_UNCHANGED = """
to type type_as float double half bfloat16 long int bool short char byte cpu cuda contiguous clone
detach detach_ requires_grad_ .data alias pin_memory
""".split()
_RESHAPED = """
reshape view flatten unflatten squeeze unsqueeze view_as reshape_as ravel atleast_1d atleast_2d
atleast_3d _unsafe_view squeeze_ unsqueeze_
""".split()
# Their results may be as long as the contents of all rows say.
_RAGGED = set(
    "nonzero argwhere masked_select unique unique_consecutive where __getitem__ repeat_interleave "
    "bincount one_hot arange linspace narrow index zeros ones full empty".split()
)
# The second argument only lends its shape or type.
_AS = {"to", "type_as", "view_as", "reshape_as", "expand_as"}
_LIKE = """
zeros_like ones_like empty_like full_like rand_like randn_like randint_like
new_zeros new_ones new_empty new_full
""".split()
_LEADING = """
max_pool1d max_pool2d max_pool3d boolean_dispatch _max_pool1d _max_pool2d _max_pool3d
fractional_max_pool2d
avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d lp_pool3d
max_pool2d_with_indices max_pool1d_with_indices max_pool3d_with_indices max_unpool1d max_unpool2d
adaptive_max_pool2d_with_indices adaptive_max_pool1d_with_indices
interpolate upsample affine_grid pixel_shuffle pixel_unshuffle channel_shuffle
local_response_norm group_norm instance_norm dropout1d dropout2d dropout3d im2col col2im fold
feature_dropout native_channel_shuffle embedding_bag
""".split()
_LOSSES = """
cross_entropy nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss
multilabel_soft_margin_loss cross_entropy_loss
""".split()

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_POINTWISE, pointwise.pointwise),
    **dict.fromkeys(_LINEAR, pointwise.linear_pointwise),
    **dict.fromkeys(_UNCHANGED, pointwise.unchanged),
    **dict.fromkeys(_RESHAPED, moving.reshaped),
    **dict.fromkeys(_LIKE, pointwise.like),
    **dict.fromkeys(_LEADING, pointwise.leading),
    **dict.fromkeys(_LOSSES, pointwise.loss),
    **dict.fromkeys(
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split(),
        pointwise.convolved,
    ),
    **dict.fromkeys(["mul", "multiply", "__mul__", "__rmul__", "__imul__"], pointwise.multiplying),
    **dict.fromkeys(
        ["div", "divide", "true_divide", "__truediv__", "__itruediv__"], pointwise.scaling
    ),
    **dict.fromkeys(
        "grid_sample lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split(), pointwise.leading_pair
    ),
    **dict.fromkeys(["prelu", "bucketize"], pointwise.first_alone),
    "where": pointwise.where,
    "batch_norm": pointwise.batch_norm,
    **dict.fromkeys(["layer_norm", "rms_norm"], pointwise.trailing),
    **dict.fromkeys(["sum", "mean", "nansum", "nanmean"], pointwise.along(1, linear=True)),
    **dict.fromkeys(
        "amax amin prod std var std_mean var_mean logsumexp argmax argmin all any median "
        "count_nonzero softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp "
        "aminmax nanmedian special_softmax _softmax special_logsumexp".split(),
        pointwise.along(1),
    ),
    **dict.fromkeys(["max", "min"], pointwise.extreme),
    "msort": pointwise.along(9, 0, name="_"),
    **dict.fromkeys(["norm", "vector_norm", "linalg_vector_norm"], pointwise.along(2)),
    **dict.fromkeys(["topk", "kthvalue"], pointwise.along(2, -1)),
    "linalg_norm": pointwise.along(2),
    "normalize": pointwise.along(2, 1),
    "glu": pointwise.along(1, -1),
    "diff": pointwise.along(2, -1),
    "gumbel_softmax": pointwise.along(4, -1),
    "cosine_similarity": pointwise.compared,
    **dict.fromkeys(
        "linalg_inv linalg_det linalg_qr linalg_svd linalg_eigh linalg_cholesky matrix_exp inverse "
        "linalg_svdvals linalg_eigvalsh linalg_slogdet linalg_matrix_exp svd".split(),
        pointwise.matrices,
    ),
    **dict.fromkeys(
        "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft".split(), pointwise.along(2, -1)
    ),
    **dict.fromkeys(
        "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2".split(), pointwise.along(2, (-2, -1))
    ),
    **dict.fromkeys(["tril", "triu", "tril_", "triu_"], pointwise.along(9, (-2, -1), name="_")),
    **dict.fromkeys(["sort", "argsort"], pointwise.sort),
    **dict.fromkeys(
        "gather take_along_dim scatter scatter_ scatter_add scatter_add_ scatter_reduce".split(),
        pointwise.gather,
    ),
    **dict.fromkeys(["view_as_complex", "view_as_real"], moving.complex_pairs),
    "one_hot": moving.appended,
    "permute": moving.permuted(moving.permute_order),
    **dict.fromkeys(
        ["transpose", "swapaxes", "swapdims", "transpose_"], moving.permuted(moving.transpose_order)
    ),
    **dict.fromkeys(
        ["t", ".T", ".H", "adjoint", "numpy_T"], moving.permuted(moving.reversed_order)
    ),
    **dict.fromkeys([".mT", ".mH", "adjoint"], moving.permuted(moving.last_two_swapped)),
    **dict.fromkeys(["movedim", "moveaxis"], moving.movedim),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], moving.expanded),
    **dict.fromkeys(["repeat", "tile"], moving.repeated),
    "repeat_interleave": moving.interleaved,
    **dict.fromkeys(["cat", "concat", "concatenate"], moving.joined),
    "stack": moving.stacked,
    **dict.fromkeys(
        ["split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk"], moving.split
    ),
    "unbind": moving.unbound,
    "select": moving.selected,
    "narrow": moving.narrowed,
    **dict.fromkeys(["flip", "fliplr_"], moving.flipped),
    "roll": moving.rolled,
    "pad": moving.padded,
    "unfold": moving.unfolded,
    "index_select": indexing.index_selected,
    "__getitem__": indexing.indexed,
    "__setitem__": indexing.assigned,
    "linear": products.linear,
    **dict.fromkeys(["matmul", "mm", "bmm", "mv", "__matmul__"], products.matmul),
    "__rmatmul__": products.rmatmul,
    **dict.fromkeys(["addmm", "baddbmm", "addmv"], products.addmm),
    "einsum": products.einsum,
    "tensordot": products.tensordot,
    "bilinear": products.bilinear,
    "broadcast_tensors": moving.broadcast,
    "scaled_dot_product_attention": products.attention,
    "embedding": products.embedding,
    "cdist": products.cdist,
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], products.recurrent),
}
# In-place forms are what they are out of place.
FAMILIES |= {
    f"{name}_": family
    for name, family in list(FAMILIES.items())
    if not name.startswith((".", "_")) and not name.endswith("_")
}
