"""What people type out of habit from torch, and what to type here: tables of names and of keywords."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any

from minigrad.errors import AttributeHintError

# A name of torch: of a tensor, of the module ``torch`` itself, of its ``nn`` and ``nn.functional``.
NAMES = {
    # arrays
    "view": "reshape", "permute": "transpose", "unsqueeze": "expand_dims(axis)", "numel": "size", "dim": "ndim",
    "cat": "minigrad.concatenate", "concat": "minigrad.concatenate", "hstack": "minigrad.concatenate(…, axis=1)",
    "vstack": "minigrad.concatenate(…, axis=0)", "expand": "broadcast_to", "gather": "take_along_axis",
    "scatter": "put_along_axis", "index_select": "take", "index_add": "scatter_add", "masked_select": "x[mask]",
    "t": "T", "mT": "swapaxes(-1, -2)", "chunk": "array_split", "narrow": "x[start:stop]", "movedim": "moveaxis",
    "repeat_interleave": "repeat", "contiguous": "nothing: operations take any layout", "clone": "copy",
    "fill_diagonal": "where", "unbind": "list(x)", "flatten": "ravel",
    # dtypes and devices
    "type": "astype", "float": "astype('float32')", "double": "astype('float64')", "half": "astype('float16')",
    "bfloat16": "astype('bfloat16')", "long": "astype('int64')", "int": "astype('int32')", "bool": "astype('bool')",
    "cpu": "to('cpu')", "device": "the name of a device: 'cpu' or 'cuda:0'",
    "dtype": "the name of a dtype: 'float32'", **{name: f"the name {name!r}, or np.{name}" for name in (
        "float16", "float32", "float64", "int8", "uint8", "int32", "int64")},
    # arithmetic
    "clamp": "clip", "mm": "matmul", "bmm": "matmul", "mv": "matmul", "pow": "power", "mul": "multiply",
    "sub": "subtract", "div": "divide", "true_divide": "divide", "neg": "negative", "rsqrt": "1 / minigrad.sqrt(x)",
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2", "asinh": "arcsinh", "acosh": "arccosh",
    "atanh": "arctanh", "floor_divide": "floor(x / y)", "fix": "trunc", "relu": "nn.functional.relu",
    "gelu": "nn.functional.gelu", "silu": "nn.functional.silu", "equal": "(x == y).all()", "eq": "x == y",
    "ne": "x != y", "lt": "x < y", "le": "x <= y", "gt": "x > y", "ge": "x >= y", "logical_not": "x == 0",
    "median": "sort", "argwhere": "np.argwhere(x)", "nonzero": "np.nonzero(x)",
    # gradients
    "requires_grad_": "x.requires_grad = True", "detach_": "detach()", "zero_": "x.data = 0 * x.data",
    "grad_fn": "x.node; minigrad.draw(x) shows the graph", "is_leaf": "x.node is None",
    "retain_grad": "register_hook, or minigrad.grad",
    "data_ptr": "x.data", "autograd": "minigrad.grad, minigrad.functional",
    "set_grad_enabled": "minigrad.no_grad, enable_grad",
    "inference_mode": "minigrad.no_grad", "func": "minigrad.functional", "compile": "nothing: there is no compiler",
    # matrices
    "eig": "minigrad.linalg.eigh of a symmetric matrix", "eigvals": "minigrad.linalg.eigvalsh of a symmetric matrix",
    "inverse": "minigrad.linalg.inv", "lu_factor": "minigrad.linalg.solve", "matrix_exp": "minigrad.linalg.expm",
    "logdet": "minigrad.linalg.slogdet", "cholesky_solve": "minigrad.linalg.solve_triangular",
    # making arrays
    "rand": "minigrad.random.uniform(size=shape)", "randn": "minigrad.random.normal(size=shape)",
    "randint": "minigrad.random.randint", "randperm": "minigrad.random.permutation",
    "manual_seed": "minigrad.random.seed",
    "from_numpy": "minigrad.asarray", "as_tensor": "minigrad.asarray", "array": "minigrad.Tensor",
    "empty": "minigrad.zeros", "linspace": "minigrad.asarray(np.linspace(…))", "zeros_like": "0 * x",
    "ones_like": "0 * x + 1", "full_like": "minigrad.full(x.shape, …)", "new_zeros": "minigrad.zeros",
    "new_ones": "minigrad.ones", "new_tensor": "minigrad.Tensor", "allclose": "np.allclose",
    "nn": "from minigrad import nn", "optim": "from minigrad import optim",
    "Parameter": "nn.Parameter", "RMSprop": "optim.Adam", "Adagrad": "optim.Adam",
    "lr_scheduler": "optim.cosine_schedule, step_schedule",
    # layers and losses
    "MultiheadAttention": "nn.MultiHeadAttention", "Identity": "nn.Sequential()",
    "AdaptiveAvgPool1d": "x.mean(-1)", "AdaptiveAvgPool2d": "x.mean((-2, -1))", "Softplus": "minigrad.softplus(x)",
    "Softmax": "minigrad.softmax(x)", "LogSoftmax": "minigrad.log_softmax(x)",
    "CrossEntropyLoss": "nn.functional.cross_entropy", "NLLLoss": "nn.functional.nll_loss",
    "HuberLoss": "nn.functional.huber_loss", "StepLR": "optim.step_schedule", "DataLoader": "nn.batches",
    "MSELoss": "nn.functional.mse_loss", "KLDivLoss": "nn.functional.kl_div",
    "BCEWithLogitsLoss": "nn.functional.binary_cross_entropy_with_logits",
    "BCELoss": "nn.functional.binary_cross_entropy_with_logits",
    "binary_cross_entropy": "binary_cross_entropy_with_logits", "L1Loss": "minigrad.absolute(x - y).mean()",
    "l1_loss": "minigrad.absolute(x - y).mean()", "logsigmoid": "-minigrad.softplus(-x)",
    "ParameterList": "attributes of an nn.Module, one for each", "init": "x.data = …",
    "utils": "optim.clip_grad_norm, nn.batches", "clip_grad_norm_": "optim.clip_grad_norm",
    **dict.fromkeys(("Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD"), "optim.Adam"),
    "LBFGS": "scipy.optimize.minimize, with minigrad.value_and_grad",
}  # fmt: skip

# Names that another library has and this one won't, with the reason.
OUT_OF_SCOPE = {
    **dict.fromkeys(("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"),
        "layers that run step by step are slow on arrays; a cell is a Module of two nn.Linear"),
    **dict.fromkeys(("Dataset", "TensorDataset", "IterableDataset", "data"),
        "data are arrays, and a batch of them is data[rows]; a memory-mapped file is one too"),
    **dict.fromkeys(("Conv3d", "ConvTranspose3d", "MaxPool3d", "AvgPool3d", "BatchNorm3d", "conv3d"),
        "minigrad has no layers for volumes"),
    **dict.fromkeys(("complex64", "complex128", "complex", "cfloat", "view_as_complex", "polar", "fft", "stft"),
        "every number is real; a Fourier transform of data, without a gradient, is np.fft's"),
    **dict.fromkeys(("sparse", "sparse_coo_tensor", "to_sparse", "sparse_csr_tensor"),
        "arrays are dense; scatter_add and nn.Embedding work by index"),
    "jit": "there is no compiler; fused operations have kernels already",
    "onnx": "weights are saved as safetensors, which every library reads",
    "distributions": "minigrad.random draws the numbers",
    "multiprocessing": "arrays are NumPy's, which any process pool takes",
}  # fmt: skip

# A keyword of torch, or of an older habit, and the one here; a hint is given where the function has that one.
KEYWORDS = {
    "dim": "axis", "dims": "axis", "keepdim": "keepdims", "other": "y", "input": "x", "exponent": "y", "dim0": "axis1",
    "dim1": "axis2", "index": "indices", "src": "values", "unbiased": "ddof", "correction": "ddof", "p": "ord",
    "chunks": "indices_or_sections",
    "embed_dim": "d_model", "dim_feedforward": "d_ff", "nhead": "num_heads", "tensors": "arrays", "shifts": "shift",
    "diagonal": "k", "pad": "pad_width", "value": "constant_values", "fill_value": "value", "size": "shape",
    "learning_rate": "lr", "beta1": "betas", "beta2": "betas", "epsilon": "eps", "l2": "weight_decay",
}  # fmt: skip

# A keyword of torch for which none of ours means the same, and what to write.
INSTEAD = {
    "descending": "flip(…, axis) turns the ascending order around",
    "largest": "topk of -x finds the smallest",
    "split_size": "indices_or_sections= counts the pieces, or says where to cut",
}


def keyword_hint(unknown: str, known: Collection[str]) -> str:
    """What to do about a keyword that a function with the arguments ``known`` doesn't have.

    >>> keyword_hint("dim", ["x", "axis"])
    'axis= takes the place of dim='
    >>> keyword_hint("weightdecay", ["lr", "weight_decay"])
    'weight_decay= may be what is meant'
    """
    if unknown in INSTEAD:
        return INSTEAD[unknown]
    if KEYWORDS.get(unknown) in known:
        return f"{KEYWORDS[unknown]}= takes the place of {unknown}="
    alike = get_close_matches(unknown, known, 1, 0.75)
    return f"{alike[0]}= may be what is meant" if alike else f"there is no {unknown}="


def unknown_name(owner: Any, label: str, name: str) -> AttributeError:
    """The error for ``owner.name``: with our name for a name of torch; Python itself adds one that is spelled alike.

    >>> print(unknown_name(object(), "x", "view").hint)
    use reshape
    """
    if name.startswith("_"):  # what Python and NumPy look for
        return AttributeError(f"{label} has no attribute {name!r}", name=name, obj=owner)
    error = AttributeHintError(f"a name that {label} has", f".{name}", _name_hint(name))
    error.name, error.obj = name, owner
    return error


def _name_hint(name: str) -> str:
    for module in ("minigrad", "nn", "nn.functional", "optim"):
        if name in getattr(sys.modules.get(module), "__all__", ()):
            return f"use {module}.{name}"
    if name in NAMES:
        return f"use {NAMES[name]}"
    if name in OUT_OF_SCOPE:
        return f"out of scope: {OUT_OF_SCOPE[name]}"
    if name.endswith("_"):
        return f"nothing works in place: x = x.{NAMES.get(name[:-1], name[:-1])}(…)"
    return "dir() lists them"


def module_names(module: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module with these globals: hints for names of torch, and no private ones."""

    def missing(name: str) -> Any:
        raise unknown_name(None, module["__name__"], name)

    return missing, lambda: sorted({*module["__all__"], *(name for name in module if name.startswith("__"))})
