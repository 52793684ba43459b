"""Names alone, for ``nn.functional``: each fused operation is defined in a file of its own.

``operations.pyi`` has their signatures as a caller sees them.
"""

from minigrad.kernels.attention import attention as attention
from minigrad.kernels.batch_norm import normalize_batch as normalize_batch
from minigrad.kernels.convolution import convolution as convolution
from minigrad.kernels.convolution import transposed_convolution as transposed_convolution
from minigrad.kernels.cross_entropy import cross_entropy as cross_entropy
from minigrad.kernels.dropout import drop as drop
from minigrad.kernels.embedding import embedding as embedding
from minigrad.kernels.gelu import gelu as gelu
from minigrad.kernels.layer_norm import layer_norm as layer_norm
from minigrad.kernels.linear import linear as linear
from minigrad.kernels.linear_attention import linear_attention as linear_attention
from minigrad.kernels.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from minigrad.kernels.linear_distillation import linear_distillation as linear_distillation
from minigrad.kernels.pooling import avg_pool as avg_pool
from minigrad.kernels.pooling import max_pool as max_pool
from minigrad.kernels.qkv_projection import qkv_projection as qkv_projection
from minigrad.kernels.quantized_blocks import block_product as block_product
from minigrad.kernels.relu import relu as relu
from minigrad.kernels.rms_norm import rms_norm as rms_norm
from minigrad.kernels.rope import apply_rope as apply_rope
from minigrad.kernels.softmax import log_softmax as log_softmax
from minigrad.kernels.softmax import softmax as softmax
from minigrad.kernels.swiglu import silu as silu
from minigrad.kernels.swiglu import swiglu as swiglu
from minigrad.kernels.swiglu_ffn import swiglu_ffn as swiglu_ffn
