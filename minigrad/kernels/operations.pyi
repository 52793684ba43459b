"""What ``minigrad.kernels.operations`` exports, as a caller sees it. Written by tests/support/signatures.py."""

from collections.abc import Iterable, Sequence
from typing import Any

from minigrad.backend import Axes, DType, Seed, Shape
from minigrad.tensor import Operand, X

def apply_rope(x: Operand[X], cos: Operand[X], sin: Operand[X], layout: str = "interleaved") -> X: ...
def attention(
    q: Operand[X],
    k: Operand[X],
    v: Operand[X],
    mask: Operand[X] | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Seed = 0,
    window: int | None = None,
    pattern: Any = None,
) -> X: ...
def avg_pool(
    x: Operand[X],
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> X: ...
def block_product(x: Operand[X], blocks: Operand[X], layout: str, transposed: bool = False) -> X: ...
def convolution(
    x: Operand[X],
    weight: Operand[X],
    bias: Operand[X] | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> X: ...
def cross_entropy(
    logits: Operand[X],
    targets: Operand[X],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> X: ...
def drop(x: Operand[X], p: float, seed: Seed) -> X: ...
def embedding(ids: Operand[X], weight: Operand[X], padding_idx: int | None = None) -> X: ...
def gelu(x: Operand[X], approximate: str = "none") -> X: ...
def layer_norm(
    x: Operand[X],
    normalized_shape: Shape | None = None,
    weight: Operand[X] | None = None,
    bias: Operand[X] | None = None,
    eps: float = 1e-05,
) -> X: ...
def linear(x: Operand[X], weight: Operand[X], bias: Operand[X] | None = None) -> X: ...
def linear_attention(
    q: Operand[X],
    k: Operand[X],
    v: Operand[X],
    mask: Operand[X] | None = None,
    is_causal: bool = False,
    feature_map: str = "elu+1",
    decay: Any = None,
    chunk: int | None = None,
) -> X: ...
def linear_cross_entropy(
    x: Operand[X],
    weight: Operand[X],
    targets: Operand[X],
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> X: ...
def linear_distillation(
    x: Operand[X],
    weight: Operand[X],
    teacher_x: Operand[X],
    teacher_weight: Operand[X],
    targets: Operand[X],
    temperature: float = 2.0,
    mix: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> X: ...
def log_softmax(x: Operand[X], axis: int = -1) -> X: ...
def max_pool(
    x: Operand[X], kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> X: ...
def normalize_batch(
    x: Operand[X], weight: Operand[X] | None = None, bias: Operand[X] | None = None, eps: float = 1e-05
) -> tuple[X, X, X]: ...
def qkv_projection(
    x: Operand[X],
    wq: Operand[X],
    wk: Operand[X],
    wv: Operand[X],
    norm_weight: Operand[X] | None = None,
    eps: float = 1e-05,
    cos: Operand[X] | None = None,
    sin: Operand[X] | None = None,
) -> tuple[X, X, X]: ...
def relu(x: Operand[X]) -> X: ...
def rms_norm(
    x: Operand[X], normalized_shape: Shape | None = None, weight: Operand[X] | None = None, eps: float = 1e-05
) -> X: ...
def silu(x: Operand[X]) -> X: ...
def softmax(x: Operand[X], axis: int = -1) -> X: ...
def swiglu(gate: Operand[X], up: Operand[X]) -> X: ...
def swiglu_ffn(
    x: Operand[X],
    w1: Operand[X],
    w3: Operand[X],
    w2: Operand[X],
    norm_weight: Operand[X] | None = None,
    eps: float = 1e-05,
    recompute: bool | str = False,
) -> X: ...
def transposed_convolution(
    x: Operand[X],
    weight: Operand[X],
    bias: Operand[X] | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> X: ...
