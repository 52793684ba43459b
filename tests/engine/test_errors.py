"""What every misuse says, and that nothing goes wrong in silence.

``errors.txt``, beside this file, is the list: each entry is a snippet, the kind of error that it raises, and the whole
text. It is read as it stands. ``<…>`` stands for what differs between machines. ``PYTHONPATH=. python
tests/engine/test_errors.py`` writes the texts of today into it, where they differ.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import errno
import gc
import math
import operator
import os
import pickle
import re
import stat
import tempfile
import textwrap
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
import torch

import minigrad as mg
import nn
import nn.functional as F
import optim
from minigrad import errors
from minigrad.backend import is_array
from minigrad.errors import ArgumentError, CallError, DTypeError, GraphError, MiniGradError
from minigrad.messages.habits import NAMES, OUT_OF_SCOPE, hints

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
LIST = Path(__file__).with_name("errors.txt")


class Entry(NamedTuple):
    """A misuse and what it must say."""

    snippet: str
    kind: str
    text: str


def entries() -> list[Entry]:
    """The entries of the list, each an unindented snippet and an indented error."""
    found = re.findall(r"^(\S.*)\n    (\w+)\n((?:    .*\n)+)", LIST.read_text(), re.MULTILINE)
    return [
        Entry(snippet, kind, re.sub(r"^    ", "", text.rstrip(), flags=re.MULTILINE)) for snippet, kind, text in found
    ]


def names() -> dict[str, Any]:
    """What the snippets may use, fresh for each of them; the page says the same in words."""

    def exp(x: Any) -> Any:
        return x

    def halve(x: Any) -> Any:
        return x / 2

    async def stream() -> Any:
        yield 1

    def wrong(x: Any) -> Any:
        return rule_off(x)

    def cube(x: Any) -> Any:
        return (x**3).sum()

    rule_off = mg.engine.core.Primitive(lambda x: x * x)
    rule_off.defvjp(lambda g, x: g * 2.01 * x)
    w = mg.Tensor(np.ones((3, 2)), requires_grad=True)
    w.name = "w"
    v = mg.Tensor([1.0, 2.0, 3.0], requires_grad=True)
    made = {"x": mg.Tensor(np.ones((2, 3)), requires_grad=True) * 1.0, "v": v, "w": w, "c": mg.Tensor([1.0, 2.0])}
    functions = {"exp": exp, "halve": halve, "stream": stream, "wrong": wrong, "cube": cube}
    modules = {"mg": mg, "nn": nn, "F": F, "optim": optim, "np": np, "torch": torch, "copy": copy, "pickle": pickle}
    modules["math"] = math
    return {**made, **functions, **modules, "y": (v * v).sum()}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_text("no safetensors")
    monkeypatch.chdir(tmp_path)


def same(text: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("<…>"))), text, re.DOTALL) is not None


def rewrite() -> None:
    """Put the texts of today into the page; kinds must be those that it says."""
    page = LIST.read_text()
    for entry in entries():
        try:
            exec(entry.snippet, names())
        except MiniGradError as error:
            assert type(error).__name__ == entry.kind, entry
            if not same(str(error), entry.text):
                old, new = (textwrap.indent(f"{entry.kind}\n{text}\n", "    ") for text in (entry.text, str(error)))
                assert page.count(f"\n{entry.snippet}\n{old}") == 1, entry
                page = page.replace(f"\n{entry.snippet}\n{old}", f"\n{entry.snippet}\n{new}")
    LIST.write_text(page)


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.snippet)
def test_misuse(entry: Entry) -> None:
    """The snippet raises the kind of error that the page says, with exactly that text, in its three parts."""
    if "cuda" in entry.snippet and mg.cuda.is_available():
        pytest.skip("there is a GPU")
    if "broadcast_to" in entry.snippet and mg.asarray(np.zeros(1)).device != "cpu":
        pytest.skip("a GPU has no read-only arrays")
    if "odeint" in entry.snippet and mg.asarray(np.zeros(1)).device != "cpu":
        pytest.skip("SciPy's solver is on the CPU")
    with pytest.raises(MiniGradError) as caught:
        exec(entry.snippet, names())
    if isinstance(caught.value, errors.DeviceError) and mg.asarray(np.zeros(1)).device != "cpu":
        pytest.skip("what CuPy lacks, or ranks don't exchange, is refused before")
    assert type(caught.value).__name__ == entry.kind
    assert same(str(caught.value), entry.text), str(caught.value)
    assert caught.value.expected and caught.value.got and caught.value.hint


def test_every_error_has_a_hint() -> None:
    """Each place that makes an error of ours gives it three parts."""
    kinds = {name for name in vars(errors) if name.endswith("Error")}
    made = 0
    for path in (path for package in ("minigrad", "nn", "optim") for path in (ROOT / package).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in kinds:
                assert len(call.args) + len(call.keywords) >= 3, f"{path}:{call.lineno}"
                made += 1
    assert made > 200


def test_a_text_that_differs_is_noticed() -> None:
    assert same("Got: 3, in /tmp/a", "Got: 3, in <…>") and not same("Got: 4, in /tmp/a", "Got: 3, in <…>")
    assert len(entries()) == len(re.findall(r"^    \w+Error$", LIST.read_text(), re.MULTILINE)) > 200


def test_kinds_are_what_the_page_says() -> None:
    """Each kind is the built-in exceptions of its row, and each has a row."""
    rows = re.findall(r"^\| (\w+Error) \| ([\w, ]+Error) \|", PAGE.read_text(), re.MULTILINE)
    for name, also in rows:
        for builtin in also.split(", "):
            assert issubclass(getattr(errors, name), vars(__import__("builtins"))[builtin])
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MiniGradError)}
    assert {name for name, _ in rows} == kinds - {"MiniGradError"}
    assert issubclass(errors.AxisError, np.exceptions.AxisError)


@pytest.mark.parametrize("name", sorted(n for n, kind in vars(errors).items() if n.endswith("Error")))
def test_errors_survive_a_pickle(name: str) -> None:
    error = pickle.loads(pickle.dumps(getattr(errors, name)("this", "that", "do")))
    assert (str(error), error.expected) == ("Expected: this\nGot: that\nHint: do", "this")


# ---- names and keywords ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [mg, nn, F, optim], ids=lambda module: module.__name__)
def test_dir_lists_public_names_alone(module: Any) -> None:
    assert set(dir(module)) >= set(module.__all__)
    assert not [name for name in dir(module) if name not in module.__all__ and not name.startswith("__")]
    assert not hasattr(module, "no_such_name") and not hasattr(module, "__no_such_name__")


def test_python_itself_tells_of_a_name_that_nobody_knows() -> None:
    """It finds slots faster in a class without ``__getattr__``; it adds "Did you mean: 'softmax'?" from these facts."""
    x = mg.Tensor([1.0])
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'sotfmax'") as caught:
        x.sotfmax  # noqa: B018
    assert caught.value.name == "sotfmax" and caught.value.obj is x
    assert "__getattr__" not in {name for kind in mg.Tensor.__mro__ for name in vars(kind)}


def test_names_that_are_refused_are_no_names() -> None:
    x = mg.Tensor([1.0])
    assert not hasattr(x, "view") and not hasattr(x, "add_") and not hasattr(nn.Parameter(x), "concatenate")
    assert "softmax" in dir(x) and not {"view", "add_", "concatenate"} & {*dir(x)}


def test_hints_name_what_there_is() -> None:
    """Each name that a hint of the table gives exists: in a module, or as a method of a tensor."""
    owners = {"minigrad": mg, "nn": nn, "optim": optim, "np": np}
    seen = 0
    for name, ours in NAMES.items():
        for owner, path in re.findall(r"(?<![\w.])(minigrad|nn|optim|np)\.(functional\.\w+|random\.\w+|\w+)", ours):
            assert operator.attrgetter(path)(owners[owner]), name
            seen += 1
        if re.fullmatch(r"[a-z_]+", ours):
            assert hasattr(mg.Tensor, ours) or ours in F.__all__, name
            seen += 1
        assert name not in mg.__all__ + optim.__all__
        assert name not in nn.__all__ or ours == f"nn.{name}"
        assert name not in F.__all__ or ours == f"nn.functional.{name}"
    assert seen > 90
    assert not OUT_OF_SCOPE.keys() & {*NAMES, *mg.__all__, *nn.__all__, *F.__all__, *optim.__all__}


def classes(module: Any) -> set[str]:
    """The public names of a module of torch that are classes, and no parts of its own machinery."""
    own = {"Container", "UninitializedBuffer", "UninitializedParameter", "DataChunk", "LinearCrossEntropyOptions"}
    found = {name for name, value in vars(module).items() if isinstance(value, type) and name[0].isupper()}
    return {name for name in found - own if vars(module)[name].__module__.startswith("torch")}


def test_what_torch_has_is_named_or_said_to_be_out_of_scope() -> None:
    """Each class of torch's layers, optimizers, schedules and data, each function of its layers; some of NumPy's."""
    torch = pytest.importorskip("torch")
    from torch.optim import lr_scheduler
    from torch.utils import data

    functions = {name for name, value in vars(torch.nn.functional).items() if callable(value) and name.islower()}
    machinery = {name for name in functions if re.search("torch_function|scaled_mm|grouped_mm|assert_|dispatch", name)}
    machinery |= {"conv_tbc", "native_channel_shuffle", "multi_head_attention_forward"}
    asked = [(nn, name) for part in (torch.nn, data) for name in classes(part)]
    asked += [(optim, name) for part in (torch.optim, lr_scheduler) for name in classes(part)]
    asked += [(F, name) for name in functions - machinery if not name.startswith("_")]
    asked += [(mg, name) for name in ("isclose", "unique", "det", "gammaln", "vmap", "LSTMCell")]
    assert len(asked) > 300
    assert not [name for owner, name in asked if "dir() lists" in answer(owner, name)]
    for owner, name, hint in (
        (nn, "SmoothL1Loss", "use nn.functional.smooth_l1_loss"),
        (nn, "LazyConv2d", "out of scope: a layer is told its sizes"),
        (mg, "det", "use minigrad.linalg.det"),
        (mg, "isclose", "np.isclose takes x.numpy()"),
    ):
        assert hint in answer(owner, name)


def answer(owner: Any, name: str) -> str:
    """The error for a name that isn't there; nothing where it is."""
    try:
        getattr(owner, name)
    except AttributeError as error:
        return str(error)
    return ""


def test_the_table_of_hints_is_whole() -> None:
    """Each section is found, each row has its parts, no name stands twice, and no hint for NumPy's errors is unused."""
    text = (ROOT / "minigrad" / "messages" / "hints.txt").read_text()
    sections = re.findall(r"^\[(.+)\]$", text, re.MULTILINE)
    torch_s = ["names of torch", "names of torch's modules", "out of scope", "keywords", "keywords without a twin"]
    assert sections == [*torch_s, "errors of NumPy"]
    tables = {section: hints(section) for section in sections}
    rows = re.findall(r"^([^#\[\n].*?) = (.+)$", text.partition("\n[")[2], re.MULTILINE)
    assert sum(map(len, tables.values())) == sum(len(names.split(", ")) for names, _ in rows)
    golden = LIST.read_text()
    for row in set(tables["errors of NumPy"].values()):
        kind, expected, hint = row.split(" -> ")
        assert issubclass(getattr(errors, kind), MiniGradError) and f"Expected: {expected}\n" in golden, row
        assert f"Hint: {hint}\n" in golden


def test_every_method_says_its_signature() -> None:
    """A wrong call of any method is told as such, and its signature stays readable for tools."""
    methods = [name for name, value in vars(mg.Tensor).items() if callable(value) and not name.startswith("_")]
    assert len(methods) > 100
    for name in methods:
        with pytest.raises(CallError, match=rf"(?s)Expected: Tensor.{name}\(.*there is no foo="):
            getattr(mg.Tensor([1.0]), name)(foo=1)


PUBLIC = [getattr(module, name) for module in (nn, optim) for name in module.__all__]
CLASSES = [thing for thing in PUBLIC if isinstance(thing, type) and not issubclass(thing, tuple)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_constructors_go_by_their_public_names(kind: type) -> None:
    """Also where a private base, which classes share, defines them."""
    with pytest.raises((CallError, ArgumentError), match=rf"\AExpected: {kind.__name__}\((?s:.)*foo"):
        kind(foo=1)


def test_exceptions_of_the_user_pass_as_they_are() -> None:
    """From an operation, a layer, a transform or a hook of his own, with their cause."""

    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            raise TypeError("mine") from KeyError("cause")

    def fail(*_: Any) -> Any:
        raise ValueError("mine") from KeyError("cause")

    x = mg.Tensor([1.0], requires_grad=True)
    hooked = x * 2
    hooked.register_hook(fail)
    for call in (
        lambda: Layer()(x),
        lambda: mg.vjp(fail, x),
        lambda: mg.engine.registry.Composite(fail)(x),
        hooked.backward,
    ):
        with pytest.raises((TypeError, ValueError), match=r"^mine$") as caught:
            call()
        assert type(caught.value.__cause__) is KeyError


def test_the_outermost_call_explains() -> None:
    """An operation that a user's function calls is told by itself, and NumPy's traceback is not shown."""
    with pytest.raises(errors.ShapeError, match=r"Got: add\(float64 \(3,\), float32 \(2,\)\)") as caught:
        mg.vjp(lambda v: v + mg.ones(2), np.ones(3))
    assert caught.value.__suppress_context__
    composed = mg.engine.registry.Composite(lambda x: mg.sum(mg.exp(x), axis=2), part_of="composed")
    with pytest.raises(errors.AxisError, match=r"Got: 2, in sum\(float64 \(3,\), axis=2\)"):
        composed(np.ones(3))
    with pytest.raises(errors.AxisError, match=r"Got: 2, in var\(float64 \(3,\), axis=2\)"):
        mg.var(np.ones(3), axis=2)


def test_an_explanation_of_an_explanation_keeps_the_layer_and_no_arrays() -> None:
    """An outer call explains anew what an inner one explained; the frames of both are let go with their arrays."""

    def ours(function: Callable[..., Any]) -> Callable[..., Any]:
        code = function.__code__.replace(co_filename=nn.functional.__file__)
        return types.FunctionType(code, globals(), function.__name__, None, function.__closure__)

    adding = type("Adding", (nn.Module,), {"forward": ours(lambda self, x: mg.add(x, np.ones(3)))})
    net, x = nn.Sequential(nn.ReLU(), adding()), np.ones((4, 5))
    gone = weakref.ref(x)
    outer = mg.messages.explain.explained(ours(lambda x: net(x)))
    with pytest.raises(errors.ShapeError, match=r"Got: .*<lambda>\(float64 \(4, 5\)\), in 1, a Adding") as caught:
        outer(x)
    error = caught.value
    del x, caught
    error.__traceback__ = None
    gc.collect()
    assert gone() is None and error.layer == "1, a Adding"


def test_compiled_code_of_a_library_is_no_function_of_the_user() -> None:
    """Its frames have no path of this machine (``numpy/random/_generator.pyx``), as CuPy's have none."""
    draw = mg.messages.explain.explained(np.random.default_rng(0).normal)
    with pytest.raises(errors.ShapeError, match=r"Got: Generator.normal\(loc=0, scale=-1\): scale < 0"):
        draw(0, -1)


# ---- what would go wrong in silence ---------------------------------------------------------------------------------


SHARING: dict[str, Callable[[mg.Tensor], mg.Tensor]] = {
    "copy": copy.copy,
    "from_dlpack": mg.from_dlpack,
    "asarray": lambda t: mg.asarray(t, dtype=t.dtype),
    "detach": lambda t: t.detach(),
}


@pytest.mark.parametrize("share", SHARING.values(), ids=SHARING)
def test_what_shares_numbers_shares_their_version(share: Callable[[mg.Tensor], mg.Tensor]) -> None:
    constant, x = mg.Tensor([2.0]), mg.Tensor([3.0], requires_grad=True)
    shared = share(constant)
    out = (x * constant).sum()
    shared[0] = 5.0
    assert constant.tolist() == [5.0]
    with pytest.raises(GraphError, match="data changed since"):
        out.backward()


def test_asarray_keeps_the_graph() -> None:
    x = mg.Tensor([1.0, 2.0], requires_grad=True)
    mg.asarray(x * 3, dtype="float32", device="cpu").sum().backward()
    assert x.grad.tolist() == [3, 3] and x.grad.dtype == np.float64


def test_a_shallow_copy_of_a_parameter_is_a_leaf_of_its_own() -> None:
    p = nn.Parameter([1.0])
    p.grad = np.ones(1, np.float32)
    q = copy.copy(p)
    assert type(q) is nn.Parameter and q.requires_grad and q.data is p.data and q.grad is None
    (q * 2).sum().backward()
    assert q.grad.tolist() == [2] and p.grad.tolist() == [1]


@pytest.mark.parametrize("keep", [None, [7.0]])
def test_a_pass_that_breaks_off_changes_no_leaf(keep: Any) -> None:
    """Whether a rule, the hook of a result or that of a leaf fails: every ``.grad`` is what it was, the same array."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("stop")

    def rule() -> Any:
        broken = mg.engine.core.Primitive(lambda x: x + 0)
        broken.defvjp(fail)
        return (x * broken(y)).sum()

    def hook() -> Any:
        inner = y * 2
        inner.register_hook(fail)
        return (x * inner).sum()

    def hook_of_a_leaf() -> Any:
        y.register_hook(fail)
        return (x * y).sum()

    for make in (rule, hook, hook_of_a_leaf):
        x, y = (mg.Tensor([2.0], requires_grad=True) for _ in range(2))
        x.grad = y.grad = None if keep is None else np.array(keep)
        before = x.grad
        with pytest.raises(RuntimeError, match="stop"):
            make().backward()
        assert x.grad is before and (keep is None or x.grad.tolist() == keep)


def test_gradients_are_added_in_place_and_borrowed_ones_copied() -> None:
    x = mg.Tensor([2.0], requires_grad=True)
    x.grad = held = mg.Tensor([1.0]).data
    (x * 3).sum().backward()
    assert x.grad is held and held.tolist() == [4]
    upstream = np.array([1.0])
    y = mg.Tensor([2.0], requires_grad=True)
    (y + 0).backward(upstream)
    assert y.grad is not upstream and y.grad.tolist() == [1]


def test_numbers_of_numpy_become_gradients_of_shape_nothing() -> None:
    x = mg.Tensor(2.0, requires_grad=True)
    (x * x).backward()
    x.grad = x.grad * 0.5
    assert is_array(x.grad) and x.grad == 2.0


@pytest.mark.parametrize("change", ["constant", "leaf", "argument"])
def test_a_checkpoint_that_would_compute_something_else_is_refused(change: str) -> None:
    x, leaf, constant, given = (mg.Tensor([2.0], requires_grad=k < 2) for k in range(4))
    out = mg.checkpoint(lambda u, k: u * leaf + constant + k, x, given).sum()
    {"constant": constant, "leaf": leaf, "argument": given}[change].data = [9.0]
    with pytest.raises(GraphError, match=r"which the function reads.*'checkpoint'"):
        out.backward()


def test_no_grad_of_a_coroutine_holds_while_it_runs_and_not_while_it_waits() -> None:
    seen = []

    @mg.no_grad()
    async def inside() -> str:
        seen.append(mg.is_grad_enabled())
        await asyncio.sleep(0)
        seen.append(mg.is_grad_enabled())
        return "result"

    async def outside() -> Any:
        task = asyncio.ensure_future(inside())
        await asyncio.sleep(0)
        seen.append(mg.is_grad_enabled())
        return await task

    assert asyncio.run(outside()) == "result"
    assert seen == [False, True, False] and mg.is_grad_enabled()


def test_a_user_may_define_his_operation_again_but_not_replace_ours() -> None:
    for factor in (2, 3):

        @mg.primitive
        def scaled(x: Any, factor: int = factor) -> Any:
            return x * factor

    assert mg.REGISTRY["scaled"](np.ones(1)).tolist() == [3]
    with pytest.raises(ArgumentError, match="'tanh', the first from minigrad"):
        mg.primitive(_named_tanh())
    assert mg.REGISTRY["tanh"] is mg.tanh


def _named_tanh() -> Any:
    def tanh(x: Any) -> Any:
        return x

    return tanh


@pytest.mark.parametrize("operand", [1j, "a", None, {}, np.array([None]), np.array(["a"]), torch.ones(2)], ids=str)
@pytest.mark.parametrize("operation", [mg.add, mg.matmul, mg.exp, mg.sort, F.softmax, F.relu])
def test_no_odd_tensors(operation: Any, operand: Any) -> None:
    """What holds no real numbers is refused wherever an array is meant, also beside a Tensor."""
    second = (operand,) if operation in (mg.add, mg.matmul) else ()
    with pytest.raises(DTypeError):
        operation(mg.Tensor([1.0, 2.0]), *second) if second else operation(operand)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: mg.take_along_axis(mg.Tensor([[3.0, 1.0]]), [[1, 0]]), [[1, 3]]),
        (lambda: mg.scatter_add([0, 0], [1, 1], [2.0, 3.0], 0), [0, 5]),
        (lambda: mg.put_along_axis([0.0, 0.0], [1], 4.0, 0), [0, 4]),
        (lambda: mg.sort([3, 1, 2]), [1, 2, 3]),
        (lambda: mg.topk([3, 1, 2], 2)[0], [3, 2]),
        (lambda: mg.norm([3.0, 4.0]), 5),
        (lambda: mg.tril([[1, 2], [3, 4]]), [[1, 0], [3, 4]]),
        (lambda: mg.kron([1, 10], [1, 2]), [1, 2, 10, 20]),
        (lambda: F.softmax([0.0, 0.0]), [0.5, 0.5]),
        (lambda: F.embedding([[1]], [[1.0], [2.0]]), [[[2]]]),
        (lambda: mg.sum([[1, 2]], axis=[0, 1]), 3),
        (lambda: mg.hvp(lambda v: (v**3).sum(), np.array([1.0, 2.0]), [1.0, 1.0])[1], [6, 12]),
    ],
)
def test_nested_lists_are_arrays(ours: Callable[[], Any], theirs: Any) -> None:
    assert np.asarray(ours()).tolist() == theirs


def test_one_element_is_formatted_as_a_number() -> None:
    for x in (mg.Tensor(1.23456), mg.Tensor([[1.23456]])):
        assert f"{x:.3f}" == "1.235"
    assert f"{mg.Tensor([7]):03d}" == "007" and f"{mg.Tensor([1.0, 2.0])}".startswith("Tensor([1., 2.]")


def test_equality_with_something_else_is_identity() -> None:
    x = mg.Tensor([1.0])
    assert (x == None) is False and (x != "a") is True and x in [None, x]  # noqa: E711


def test_graphs_name_public_operations() -> None:
    """Parts of an operation go by its name, in the repr and in texts."""
    x = mg.Tensor([[3.0, 4.0]], requires_grad=True)
    made = {"norm": x.norm(), "einsum": mg.einsum("ij->i", x), "clip": x.clip(0, 1), "pad": mg.pad(x, 1)}
    made["stack"] = mg.stack([x, x])
    made["norm "] = x.norm(3)
    for name, out in made.items():
        assert f"made by {name.strip()})" in repr(out)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_saving_keeps_permissions_and_links(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        mg.save("new", {"x": np.ones(1)})
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("new").st_mode) == 0o640
    os.chmod("new", 0o604)
    os.symlink("new", "link")
    mg.save("link", {"x": np.zeros(1)})
    assert os.path.islink("link") and mg.load("new")["x"].tolist() == [0]
    assert stat.S_IMODE(os.stat("new").st_mode) == 0o604
    assert sorted(os.listdir()) == ["README.md", "link", "new"]


def test_saving_sweeps_up_after_saves_that_were_killed() -> None:
    for name, age in {".a[1].7.7.tmp": 7200, ".a[1].8.8.tmp": 60, ".b.7.7.tmp": 7200}.items():
        Path(name).write_text("half a file")
        os.utime(name, (os.stat(name).st_mtime - age,) * 2)
    mg.save("a[1]", {"x": np.ones(1)})
    assert sorted(os.listdir()) == [".a[1].8.8.tmp", ".b.7.7.tmp", "README.md", "a[1]"]


def test_a_save_that_fails_says_the_number_of_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is told as the operating system tells it; the old file stays, and nothing is left over."""

    def full(*_: Any, **options: Any) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    mg.save("a", {"x": np.ones(1)})
    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        mg.save("a", {"x": np.zeros(1)})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, os.path.realpath("a"))
    assert mg.load("a")["x"].tolist() == [1] and sorted(os.listdir()) == ["README.md", "a"]


PRIMITIVES = {name: op for name, op in mg.REGISTRY.items() if isinstance(op, mg.engine.core.Primitive)}
ON_ARRAYS = [n for n, op in PRIMITIVES.items() if op.parameters[op.names[0]].annotation in ("Array", "Sequence[Array]")]


@pytest.mark.parametrize("name", ON_ARRAYS)
def test_none_is_no_array(name: str) -> None:
    """NumPy would take it for a NaN here and there."""
    operation = PRIMITIVES[name]
    with pytest.raises(TypeError, match=r"(?s)Expected: .*None"):
        operation(*[None] * operation.required)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "README.md").write_text("no safetensors")
        os.chdir(folder)
        rewrite()
