"""Module: names, walks, state dicts, modes, hooks, copies, reprs."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
import types
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import nn
import optim
from minigrad.backend import is_array
from minigrad.errors import (
    ArgumentError,
    AttributeHintError,
    DTypeError,
    GraphError,
    IndexRangeError,
    MiniGradError,
    StateError,
)


class Net(nn.Module):
    """Two linear layers in a list, a third that shares the first one's weight, and buffers."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(2.0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, bias=False)])
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("count", [0, 0])
        self.register_buffer("table", np.ones(2, np.float32), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.tied(x) * self.gain


NAMES = ["gain", "layers.0.weight", "layers.0.bias", "layers.1.weight"]


def test_parameters_are_listed_once_under_full_names():
    net = Net()
    assert [name for name, _ in net.named_parameters()] == NAMES
    assert [p.name for p in net.parameters()] == NAMES
    assert [name for name, _ in net.named_modules()] == ["", "layers", "layers.0", "layers.1", "tied"]
    assert [name for name, _ in net.named_buffers()] == ["count", "table"]
    assert net.tied.weight is net.layers[0].weight
    outer = nn.Sequential(net)
    assert [p.name for p in outer.parameters()] == ["0." + name for name in NAMES]


def test_names_reach_modules_that_are_appended_later():
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList()
            self.layers.append(nn.Sequential(nn.Linear(2, 2)))
            self.layers[0].append(nn.Linear(2, 2))

    assert [p.name for p in Stack().parameters()][2:] == ["layers.0.1.weight", "layers.0.1.bias"]


def test_parameter_is_float32_unless_told():
    assert nn.Parameter([1.0, 2.0]).dtype == np.float32 == nn.Parameter(1).dtype
    assert nn.Parameter(np.ones(2)).dtype == np.float64 == nn.Parameter([1.0], dtype="float64").dtype
    array = np.ones(2)
    parameter = nn.Parameter(array)
    parameter.data[0] = 5
    assert array[0] == 1
    assert parameter.requires_grad
    assert not nn.Parameter([1.0], requires_grad=False).requires_grad


# ---- state dicts -----------------------------------------------------------------------------------------------------


def test_state_dict_round_trip_keeps_tying_and_raises_the_version():
    a, b = Net(), Net()
    state = a.state_dict()
    assert list(state) == [*NAMES[:1], "count", *NAMES[1:], "tied.weight"]
    assert all(is_array(value) for value in state.values())
    x = mg.ones((1, 3))
    before = (b.layers[0].weight * b.layers[0].weight).sum()
    assert b.load_state_dict(state) == ([], [])
    np.testing.assert_array_equal(a(x).data, b(x).data)
    assert b.tied.weight is b.layers[0].weight
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight"):
        before.backward()
    state["layers.1.weight"][...] = 9  # copies on both sides
    assert not (b.layers[1].weight.data == 9).any()
    assert not (a.layers[1].weight.data == 9).any()


def test_loading_casts_and_takes_any_array_like():
    layer = nn.Linear(2, 1)
    layer.load_state_dict({"weight": [[1, 2]], "bias": mg.Tensor([0.5])})
    assert layer.weight.dtype == np.float32
    np.testing.assert_array_equal(layer(np.float32([[1, 1]])).data, [[3.5]])


def test_one_name_of_a_tied_parameter_is_enough_and_two_must_agree():
    net = Net()
    state = net.state_dict()
    del state["layers.0.weight"]
    net.load_state_dict(state)
    state["layers.0.weight"] = state["tied.weight"] + 1
    with pytest.raises(StateError, match=r"layers\.0\.weight and tied\.weight"):
        net.load_state_dict(state)


def test_all_that_does_not_fit_is_named_together_and_nothing_changes():
    net = Net()
    before, state = net.state_dict(), net.state_dict()
    del state["gain"]
    state |= {"layers.1.weight": np.zeros((3, 4)), "layer.weight": np.zeros(2), "layers.0.bias": np.zeros(3)}
    with pytest.raises(KeyError, match="Expected") as caught:
        net.load_state_dict(state)
    for part in ("missing: gain", "unexpected: layer.weight", "layers.1.weight (3, 4), not (3, 3)"):
        assert part in str(caught.value)
    for name, value in net.state_dict().items():
        np.testing.assert_array_equal(value, before[name])
    del state["layers.1.weight"]
    assert net.load_state_dict(state, strict=False) == (["gain", "layers.1.weight"], ["layer.weight"])
    np.testing.assert_array_equal(net.layers[0].bias.data, np.zeros(3))


def test_saved_and_loaded_from_a_file(tmp_path):
    a, b = Net(), Net()
    mg.save(tmp_path / "net.safetensors", a.state_dict())
    b.load_state_dict(mg.load(tmp_path / "net.safetensors"))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        np.testing.assert_array_equal(x.data, y.data)


# ---- modes, moves, gradients -----------------------------------------------------------------------------------------


def test_modes_gradients_freezing_and_casts_reach_all_modules():
    net = Net()
    assert net.eval() is net
    assert not any(module.training for module in net.modules())
    assert all(module.training for module in net.train().modules())
    net(mg.ones((1, 3))).sum().backward()
    net.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in net.parameters())
    net.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    parameters = list(net.parameters())
    assert net.to("float64") is net
    assert {p.dtype.name for p in net.parameters()} == {"float64"}
    assert net.count.dtype == np.int64
    assert net.to(device=parameters[0].device, dtype=np.float32).table.dtype == np.float32
    assert all(p is q for p, q in zip(parameters, net.parameters(), strict=True))
    net.requires_grad_(False)
    assert not net(mg.ones((1, 3))).requires_grad
    seen = []
    net.apply(seen.append)
    assert seen == [net.layers[0], net.layers[1], net.layers, net.tied, net]


def test_buffers_stay_buffers_when_assigned():
    net = Net()
    net.count = np.array([1, 2])
    assert isinstance(net.count, mg.Tensor)
    np.testing.assert_array_equal(net.state_dict()["count"], [1, 2])
    for name in ("gain", "a.b", "forward"):
        with pytest.raises(ArgumentError):
            net.register_buffer(name, [0.0])


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_forward_hooks_see_and_replace_inputs_and_output():
    layer = nn.Linear(2, 2, bias=False)
    layer.load_state_dict({"weight": np.eye(2)})
    seen = []
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs[0].tolist()))),
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,)),
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.tolist())),
        layer.register_forward_hook(lambda module, inputs, output: output * 10),
    ]
    x = mg.Tensor([1.0, 2.0], dtype="float32")
    assert layer(x).tolist() == [20, 30]
    assert seen == [(layer, [1, 2]), [2, 3]]
    for handle in handles:
        handle.remove()
        handle.remove()
    assert layer(x).tolist() == [1, 2]
    assert len(seen) == 2


# ---- copies ----------------------------------------------------------------------------------------------------------


def unpickled(net):
    """The pickled net; a pickle comes back on the CPU."""
    return pickle.loads(pickle.dumps(net)).to(device=net.gain.device)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, unpickled])
def test_a_copy_is_independent_and_keeps_tying_and_names(duplicate):
    net = Net().eval()
    net.layers[1].requires_grad_(False)
    twin = duplicate(net)
    np.testing.assert_array_equal(twin(mg.ones((1, 3))).data, net(mg.ones((1, 3))).data)
    assert twin.tied.weight is twin.layers[0].weight
    assert [p.name for p in twin.parameters()] == NAMES
    assert [p.requires_grad for p in twin.parameters()] == [True, True, True, False]
    assert not twin.training
    twin.gain.data[...] = 7
    assert net.gain.item() == 2
    twin.extra = nn.Linear(1, 1)
    assert not hasattr(net, "extra")


# ---- reprs -----------------------------------------------------------------------------------------------------------


def test_repr_is_a_tree_like_that_of_torch():
    net = nn.Sequential(
        nn.Linear(2, 3), nn.ModuleList([nn.SiLU(), nn.SiLU(), nn.GELU()]), nn.Sequential(nn.Dropout(0.1))
    )
    assert repr(net) == (
        "Sequential(\n"
        "  (0): Linear(in_features=2, out_features=3, bias=True)\n"
        "  (1): ModuleList(\n"
        "    (0-1): 2 x SiLU()\n"
        "    (2): GELU(approximate='none')\n"
        "  )\n"
        "  (2): Sequential(\n"
        "    (0): Dropout(p=0.1)\n"
        "  )\n"
        ")"
    )


# ---- containers ------------------------------------------------------------------------------------------------------


def test_containers_behave_like_those_of_python():
    a, b, c = nn.ReLU(), nn.SiLU(), nn.GELU()
    layers = nn.ModuleList([a, b])
    layers.extend(nn.ModuleList([c]))
    assert list(layers) == [a, b, c]
    assert layers[-1] is c
    assert list(layers[1:]) == [b, c]
    assert isinstance(layers[1:], nn.ModuleList)
    layers[0] = c
    assert list(layers) == [c, b, c]
    assert len(nn.Sequential(a, b)[:1]) == 1
    heads = nn.ModuleDict({"a": a})
    heads["b"] = b
    assert list(heads) == ["a", "b"] == heads.keys()
    assert heads["b"] is b
    assert "c" not in heads
    assert heads.values() == [a, b]
    assert heads.items() == [("a", a), ("b", b)]


# ---- mistakes --------------------------------------------------------------------------------------------------------


class Forgetful(nn.Module):
    def __init__(self, assign):
        if assign:
            self.layer = nn.Linear(1, 1)


def _assign(name, value):
    setattr(Net(), name, value)


def _cycle():
    net = Net()
    net.tied.parent = net


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: Forgetful(True), AttributeHintError, r"super\(\).__init__\(\)"),
        (lambda: Forgetful(False)(1), AttributeHintError, r"super\(\).__init__\(\) the first line of Forgetful"),
        (lambda: Net().weights, AttributeError, "no attribute 'weights'"),
        (lambda: Net().cuda(), AttributeHintError, r'use to\("cuda"\)'),
        (lambda: nn.Module()(1), NotImplementedError, "forward"),
        (lambda: _assign("gain", mg.ones(1)), DTypeError, "nn.Parameter"),
        (lambda: _assign("more", [nn.ReLU()]), DTypeError, "nn.ModuleList"),
        (_cycle, ArgumentError, "contains"),
        (lambda: Net().to("int8"), DTypeError, "int8"),
        (lambda: Net().to("tpu"), (DTypeError, RuntimeError), "tpu"),
        (lambda: nn.ModuleList([1]), DTypeError, "int at place 0"),
        (lambda: nn.ModuleList(nn.ReLU()), DTypeError, r"\[module\]"),
        (lambda: nn.ModuleList()[0], IndexRangeError, "index"),
        (lambda: nn.ModuleDict({"keys": nn.ReLU()}), ArgumentError, "'keys'"),
        (lambda: nn.Parameter([1, 2], dtype="int64"), DTypeError, "floating-point"),
    ],
)
def test_mistakes_are_explained(call, kind, text):
    with pytest.raises(kind, match=text):
        call()


def test_long_sequences_grow_and_are_indexed_by_number() -> None:
    layers = [nn.Linear(1, 1) for _ in range(6000)]
    long = nn.Sequential()
    for layer in layers:
        long.append(layer)
    assert [name for name, _ in long.named_parameters()][-1] == "5999.bias"
    assert long[5999].weight.name == "5999.weight"
    assert [long[i] for i in range(len(long))] == list(long) == layers
    assert long[-1] is layers[-1] and list(long[5998:]) == layers[5998:]
    long[3] = layers[0]
    assert len(long) == 6000 and long[3] is layers[0] and copy.deepcopy(long)[3] is not long[3]


def test_a_list_with_gaps_or_names_counts_what_it_has() -> None:
    a, b, c, d = (nn.Module() for _ in range(4))
    layers = nn.ModuleList([a, b, c])
    delattr(layers, "1")
    assert (len(layers), list(layers), layers[1], layers[-1]) == (2, [a, c], c, c)
    layers = nn.ModuleList([a, b])
    layers.norm = c
    assert (len(layers), list(layers), layers[2]) == (3, [a, b, c], c)
    layers.norm = None
    assert (len(layers), layers[1]) == (2, b)
    layers = nn.ModuleList([a])
    setattr(layers, "1", b)
    layers.append(d)
    assert [name for name, _ in layers.named_children()] == ["0", "1", "2"] and layers[2] is d


def test_deep_sequences_are_made_named_called_copied_and_shown_without_recursion() -> None:
    """2000 around each other, with a layer beside each hundredth."""
    deep: Any = nn.Linear(1, 1)
    inner, count = deep, 1
    for level in range(2000):
        deep = nn.Sequential(deep, nn.Linear(1, 1)) if level % 100 == 99 else nn.Sequential(deep)
        count += level % 100 == 99
    first = "0." * 2000
    named = dict(deep.named_parameters())
    assert len(named) == 2 * count and next(iter(named)) == f"{first}weight"
    assert all(parameter.name == name for name, parameter in named.items())
    assert deep.state_dict().keys() == named.keys()
    state = {name: np.full(p.shape, 0.5 if "weight" in name else 1.0) for name, p in named.items()}
    deep.load_state_dict(state)
    out = deep(np.full((1, 1), 2.0, np.float32))
    assert out.shape == (1, 1) and abs(out.item() - 2) < 1e-6  # x/2 + 1 leaves 2 as it is
    out.sum().backward()
    assert inner.bias.grad == 0.5 ** (count - 1)
    visited: list[Any] = []
    deep.apply(visited.append)
    assert visited[0] is inner and visited[-1] is deep and len(visited) == 2000 + count
    copied, other = copy.deepcopy([deep, deep[0]])
    assert copied[0] is other and copied is not deep and len(list(copied.modules())) == 2000 + count
    assert repr(deep).startswith("Sequential(\n  (0): Sequential(") and "Sequential(…)" in repr(deep)
    with pytest.raises(MiniGradError, match=r"in 0\.0\.0.*, a Linear"):
        deep(np.ones((1, 3), np.float32))
    inner.back = nn.Module()
    with pytest.raises(ArgumentError, match="a tree of modules"):
        inner.back.again = deep


@pytest.mark.parametrize("where", ["outer", "inner"])
def test_hooks_of_nested_sequences_run(where: str) -> None:
    inner, seen = nn.Sequential(nn.ReLU()), []
    outer = nn.Sequential(inner)
    {"outer": outer, "inner": inner}[where].register_forward_hook(lambda m, x, y: seen.append(where))
    inner.forward = lambda x: x + 1.0  # type: ignore[method-assign]
    assert (outer(mg.Tensor([1.0])).tolist(), seen) == ([2], [where])


# ---- modules where no walk comes by ----------------------------------------------------------------------------------


def appended(net, layer):
    net.parts = []
    net.parts.append(layer)


def nested(net, layer):
    net.parts = [[], ({},)]
    net.parts[1][0]["deep"] = [layer]


def in_a_dict(net, layer):
    net.parts = {}
    net.parts["a"] = layer


def as_a_key(net, layer):
    net.parts = {}
    net.parts[layer] = 1


def in_a_set(net, layer):
    net.parts = set()
    net.parts.add(layer)


def in_a_queue(net, layer):
    net.parts = collections.deque()
    net.parts.append(layer)


def a_parameter(net, layer):
    net.parts = []
    net.parts.append(nn.Parameter([1.0]))


def below_a_child(net, layer):
    net.child = nn.Sequential(nn.Linear(2, 2))
    appended(net.child[0], layer)


def of_the_class(net, layer):
    type(net).parts = layer


class Kept:
    def __init__(self, part):
        self.part = part


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part):
        self.part = part


@dataclasses.dataclass
class Config:
    part: object


def in_a_queue_of_objects(net, layer):
    net.parts = collections.deque()
    net.parts.append(Config(Kept([layer])))


def in_an_array(net, layer):
    net.parts = np.array([None, layer], object)


def in_a_partial(net, layer):
    net.parts = functools.partial(max, key=layer)


def tensors(net, layer):
    net.parts = [mg.Tensor([1.0], requires_grad=True)]


HOLDERS = [
    Kept, Slotted, Config, functools.partial, lambda layer: types.SimpleNamespace(part=layer),
    lambda layer: types.MappingProxyType({1: layer}), lambda layer: layer.forward,
    lambda layer: collections.UserDict({1: layer}),
]  # fmt: skip
HIDDEN = [
    appended, nested, in_a_dict, as_a_key, in_a_set, in_a_queue, a_parameter, below_a_child, of_the_class, tensors,
    in_a_queue_of_objects, in_an_array, in_a_partial,
    *(lambda net, layer, make=make: setattr(net, "parts", make(layer)) for make in HOLDERS),
]  # fmt: skip


@pytest.mark.parametrize("hide", HIDDEN)
@pytest.mark.parametrize(
    "use", [lambda net: net(1.0), lambda net: list(net.parameters()), lambda net: optim.SGD(net.parameters(), 0.1)]
)
def test_what_no_walk_finds_is_refused_at_its_first_use(hide, use):
    class Holder(nn.Module):
        def forward(self, x):
            return x

    net = Holder()
    hide(net, nn.Linear(2, 2))
    with pytest.raises(DTypeError, match=r"'parts'\nHint: self.parts = nn.ModuleList"):
        use(net)


@pytest.mark.parametrize(
    "value", [{"a": nn.SiLU()}, {nn.SiLU()}, [[nn.SiLU()]], ((nn.SiLU(),),), [nn.Parameter([1.0])]]
)
def test_containers_with_modules_are_refused_when_they_are_assigned(value):
    with pytest.raises(DTypeError, match="'parts'"):
        Net().parts = value


def test_a_plain_object_may_know_parts_of_the_module_and_tensors_may_be_kept_later():
    net = Net()
    net.trainer, net.call = types.SimpleNamespace(model=net, optimizer=optim.SGD(net.parameters(), 0.1)), net.forward
    net.seen = [mg.ones(2), (x for x in "ab")]
    assert len(list(net.parameters())) == len(list(Net().parameters()))
    net.seen.append(mg.Tensor([1.0], requires_grad=True))
    assert len(list(net.parameters())) == len(list(Net().parameters()))


def test_modules_nested_a_thousand_deep_are_copied_and_pickled():
    shared = net = nn.Linear(2, 2)
    for _ in range(999):
        net = nn.Sequential(net)
    for made in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        np.testing.assert_array_equal(next(made.parameters()).data, shared.weight.data)
        assert [name for name, _ in made.named_parameters()] == [name for name, _ in net.named_parameters()]
        assert "_deep" not in vars(made)
    both, one = pickle.loads(pickle.dumps((net, shared)))
    assert next(both.parameters()) is one.weight


def test_what_an_attribute_keeps_may_stand_in_a_list_besides():
    """An attribute of a module below; the module above; for a part of a model what the whole one keeps."""
    net = Net()
    net.order, net.by_name = [], {}
    net.order.extend([net.layers[1], net.gain])
    net.by_name["x"] = [net.layers[0].weight]
    net.layers[0].owner, net.layers[0].others = [], []
    net.layers[0].owner.append(net)
    net.layers[0].others.append(net.layers[1])
    assert [name for name, _ in net.named_parameters()] == NAMES
    assert len(list(net.layers[0].parameters())) == 2
    net.plain = [[1, "a"], {"b": (2,)}]
    net.plain.append(net.plain)
    assert len(list(net.parameters())) == 4


def test_a_copy_of_a_module_that_stored_a_result_names_the_attribute():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            self.last = {"out": [self.inner(x)]}
            return self.last["out"][0]

    net = nn.Sequential(nn.SiLU(), Remembers())
    copy.deepcopy(net)
    net(mg.ones((1, 2)))
    with pytest.raises(GraphError, match=r"'1.last' of Remembers.*\n.*self.last = ….detach\(\)"):
        copy.deepcopy(net)
    assert copy.copy(net)[1].last["out"][0].requires_grad
    net[1].last = net[1].last["out"][0].detach()
    again = copy.deepcopy(net)
    assert again[1].last.tolist() == net[1].last.tolist() and again[1].inner.weight is not net[1].inner.weight
    assert [p.name for p in again.parameters()] == [p.name for p in net.parameters()]
