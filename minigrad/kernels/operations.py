"""The fused operations, for ``nn.functional``; ``operations.pyi`` has their signatures as a caller sees them."""

from minigrad.kernels.attention import attention
from minigrad.kernels.cross_entropy import cross_entropy
from minigrad.kernels.dropout import drop
from minigrad.kernels.embedding import embedding
from minigrad.kernels.gelu import gelu
from minigrad.kernels.layer_norm import layer_norm
from minigrad.kernels.linear import linear
from minigrad.kernels.linear_cross_entropy import linear_cross_entropy
from minigrad.kernels.qkv_projection import qkv_projection
from minigrad.kernels.relu import relu
from minigrad.kernels.rms_norm import rms_norm
from minigrad.kernels.rope import apply_rope
from minigrad.kernels.softmax import log_softmax, softmax
from minigrad.kernels.swiglu import silu, swiglu
from minigrad.kernels.swiglu_ffn import swiglu_ffn

# fmt: off
__all__ = [
    "apply_rope", "attention", "cross_entropy", "drop", "embedding", "gelu", "layer_norm", "linear",
    "linear_cross_entropy", "log_softmax", "qkv_projection", "relu", "rms_norm", "silu", "softmax", "swiglu",
    "swiglu_ffn",
]
# fmt: on
