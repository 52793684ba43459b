"""Class Tensor: an array, its gradient, and the node that made it. Its methods are the operations, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from minigrad import ops
from minigrad.backend import (
    Array,
    ArrayLike,
    Axes,
    DType,
    NDArray,
    Shape,
    array_module,
    array_of,
    as_dtype,
    check_device,
    device_of,
    is_array,
    is_floating,
    to_device,
    to_numpy,
)
from minigrad.engine import core
from minigrad.engine.backward import backward
from minigrad.engine.recording import Setting, current_mode
from minigrad.errors import ArgumentError, CallError, DeviceError, DTypeError, GraphError, ShapeError
from minigrad.kernels.operations import log_softmax, softmax
from minigrad.messages.arguments import as_operand, from_lists
from minigrad.messages.explain import FOREIGN, describe, explain_methods, translate
from minigrad.messages.habits import refuse_names
from minigrad.numpy_protocol import UFUNCS, array_function, array_ufunc, compare

TensorLike: TypeAlias = "Tensor | ArrayLike"
Hook: TypeAlias = Callable[[Any], Any]  # of a gradient, an array or a Tensor, to what takes its place, or None


class RunsAgain(Setting):
    """Inside, a function of ``checkpoint`` runs, and will run once more, or does so: what it adds would double."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.again = again


class Handle:
    """What ``register_hook`` gives; ``remove()`` takes the hook away again."""

    def __init__(self, hooks: list[Hook], hook: Hook) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        """Take the hook away; a second call does nothing."""
        hooks, self._hooks = self._hooks, []
        if self._hook in hooks:
            hooks.remove(self._hook)


_new, _NUMBERS = object.__new__, (np.generic, int, float)


class _Habits:
    """Names that people try on a tensor: ``refuse_names`` puts them here."""

    __slots__ = ()


class Tensor(_Habits):
    """An array that remembers how it was made, so that ``backward`` can find the gradients.

    data            numbers: an array (copied), nested lists, a number, another Tensor
    requires_grad   True for a leaf whose ``grad`` is wanted; only floating-point tensors have gradients
    dtype, device   by default those of ``data``; a list of floats is float64, as in NumPy

    ``.data`` and ``.grad`` are plain arrays. Assigning ``t.data = a`` keeps shape and dtype, and is noticed if a graph
    needed the old numbers; a write through the array itself (``t.data[0] = 1``) can't be noticed. ``.node`` is what is
    remembered of the operation that made a recorded result (``core.Node``); that of a leaf or constant is None.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> y = (x * x).sum()
    >>> y.backward()
    >>> print(x.grad, x.node, y.node.primitive.name)
    [2. 4.] None sum
    """

    __slots__ = ("__weakref__", "_data", "_grad", "_hooks", "_requires_grad", "_version", "name", "node")

    _oldest = 0  # as ``core.Node`` has it; a transform numbers the leaves that it makes
    __hash__ = object.__hash__
    __array_priority__ = 1000.0

    _data: NDArray
    _requires_grad: bool
    _version: list[int]
    _hooks: list[Hook] | None
    _grad: NDArray | None
    name: str | None
    node: core.Node | None

    def __init__(
        self, data: TensorLike, requires_grad: bool = False, dtype: DType = None, device: str | None = None
    ) -> None:
        self._fill(as_array(data, dtype, device, copy=True))
        self.requires_grad = requires_grad

    def _fill(self, array: Array) -> None:
        self._data = array
        self._grad = self.node = self._hooks = self.name = None
        self._requires_grad = False
        self._version = [0]

    @staticmethod
    def _wrap(array: Array) -> Tensor:
        """A Tensor around an array, or around the number that an operation gave in place of a 0-d array."""
        tensor = _new(Tensor)
        tensor._data = array if type(array) is np.ndarray or not isinstance(array, _NUMBERS) else np.asarray(array)
        tensor._grad = tensor.node = tensor._hooks = tensor.name = None
        tensor._requires_grad = False
        tensor._version = [0]
        return tensor

    @staticmethod
    def _joined(lists: Any) -> Tensor:
        """The Tensor that nested lists with Tensors in them stand for, wherever an array is meant."""
        tensor: Tensor = ops.from_nested(lists)
        return tensor

    # ---- what it is ----

    @property
    def data(self) -> NDArray:
        """The numbers, as a plain array of the device."""
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        array = array_module(self._data).asarray(array_of(as_operand(value, ".data")), dtype=self._data.dtype)
        if array.shape != self._data.shape:
            raise ShapeError(f"data of shape {self.shape}", f"shape {array.shape}", "make a new Tensor instead")
        self._data = array
        self.bump_version()

    @property
    def grad(self) -> NDArray | None:
        """The gradient that backward passes have added up here, a plain array, or None."""
        return self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if isinstance(value, np.generic):  # NumPy's number in place of an array of shape ()
            value = np.asarray(value)
        if value is not None:
            if not is_array(value) or not is_floating(value.dtype):
                got = value._brief() if isinstance(value, Tensor) else describe(value)
                hint = "assign g.data" if isinstance(value, Tensor) else "or None, for no gradient"
                raise DTypeError("a plain array of floating-point numbers as .grad", got, hint)
            if value.shape != self.shape:
                hint = "a gradient has the shape of what it is the gradient of"
                raise ShapeError(f"a gradient of shape {self.shape}", f"shape {value.shape}", hint)
            if device_of(value) != self.device:
                raise DeviceError(f"a gradient on {self.device}", device_of(value), "x.device says where x is")
        self._grad = value

    @property
    def requires_grad(self) -> bool:
        """Whether gradients flow to or through this tensor."""
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self.node is not None and not value:
            raise GraphError("a leaf", f"the result of {self.node.primitive.label!r}", "use .detach()")
        if value and not is_floating(self._data.dtype):
            hint = "write 1.0 for 1, or pass dtype='float32'"
            raise DTypeError("a floating-point tensor, the only kind that has a gradient", str(self.dtype), hint)
        self._requires_grad = bool(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        return self._data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the elements."""
        return self._data.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._data.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._data.size

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda:N``."""
        return device_of(self._data)

    @property
    def T(self) -> Tensor:
        """The tensor with its axes reversed."""
        return ops.transpose(self)

    @property
    def mT(self) -> Tensor:
        """The tensor with its last two axes exchanged: stacks of matrices, transposed."""
        return ops.swapaxes(self, -1, -2)

    def _brief(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        article = "an" if self.dtype.kind == "i" else "a"
        return f"{article} {self.dtype} tensor{name} of shape {self.shape}"

    def __repr__(self) -> str:
        numbers = np.array2string(to_numpy(self._data), separator=", ", prefix="Tensor(", threshold=1000)
        facts = [] if self.dtype in (np.float64, np.int64, np.bool_) else [f"dtype={self.dtype}"]
        facts += [] if self.device == "cpu" else [f"device={self.device!r}"]
        facts += [f"name={self.name!r}"] if self.name else []
        if self.node is not None:
            facts.append(f"made by {self.node.primitive.label}")
        elif self._requires_grad:
            facts.append("requires_grad=True")
        return f"{type(self).__name__}({', '.join([numbers, *facts])})"

    # ---- gradients ----

    def backward(self, gradient: TensorLike | None = None, retain_graph: bool = False) -> None:
        """Add the gradient of this tensor to ``grad`` of every leaf that it was made from.

        gradient      that of a loss with respect to this tensor, in its shape; 1 by default, for a single number
        retain_graph  keep what the derivatives read, for another pass; by default it is freed on the way

        >>> x = Tensor(3.0, requires_grad=True)
        >>> (x * x).backward(); print(x.grad)
        6.0
        """
        if any(isinstance(setting, RunsAgain) for setting in current_mode().blocks):
            hint = "minigrad.grad(loss, tensors) returns them; or call backward() outside of the function"
            raise GraphError("no gradients added in a function under checkpoint, which runs twice", "backward()", hint)
        backward(self, gradient, retain_graph)

    def detach(self) -> Tensor:
        """The same numbers, shared, as a constant."""
        tensor = Tensor._wrap(self._data)
        tensor._version = self._version
        return tensor

    def bump_version(self) -> None:
        """Note a change of the numbers in place. A backward pass that needs the old ones then raises a GraphError."""
        self._version[0] += 1

    def register_hook(self, hook: Hook) -> Handle:
        """Call ``hook`` with the complete gradient of this tensor; what it returns, if not None, takes its place.

        The gradient is an array, or a Tensor under ``create_graph``. Hooks of a result die with its graph.
        """
        if not callable(hook):
            raise CallError("a function of the gradient as hook", describe(hook), "x.register_hook(lambda g: 2 * g)")
        if not self._requires_grad:
            raise GraphError("a tensor that a gradient reaches", self._brief(), "set requires_grad=True")
        holder: Any = self.node or self
        if holder._hooks is None:
            holder._hooks = []
        holder._hooks.append(hook)
        return Handle(holder._hooks, hook)

    # ---- in and out ----

    def _read(self) -> Array:
        """The array, for other uses than an operation; the observers are told."""
        if core.observers:
            core.notify("read", (self,))
        return self._data

    def numpy(self) -> NDArray:
        """The numbers as a NumPy array: shared on the CPU, copied from a GPU."""
        return to_numpy(self._read())

    def item(self) -> Any:
        """The only element as a Python number."""
        if self.size != 1:
            raise ShapeError("a tensor with one element", f"shape {self.shape}", "tolist() gives all of them")
        return self._read().item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return self._read().tolist()

    def copy(self) -> Tensor:
        """The same numbers in new memory; a gradient flows through."""
        return ops.astype(self, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self._requires_grad and current_mode().recording:
            got = f"a NumPy array made of {self._brief()}, through which no gradient flows"
            hint = "minigrad's function of that name or minigrad.stack; x.numpy() for the numbers alone"
            raise GraphError("a function that records what it does", got, hint)
        array = to_numpy(self._read())
        return np.array(array, dtype=dtype, copy=copy) if copy is not None else np.asarray(array, dtype=dtype)

    def __dlpack__(self, **options: Any) -> Any:
        if min(self._data.strides, default=0) < 0:  # torch would end the process
            raise ArgumentError("an array that no axis of runs backwards", f"strides {self._data.strides}", "t.copy()")
        return self._data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._data.__dlpack_device__()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "__call__" and not options and ufunc in UFUNCS:
            return UFUNCS[ufunc](*inputs)
        return array_ufunc(ufunc, method, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return array_function(function, args, kwargs)

    @property
    def _mask(self) -> Any:  # np.ma asks, and would go on with our numbers alone
        hint = "x.numpy() to plot it; array.filled(0) for a masked array, and its mask beside it"
        raise DTypeError("plain arrays and tensors", "a masked array with or of a tensor", hint)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in vars(_Habits) or name.startswith("_")]

    def __copy__(self) -> Tensor:
        made = type(self).__new__(type(self))
        made._fill(self._data)
        made._version, made.node, made._requires_grad = self._version, self.node, self._requires_grad
        made.name = self.name
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if self.node is not None:
            raise GraphError("a leaf to copy", f"the result of {self.node.primitive.label!r}", "copy .detach()")
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made._fill(self._data.copy())
        made._requires_grad, made.name = self._requires_grad, self.name
        made._grad = None if self._grad is None else self._grad.copy()
        return made

    def __reduce__(self) -> Any:
        if self.node is not None:
            raise GraphError("a leaf to pickle", f"the result of {self.node.primitive.label!r}", "pickle .detach()")
        return _rebuild, (type(self), self.numpy(), self._requires_grad, self.name)

    # ---- Python's own ----

    def __len__(self) -> int:
        if self.ndim == 0:
            raise CallError("a tensor with at least one axis", "len() of a scalar tensor", "x.size counts elements")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if self.ndim == 0:
            raise CallError(
                "a tensor with at least one axis", "iteration over a scalar tensor", "x.item() is its number"
            )
        return (self[i] for i in range(self.shape[0]))

    def __bool__(self) -> bool:
        if self.size != 1:
            hint = "use (…).any() or (…).all()"
            raise ShapeError("a single element to be true or false", f"shape {self.shape}", hint)
        return bool(self.item())

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def _number(self) -> Any:
        """The only element, which ``float`` and ``math.exp`` ask for; in a transform they would cut the graph."""
        mode = current_mode()
        if self._requires_grad and mode.transforming and mode.recording:
            got = f"a Python number made of {self._brief()}, through which no gradient flows"
            hint = "minigrad's function in place of math's; x.item() for the number alone"
            raise GraphError("a function that records what it does", got, hint)
        return self.item()

    def __index__(self) -> int:
        if self._data.dtype.kind not in "iu":
            raise DTypeError("an integer tensor as an index", str(self.dtype), "int(x) cuts the fraction off")
        return int(self.item())

    def __format__(self, spec: str) -> str:
        value = self.item() if spec and self.size == 1 else repr(self)
        try:
            return format(value, spec)
        except ValueError as error:
            hint = "np.array2string(x.numpy(), precision=3) formats many numbers"
            raise ArgumentError("a format that fits", f"{spec!r} for {self._brief()}: {error}", hint) from None

    def __getitem__(self, index: Any) -> Tensor:
        return ops.getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if self._requires_grad:
            hint = "use minigrad.where, put_along_axis or scatter_add, which return new tensors"
            raise GraphError("a tensor without a history to assign into", self._brief(), hint)
        self._write(index, value)

    def _write(self, index: Any, value: Any) -> None:
        """Change elements in place."""
        given = as_operand(value, "the values of x[index]")
        if isinstance(given, Tensor) and given._requires_grad and current_mode().recording:
            hint = (
                "minigrad.stack, where or put_along_axis make a tensor that records; .detach() gives the numbers alone"
            )
            raise GraphError("values without a history to assign", given._brief(), hint)
        new = array_of(given)
        if not getattr(self._data.flags, "writeable", True):
            hint = "x.data = x.data.copy() gives it numbers of its own"
            raise ArgumentError("numbers that can be written to", f"{self._brief()}, a read-only array", hint)
        try:
            place = ops.placed(ops.plain_index(index), self._data)
            self._data[place] = to_device(new, self.device) if is_array(new) else new
        except FOREIGN as error:
            call = f"{describe(self)}[{describe(index)}] = {describe(value)}"
            raise translate(call, "x[index] = values", (self,), error) from None
        self.bump_version()

    def _in_place(self, sign: str, made: Tensor) -> Tensor:
        """What ``x += y`` makes of x, from ``x + y``: x itself if it is a leaf, under ``no_grad``; else the result."""
        if self.node is not None or not self._requires_grad:
            return made
        if current_mode().recording:
            got = f"{sign}= of a leaf, {self._brief()}, whose .grad would stay None"
            hint = f"y = x {sign} … makes another tensor; under minigrad.no_grad() {sign}= changes the leaf itself"
            raise GraphError("a result of operations on the left, or no_grad()", got, hint)
        if made.shape != self.shape:
            hint = f"y = x {sign} … makes another tensor"
            raise ShapeError(f"a result of the leaf's shape {self.shape} for {sign}=", f"shape {made.shape}", hint)
        self._write(..., made)
        return self

    def __floordiv__(self, other: Any) -> Any:
        hint = "minigrad.floor(x / y), whose derivative is 0; x % y is the remainder"
        raise CallError("an operation that minigrad has", "//, or divmod", hint)

    __rfloordiv__ = __divmod__ = __rdivmod__ = __floordiv__

    # fmt: off
    # ---- operators ----

    def __add__(self, other: TensorLike) -> Tensor: return ops.add(self, other)
    def __radd__(self, other: TensorLike) -> Tensor: return ops.add(other, self)
    def __sub__(self, other: TensorLike) -> Tensor: return ops.subtract(self, other)
    def __rsub__(self, other: TensorLike) -> Tensor: return ops.subtract(other, self)
    def __mul__(self, other: TensorLike) -> Tensor: return ops.multiply(self, other)
    def __rmul__(self, other: TensorLike) -> Tensor: return ops.multiply(other, self)
    def __truediv__(self, other: TensorLike) -> Tensor: return ops.divide(self, other)
    def __rtruediv__(self, other: TensorLike) -> Tensor: return ops.divide(other, self)
    def __pow__(self, other: TensorLike) -> Tensor: return ops.power(self, other)
    def __rpow__(self, other: TensorLike) -> Tensor: return ops.power(other, self)
    def __matmul__(self, other: TensorLike) -> Tensor: return ops.matmul(self, other)
    def __rmatmul__(self, other: TensorLike) -> Tensor: return ops.matmul(other, self)
    def __mod__(self, other: TensorLike) -> Tensor: return ops.remainder(self, other)
    def __rmod__(self, other: TensorLike) -> Tensor: return ops.remainder(other, self)
    def __neg__(self) -> Tensor: return ops.negative(self)
    def __pos__(self) -> Tensor: return self
    def __abs__(self) -> Tensor: return ops.absolute(self)

    def __iadd__(self, other: TensorLike) -> Tensor: return self._in_place("+", self + other)
    def __isub__(self, other: TensorLike) -> Tensor: return self._in_place("-", self - other)
    def __imul__(self, other: TensorLike) -> Tensor: return self._in_place("*", self * other)
    def __itruediv__(self, other: TensorLike) -> Tensor: return self._in_place("/", self / other)
    def __ipow__(self, other: TensorLike) -> Tensor: return self._in_place("**", self ** other)
    def __imatmul__(self, other: TensorLike) -> Tensor: return self._in_place("@", self @ other)
    def __imod__(self, other: TensorLike) -> Tensor: return self._in_place("%", self % other)

    # Comparisons and logic give plain boolean tensors, without a derivative.

    def __eq__(self, other: object) -> Tensor: return _same('equal', self, other)  # type: ignore[override]
    def __ne__(self, other: object) -> Tensor: return _same('not_equal', self, other)  # type: ignore[override]
    def __lt__(self, other: TensorLike) -> Tensor: return compare('less', self, other)
    def __le__(self, other: TensorLike) -> Tensor: return compare('less_equal', self, other)
    def __gt__(self, other: TensorLike) -> Tensor: return compare('greater', self, other)
    def __ge__(self, other: TensorLike) -> Tensor: return compare('greater_equal', self, other)
    def __and__(self, other: TensorLike) -> Tensor: return compare('bitwise_and', self, other)
    def __or__(self, other: TensorLike) -> Tensor: return compare('bitwise_or', self, other)
    def __xor__(self, other: TensorLike) -> Tensor: return compare('bitwise_xor', self, other)
    def __rand__(self, other: TensorLike) -> Tensor: return compare('bitwise_and', other, self)
    def __ror__(self, other: TensorLike) -> Tensor: return compare('bitwise_or', other, self)
    def __rxor__(self, other: TensorLike) -> Tensor: return compare('bitwise_xor', other, self)
    def __invert__(self) -> Tensor: return compare('invert', self)

    # ---- operations, as methods: their docstrings are in minigrad.ops ----

    def absolute(self) -> Tensor: return ops.absolute(self)
    def abs(self) -> Tensor: return ops.absolute(self)
    def sign(self) -> Tensor: return ops.sign(self)
    def sqrt(self) -> Tensor: return ops.sqrt(self)
    def square(self) -> Tensor: return ops.square(self)
    def reciprocal(self) -> Tensor: return ops.reciprocal(self)
    def negative(self) -> Tensor: return ops.negative(self)
    def exp(self) -> Tensor: return ops.exp(self)
    def expm1(self) -> Tensor: return ops.expm1(self)
    def exp2(self) -> Tensor: return ops.exp2(self)
    def log(self) -> Tensor: return ops.log(self)
    def log1p(self) -> Tensor: return ops.log1p(self)
    def log2(self) -> Tensor: return ops.log2(self)
    def log10(self) -> Tensor: return ops.log10(self)
    def sin(self) -> Tensor: return ops.sin(self)
    def cos(self) -> Tensor: return ops.cos(self)
    def tan(self) -> Tensor: return ops.tan(self)
    def arcsin(self) -> Tensor: return ops.arcsin(self)
    def arccos(self) -> Tensor: return ops.arccos(self)
    def arctan(self) -> Tensor: return ops.arctan(self)
    def sinh(self) -> Tensor: return ops.sinh(self)
    def cosh(self) -> Tensor: return ops.cosh(self)
    def tanh(self) -> Tensor: return ops.tanh(self)
    def arcsinh(self) -> Tensor: return ops.arcsinh(self)
    def arccosh(self) -> Tensor: return ops.arccosh(self)
    def arctanh(self) -> Tensor: return ops.arctanh(self)
    def sigmoid(self) -> Tensor: return ops.sigmoid(self)
    def erf(self) -> Tensor: return ops.erf(self)
    def softplus(self) -> Tensor: return ops.softplus(self)
    def floor(self) -> Tensor: return ops.floor(self)
    def ceil(self) -> Tensor: return ops.ceil(self)
    def trunc(self) -> Tensor: return ops.trunc(self)
    def isnan(self) -> Tensor: return ops.isnan(self)
    def isinf(self) -> Tensor: return ops.isinf(self)
    def isfinite(self) -> Tensor: return ops.isfinite(self)
    def ravel(self) -> Tensor: return ops.ravel(self)
    def add(self, other: TensorLike) -> Tensor: return ops.add(self, other)
    def subtract(self, other: TensorLike) -> Tensor: return ops.subtract(self, other)
    def multiply(self, other: TensorLike) -> Tensor: return ops.multiply(self, other)
    def divide(self, other: TensorLike) -> Tensor: return ops.divide(self, other)
    def power(self, other: TensorLike) -> Tensor: return ops.power(self, other)
    def maximum(self, other: TensorLike) -> Tensor: return ops.maximum(self, other)
    def minimum(self, other: TensorLike) -> Tensor: return ops.minimum(self, other)
    def fmax(self, other: TensorLike) -> Tensor: return ops.fmax(self, other)
    def fmin(self, other: TensorLike) -> Tensor: return ops.fmin(self, other)
    def logaddexp(self, other: TensorLike) -> Tensor: return ops.logaddexp(self, other)
    def hypot(self, other: TensorLike) -> Tensor: return ops.hypot(self, other)
    def fmod(self, other: TensorLike) -> Tensor: return ops.fmod(self, other)
    def remainder(self, other: TensorLike) -> Tensor: return ops.remainder(self, other)
    def arctan2(self, other: TensorLike) -> Tensor: return ops.arctan2(self, other)
    def matmul(self, other: TensorLike) -> Tensor: return ops.matmul(self, other)
    def dot(self, other: TensorLike) -> Tensor: return ops.dot(self, other)
    def vdot(self, other: TensorLike) -> Tensor: return ops.vdot(self, other)
    def inner(self, other: TensorLike) -> Tensor: return ops.inner(self, other)
    def outer(self, other: TensorLike) -> Tensor: return ops.outer(self, other)
    def kron(self, other: TensorLike) -> Tensor: return ops.kron(self, other)
    def round(self, decimals: int = 0) -> Tensor: return ops.round(self, decimals)
    def clip(self, min: TensorLike | None = None, max: TensorLike | None = None) -> Tensor:
        return ops.clip(self, min, max)
    def where(self, condition: TensorLike, other: TensorLike) -> Tensor: return ops.where(condition, self, other)
    def masked_fill(self, mask: TensorLike, value: TensorLike) -> Tensor: return ops.masked_fill(self, mask, value)
    def lerp(self, end: TensorLike, weight: TensorLike) -> Tensor: return ops.lerp(self, end, weight)
    def nan_to_num(self, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Tensor:
        return ops.nan_to_num(self, nan, posinf, neginf)
    def sum(self, axis: Axes = None, keepdims: bool = False, where: TensorLike | None = None) -> Tensor:
        return ops.sum(self, axis, keepdims, where)
    def mean(self, axis: Axes = None, keepdims: bool = False, where: TensorLike | None = None) -> Tensor:
        return ops.mean(self, axis, keepdims, where)
    def prod(self, axis: Axes = None, keepdims: bool = False, where: TensorLike | None = None) -> Tensor:
        return ops.prod(self, axis, keepdims, where)
    def max(self, axis: Axes = None, keepdims: bool = False,
            where: TensorLike | None = None, initial: float | None = None) -> Tensor:
        return ops.max(self, axis, keepdims, where, initial)
    def min(self, axis: Axes = None, keepdims: bool = False,
            where: TensorLike | None = None, initial: float | None = None) -> Tensor:
        return ops.min(self, axis, keepdims, where, initial)
    def amax(self, axis: Axes = None, keepdims: bool = False,
            where: TensorLike | None = None, initial: float | None = None) -> Tensor:
        return ops.amax(self, axis, keepdims, where, initial)
    def amin(self, axis: Axes = None, keepdims: bool = False,
            where: TensorLike | None = None, initial: float | None = None) -> Tensor:
        return ops.amin(self, axis, keepdims, where, initial)
    def var(self, axis: Axes = None, ddof: int = 0, keepdims: bool = False, where: TensorLike | None = None) -> Tensor:
        return ops.var(self, axis, ddof, keepdims, where)
    def std(self, axis: Axes = None, ddof: int = 0, keepdims: bool = False, where: TensorLike | None = None) -> Tensor:
        return ops.std(self, axis, ddof, keepdims, where)
    def norm(self, ord: float = 2, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return ops.norm(self, ord, axis, keepdims)
    def logsumexp(self, axis: Axes = None, keepdims: bool = False) -> Tensor: return ops.logsumexp(self, axis, keepdims)
    def cumsum(self, axis: int | None = None) -> Tensor: return ops.cumsum(self, axis)
    def cumprod(self, axis: int | None = None) -> Tensor: return ops.cumprod(self, axis)
    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor: return ops.argmax(self, axis, keepdims)
    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor: return ops.argmin(self, axis, keepdims)
    def any(self, axis: Axes = None, keepdims: bool = False) -> Tensor: return ops.any(self, axis, keepdims)
    def all(self, axis: Axes = None, keepdims: bool = False) -> Tensor: return ops.all(self, axis, keepdims)
    def count_nonzero(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return ops.count_nonzero(self, axis, keepdims)
    def softmax(self, axis: int = -1) -> Tensor: return softmax(self, axis)
    def log_softmax(self, axis: int = -1) -> Tensor: return log_softmax(self, axis)
    def reshape(self, *shape: Shape) -> Tensor: return ops.reshape(self, _shape(shape))
    def transpose(self, *axes: Shape) -> Tensor: return ops.transpose(self, _shape(axes) if axes else None)
    def permute_dims(self, axes: Sequence[int]) -> Tensor: return ops.permute_dims(self, axes)
    def swapaxes(self, axis1: int, axis2: int) -> Tensor: return ops.swapaxes(self, axis1, axis2)
    def moveaxis(self, source: Shape, destination: Shape) -> Tensor: return ops.moveaxis(self, source, destination)
    def squeeze(self, axis: Axes = None) -> Tensor: return ops.squeeze(self, axis)
    def expand_dims(self, axis: Axes = 0) -> Tensor: return ops.expand_dims(self, axis)
    def broadcast_to(self, shape: Shape) -> Tensor: return ops.broadcast_to(self, shape)
    def flatten(self) -> Tensor: return ops.ravel(self)
    def flip(self, axis: Axes = None) -> Tensor: return ops.flip(self, axis)
    def roll(self, shift: Shape, axis: Axes = None) -> Tensor: return ops.roll(self, shift, axis)
    def rot90(self, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Tensor: return ops.rot90(self, k, axes)
    def tile(self, reps: Shape) -> Tensor: return ops.tile(self, reps)
    def repeat(self, repeats: TensorLike, axis: int | None = None) -> Tensor: return ops.repeat(self, repeats, axis)
    def pad(self, pad_width: int | Sequence[Any], mode: str = "constant", constant_values: float = 0) -> Tensor:
        return ops.pad(self, pad_width, mode, constant_values)
    def tril(self, k: int = 0) -> Tensor: return ops.tril(self, k)
    def triu(self, k: int = 0) -> Tensor: return ops.triu(self, k)
    def diag(self, k: int = 0) -> Tensor: return ops.diag(self, k)
    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
        return ops.diagonal(self, offset, axis1, axis2)
    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
        return ops.trace(self, offset, axis1, axis2)
    def split(self, indices_or_sections: Any, axis: int = 0) -> list[Tensor]:
        return ops.split(self, indices_or_sections, axis)
    def array_split(self, indices_or_sections: Any, axis: int = 0) -> list[Tensor]:
        return ops.array_split(self, indices_or_sections, axis)
    def take(self, indices: TensorLike, axis: int | None = None) -> Tensor: return ops.take(self, indices, axis)
    def take_along_axis(self, indices: TensorLike, axis: int = -1) -> Tensor:
        return ops.take_along_axis(self, indices, axis)
    def put_along_axis(self, indices: TensorLike, values: TensorLike, axis: int = -1) -> Tensor:
        return ops.put_along_axis(self, indices, values, axis)
    def scatter_add(self, indices: TensorLike, values: TensorLike, axis: int = -1) -> Tensor:
        return ops.scatter_add(self, indices, values, axis)
    def sort(self, axis: int = -1) -> Tensor: return ops.sort(self, axis)
    def argsort(self, axis: int = -1) -> Tensor: return ops.argsort(self, axis)
    def topk(self, k: int, axis: int = -1) -> tuple[Tensor, Tensor]: return ops.topk(self, k, axis)
    def tensordot(self, other: TensorLike, axes: Any = 2) -> Tensor: return ops.tensordot(self, other, axes)
    def stop_gradient(self) -> Tensor: return ops.stop_gradient(self)
    # fmt: on

    def astype(self, dtype: DType) -> Tensor:
        """The numbers in another dtype; a gradient flows through between floating-point ones."""
        return ops.astype(self, as_dtype(dtype))

    def to(self, device: str) -> Tensor:
        """The tensor on ``device`` (``cpu``, ``cuda``, ``cuda:N``), itself where it is there already."""
        if not isinstance(device, str) or device.startswith(("float", "int", "bfloat")):
            raise CallError("a device: 'cpu', 'cuda' or 'cuda:N'", repr(device), "astype() changes the dtype")
        device = check_device(device)
        return self if device == self.device else ops.transfer(self, device)


# What a signature says of an argument, and of a result: a Tensor where an argument is one, else an array. No argument
# makes X anything but a Tensor; where none is one, a type checker takes its default.
if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    class _Other:
        pass

    X = TypeVarWithDefault("X", Tensor, _Other, default=NDArray)  # type: ignore[misc]
else:
    X = TypeVar("X")
Operand: TypeAlias = "X | ArrayLike"

core.Tensor = Tensor
refuse_names(Tensor, vars(ops)["__all__"])
explain_methods(Tensor, ["__init__", *(name for name in vars(Tensor) if not name.startswith("_"))])


# ---- helpers --------------------------------------------------------------------------------------------------------


def as_array(data: Any, dtype: DType, device: str | None, copy: bool) -> Array:
    """``data`` as an array of a supported dtype on ``device``; a copy of it, or itself where nothing must change."""
    data = array_of(data) if isinstance(data, Tensor) else data
    wanted = None if dtype is None else as_dtype(dtype)
    if isinstance(data, list | tuple | range):
        data, copy = from_lists(data, wanted), False
    elif not is_array(data := as_operand(data, "the data")):
        data, copy = np.array(data, dtype=wanted), False
    if device is not None:
        moved = to_device(data, check_device(device))
        copy, data = copy and moved is data, moved
    if wanted is not None and data.dtype != wanted:
        return data.astype(wanted)
    return data.copy() if copy else data


def _shape(given: Sequence[Any]) -> Any:
    """The shape meant by ``reshape(2, 3)`` as by ``reshape((2, 3))``."""
    return given[0] if len(given) == 1 and not isinstance(given[0], int | np.integer) else tuple(given)


def _rebuild(kind: type[Tensor], array: Array, requires_grad: bool, name: str | None) -> Tensor:
    tensor = kind.__new__(kind)
    tensor._fill(array)
    tensor._requires_grad, tensor.name = requires_grad, name
    return tensor


def _same(name: str, x: Tensor, y: object) -> Tensor:
    """``==`` or ``!=``; what is no array or number at all is another object, as Python sees it."""
    comparable = isinstance(y, Tensor | list | tuple | int | float | np.generic) or is_array(y)
    return compare(name, x, y) if comparable else NotImplemented
