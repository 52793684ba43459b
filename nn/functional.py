"""The functions behind the layers, for ``import nn.functional as F``: fused kernels under torch's names, and losses.

Masks are True where attention is allowed; classes are on the last axis; random numbers come from ``minigrad.random``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from minigrad import captures, random, sigmoid, softplus
from minigrad.backend import is_floating
from minigrad.errors import DTypeError
from minigrad.kernels.attention_patterns import BlockPattern, Pattern
from minigrad.kernels.operations import (
    apply_rope,
    attention,
    cross_entropy,
    drop,
    embedding,
    gelu,
    layer_norm,
    linear,
    linear_attention,
    linear_cross_entropy,
    linear_distillation,
    log_softmax,
    qkv_projection,
    relu,
    rms_norm,
    silu,
    softmax,
    swiglu,
    swiglu_ffn,
)
from minigrad.messages.explain import describe, explained
from minigrad.messages.habits import module_names
from minigrad.tensor import Operand, X
from .activation_functions import (
    celu,
    elu,
    glu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    logsigmoid,
    mish,
    prelu,
    relu6,
    selu,
    softshrink,
    softsign,
    tanhshrink,
)
from .checks import as_operand, check_probability
from .distances import cosine_similarity, normalize, pairwise_distance
from .losses import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_embedding_loss,
    gaussian_nll_loss,
    hinge_embedding_loss,
    huber_loss,
    kl_div,
    l1_loss,
    margin_ranking_loss,
    mse_loss,
    nll_loss,
    one_hot,
    poisson_nll_loss,
    smooth_l1_loss,
    soft_margin_loss,
    triplet_margin_loss,
)
from .spatial import (
    avg_pool1d,
    avg_pool2d,
    batch_norm,
    conv1d,
    conv2d,
    conv_transpose1d,
    conv_transpose2d,
    group_norm,
    max_pool1d,
    max_pool2d,
)

# fmt: off
__all__ = [
    "apply_rope", "avg_pool1d", "avg_pool2d", "batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "celu", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy", "dropout", "elu", "embedding", "gaussian_nll_loss", "gelu", "glu", "group_norm", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm",
    "leaky_relu", "linear", "linear_attention", "linear_cross_entropy", "linear_distillation", "log_softmax",
    "logsigmoid", "margin_ranking_loss", "max_pool1d", "max_pool2d", "mish", "mse_loss", "nll_loss", "normalize",
    "one_hot", "pairwise_distance", "poisson_nll_loss", "prelu", "qkv_projection", "relu", "relu6", "rms_norm",
    "scaled_dot_product_attention", "selu", "sigmoid", "silu",
    "smooth_l1_loss", "soft_margin_loss", "softmax", "softplus", "softshrink", "softsign", "swiglu", "swiglu_ffn",
    "tanhshrink", "triplet_margin_loss",
]
# fmt: on
__getattr__, __dir__ = module_names(globals())


def _draw_seed(generator: Any = None) -> Any:
    """A number by which dropout chooses; in a CUDA graph the place of one, which is drawn anew at each replay."""
    if captures.capturing():
        bits = random.generator(generator).bit_generator
        captures.undone(functools.partial(setattr, bits, "state", bits.state))
    return captures.number(lambda: int(random.generator(generator).integers(2**63)), np.uint64)


@explained
def dropout(x: Operand[X], p: float = 0.5, training: bool = True, generator: Any = None) -> X:
    """Each element 0 with probability ``p``, else multiplied by 1/(1-p); ``x`` itself for p = 0 or outside of training.

    generator: a ``numpy.random.Generator`` or a seed, by default that of ``minigrad.random``. One number is drawn from
    it; which elements are dropped depends on that and on their place alone, on every device.

    >>> print(dropout(np.ones(4), 0.5, generator=0))
    [2. 2. 0. 2.]
    """
    given: Any = x
    if check_probability(p) == 0 or not training:
        return given
    given = as_operand(given)
    if not is_floating(given.dtype):
        raise DTypeError("floating-point numbers to drop from", describe(given), "astype('float32') first")
    return drop(given, p, _draw_seed(generator))


@explained
def scaled_dot_product_attention(
    q: Operand[X],
    k: Operand[X],
    v: Operand[X],
    attn_mask: Operand[X] | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
    pattern: BlockPattern | Pattern | None = None,
) -> X:
    """``softmax(q kᵀ · scale + mask) v``: values averaged by how well their keys fit each query.

    q (..., heads, L, d), k (..., heads, S, d), v (..., heads, S, d_v) give (..., heads, L, d_v). Leading axes
    broadcast; q may have a multiple of the heads of k and v (grouped-query attention).

    - attn_mask: True where attention is allowed, or numbers added to the scores; broadcasts to (..., heads, L, S)
    - is_causal: query i sees keys j <= i alone, counted from the top left corner; a mask then restricts further
    - dropout_p: the probability with which a weight is dropped, in evaluation too: pass 0 there
    - scale: 1/√d if not given
    - window: query i sees keys with ``|i - j| < window`` alone, so that the time is linear in the length
    - pattern: an ``nn.BlockPattern``, which blocks of queries see which blocks of keys; the others cost nothing

    A query that may see no key gives 0. Vaswani et al., "Attention is all you need" (2017), eq. 1.

    >>> q = k = np.array([[1.0], [2.0]])
    >>> print(scaled_dot_product_attention(q, k, np.array([[3.0], [4.0]]), is_causal=True).round(4))
    [[3.    ]
     [3.8808]]
    """
    seed = _draw_seed() if dropout_p else 0
    queries, keys, values = (as_operand(x) for x in (q, k, v))
    mask = None if attn_mask is None else as_operand(attn_mask)
    return attention(queries, keys, values, mask, is_causal, scale, dropout_p, seed, window, pattern)
