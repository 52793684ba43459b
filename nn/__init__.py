"""Layers, from Linear and Conv2d to language models and the encoder-decoder.

>>> import minigrad as mg
>>> import nn
>>> model = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 1))
>>> loss = (model(mg.ones((4, 2))) ** 2).mean()
>>> loss.backward()
>>> [name for name, parameter in model.named_parameters() if parameter.grad is not None]
['0.weight', '0.bias', '2.weight', '2.bias']
"""

from minigrad.kernels.attention_patterns import BlockPattern
from minigrad.messages.habits import module_names
from . import functional
from .activation import GELU, GLU, Dropout, Flatten, LeakyReLU, ReLU, Sigmoid, SiLU, Tanh
from .adapting import (
    EWC,
    Replay,
    Reservoir,
    adapters,
    delete_adapter,
    disable_adapters,
    fisher,
    load_adapter,
    lora,
    merge_adapters,
    prefixes,
    save_adapter,
    set_adapter,
    unmerge_adapters,
)
from .attention import MultiHeadAttention
from .batch_norm import BatchNorm1d, BatchNorm2d
from .batches import batches
from .beam_search import Beam, beam_search
from .cache import KVCache
from .compressing import distillation_loss, quantize, save_gguf
from .containers import ModuleDict, ModuleList, Sequential
from .convolution import (
    AvgPool1d,
    AvgPool2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    MaxPool1d,
    MaxPool2d,
)
from .encoder_decoder import DecoderLayer, EncoderLayer, Transformer
from .evaluation import perplexity, sliding_windows, total_loss
from .feedforward import GEGLU, FeedForward, SwiGLU
from .functional_call import functional_call
from .generation import generate
from .linear import Embedding, Linear
from .linear_attention import LinearAttention
from .masks import causal_mask, pad_sequences, padding_mask
from .module import Module
from .normalization import GroupNorm, LayerNorm, RMSNorm
from .parameter import Parameter
from .positional import RotaryEmbedding, SinusoidalPositionalEncoding
from .pretrained import load_llama, load_pretrained, save_llama, save_pretrained
from .sampling import next_token_probabilities
from .summary import summary
from .transformer import TransformerBlock, TransformerLM

__all__ = [
    "EWC",
    "GEGLU",
    "GELU",
    "GLU",
    "AvgPool1d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Beam",
    "BlockPattern",
    "Conv1d",
    "Conv2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "DecoderLayer",
    "Dropout",
    "Embedding",
    "EncoderLayer",
    "FeedForward",
    "Flatten",
    "GroupNorm",
    "KVCache",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LinearAttention",
    "MaxPool1d",
    "MaxPool2d",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiHeadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Replay",
    "Reservoir",
    "RotaryEmbedding",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SinusoidalPositionalEncoding",
    "SwiGLU",
    "Tanh",
    "Transformer",
    "TransformerBlock",
    "TransformerLM",
    "adapters",
    "batches",
    "beam_search",
    "causal_mask",
    "delete_adapter",
    "disable_adapters",
    "distillation_loss",
    "fisher",
    "functional",
    "functional_call",
    "generate",
    "load_adapter",
    "load_llama",
    "load_pretrained",
    "lora",
    "merge_adapters",
    "next_token_probabilities",
    "pad_sequences",
    "padding_mask",
    "perplexity",
    "prefixes",
    "quantize",
    "save_adapter",
    "save_gguf",
    "save_llama",
    "save_pretrained",
    "set_adapter",
    "sliding_windows",
    "summary",
    "total_loss",
    "unmerge_adapters",
]
__getattr__, __dir__ = module_names(globals())
