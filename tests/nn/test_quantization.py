"""Quantized layers: bytes as GGUF has them, products as those of the decoded matrix, and what trains beside them."""

from __future__ import annotations

import copy
import pickle
import struct

import numpy as np
import pytest

import minigrad as mg
import nn
import optim
from minigrad.errors import ArgumentError, GraphError, IndexRangeError, NonFiniteError, ShapeError, StateError
from minigrad.kernels import quantized_blocks as kernel
from minigrad.kernels.quantized_blocks import decoded, encoded
from minigrad.machine import parallel
from nn.module import is_plain

LAYOUTS = ["q8_0", "q4_0", "q4_1"]
SIZES = {"vocab_size": 23, "context_length": 16, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 64}
TOKENS = np.random.default_rng(0).integers(23, size=(2, 12))
NUMPY_ONLY = pytest.mark.cpu_only("NumPy beside arrays of the default device")


def lm(**options):
    return nn.TransformerLM(**{**SIZES, **options}, generator=1)


def cases():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((40, 64)).astype(np.float32)
    return {
        "random": normal,
        "zero": np.zeros((3, 64), np.float32),
        "negative zero": -np.zeros((3, 64), np.float32),
        "many zeros": np.where(np.arange(64) % 3 == 0, 0, normal),
        "huge": normal * np.float32(1e37),
        "largest": np.sign(normal) * np.finfo(np.float32).max,
        "out of half precision": normal * np.float32(1e5),
        "denormal": normal * np.float32(1e-40),
        "of all sizes": normal * np.exp(rng.uniform(-95, 80, normal.shape)).astype(np.float32),
        "halves": (rng.integers(-254, 255, (40, 64)) / 2).astype(np.float32),
    }


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", cases())
def test_bytes_and_numbers_are_those_of_the_package_gguf(case, layout):
    gguf = pytest.importorskip("gguf")
    x, kind = cases()[case], gguf.GGMLQuantizationType[layout.upper()]
    with np.errstate(all="ignore"):
        theirs = gguf.quantize(x, kind)
        ours = encoded(x, layout)
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(decoded(ours, layout), gguf.dequantize(theirs, kind))


def by_hand(block, layout):
    """The block of 32 numbers as the format's words have it, one number after the other."""
    x = [np.float32(number) for number in block]
    if layout == "q8_0":
        scale = max(abs(number) for number in x) / np.float32(127)
        inverse = np.float32(1) / scale
        products = [float(number * inverse) for number in x]
        q = [int(np.copysign(np.floor(abs(p) + 0.5), p)) for p in products]
        return struct.pack("<e32b", float(scale), *q)
    if layout == "q4_0":
        low, scale = None, max(x, key=abs) / np.float32(-8)
        q = [min(15, int(number * (np.float32(1) / scale) + np.float32(8.5))) for number in x]
    else:
        low = min(x)
        scale = (max(x) - low) / np.float32(15)
        q = [min(15, int((number - low) * (np.float32(1) / scale) + np.float32(0.5))) for number in x]
    head = struct.pack("<e", float(scale)) + (b"" if low is None else struct.pack("<e", float(low)))
    return head + bytes(q[i] | q[i + 16] << 4 for i in range(16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_block_is_what_the_format_says(layout):
    x = np.random.default_rng(3).standard_normal((5, 64)).astype(np.float32)
    expected = [b"".join(by_hand(half, layout) for half in row.reshape(2, 32)) for row in x]
    assert [row.tobytes() for row in encoded(x, layout)] == expected


@pytest.mark.parametrize(("layout", "steps"), [("q8_0", 127), ("q4_0", 8), ("q4_1", 7.5)])
def test_a_number_moves_by_at_most_a_step_of_its_block(layout, steps):
    """Half a step, and what half precision takes off the scale; in q4_0, whose other end is 7 steps from 0, a step."""
    x = np.random.default_rng(4).standard_normal((50, 64)).astype(np.float32)
    errors = np.abs(decoded(encoded(x, layout), layout) - x).reshape(50, 2, 32).max(axis=2)
    largest = np.abs(x).reshape(50, 2, 32).max(axis=2)
    assert (errors <= largest / steps * (1.01 if layout == "q4_0" else 0.57)).all()


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS, "float16"])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 40, 64), (0, 64)])
@NUMPY_ONLY
def test_values_and_gradients_are_those_of_the_decoded_matrix(layout, shape):
    layer = nn.Linear(64, 70, dtype="float64", generator=2)
    layer.bias.data = np.random.default_rng(5).standard_normal(70)
    w = decoded(encoded(layer.weight.data, layout), layout).astype(np.float64)
    nn.quantize(layer, layout)
    x = mg.Tensor(np.random.default_rng(6).standard_normal(shape), requires_grad=True)
    y = layer(x)
    np.testing.assert_allclose(y.data, x.data @ w.T + layer.bias.data, rtol=1e-12, atol=1e-12)
    g = np.random.default_rng(7).standard_normal(y.shape)
    y.backward(g)
    np.testing.assert_allclose(x.grad, g @ w, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(layer.bias.grad, g.reshape(-1, 70).sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_of_first_and_second_order_and_forward_mode(layout):
    layer = nn.quantize(nn.Linear(32, 5, dtype="float64", generator=2), layout)
    x = np.random.default_rng(0).standard_normal((3, 32))
    f = lambda x: mg.tanh(layer(x))
    assert mg.gradcheck(f, [x]) and mg.gradgradcheck(f, [x])
    _, forward = mg.jvp(layer, (x,), (x + 1,))
    np.testing.assert_allclose(mg.asarray(forward).numpy(), (layer(x + 1) - layer.bias).numpy(), rtol=1e-10)


def test_the_result_has_the_dtype_of_the_input():
    layer = nn.quantize(nn.Linear(32, 5), "q8_0")
    for dtype in ("float16", "float32", "float64"):
        assert layer(mg.ones((2, 32), dtype=dtype, requires_grad=True)).dtype == dtype
    with mg.autocast("float16"):
        assert layer(mg.ones((2, 32))).dtype == "float16"


@pytest.mark.parametrize("layout", LAYOUTS)
@NUMPY_ONLY
def test_an_embedding_makes_numbers_of_the_rows_that_are_asked_for(layout):
    table = nn.Embedding(9, 64, padding_idx=2, generator=3)
    w = decoded(encoded(table.weight.data, layout), layout)
    nn.quantize(table, layout)
    np.testing.assert_array_equal(table([[8, 2], [0, 8]]).data, w[np.array([[8, 2], [0, 8]])])
    assert (table([2]).data == 0).all()
    for wrong in (9, -1):
        with pytest.raises(IndexRangeError, match=f"id {wrong}"):
            table([wrong])


@pytest.mark.cpu_only("about the tiles of the NumPy kernel")
def test_a_matrix_is_never_whole_in_floats(monkeypatch):
    seen = []
    decode = kernel.decode
    monkeypatch.setattr(kernel, "decode", lambda b, layout, out: (seen.append(out.size), decode(b, layout, out)))
    for shape in ((64, 64), (1000, 512)):
        layer = nn.quantize(nn.Linear(shape[1], shape[0], bias=False, generator=1), "q4_0")
        x = mg.Tensor(np.ones((2, shape[1]), np.float32), requires_grad=True)
        layer(x).sum().backward()
        assert sum(seen) == 2 * shape[0] * shape[1] and max(seen) <= min(kernel.TILE_NUMBERS, shape[0] * shape[1] // 2)
        seen.clear()


@pytest.mark.cpu_only("about threads")
def test_bits_do_not_depend_on_the_number_of_threads():
    layer = nn.quantize(nn.Linear(512, 700, generator=1), "q4_1")
    x = np.random.default_rng(0).standard_normal((300, 512)).astype(np.float32)
    before = parallel.get_num_threads()
    found = []
    for threads in (1, 3):
        parallel.set_num_threads(threads)
        t = mg.Tensor(x, requires_grad=True)
        y = layer(t)
        y.backward(y.data)
        found.append((y.data, t.grad))
    parallel.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True}, {"attention_bias": True, "num_kv_heads": 2}])
@NUMPY_ONLY
def test_a_model_computes_what_one_with_the_decoded_weights_does(layout, options):
    model, twin = lm(**options), lm(**options)
    for parameter in twin.parameters():
        if parameter.ndim == 2:
            parameter.data = decoded(encoded(parameter.data, layout), layout)
    nn.quantize(model, layout)
    np.testing.assert_allclose(model(TOKENS).data, twin(TOKENS).data, rtol=2e-5, atol=2e-5)
    assert model.loss(TOKENS, TOKENS).item() == pytest.approx(twin.loss(TOKENS, TOKENS).item(), rel=1e-5)
    assert nn.generate(model, [1, 2], 9, 0.0).tolist() == nn.generate(twin, [1, 2], 9, 0.0).tolist()
    assert (model.lm_head.weight is model.token_embeddings.weight) == options.get("tie_embeddings", False)
    assert all(parameter.ndim == 1 for parameter in model.parameters())  # norms and biases


def test_no_fused_path_takes_a_quantized_layer_for_a_plain_one():
    model = nn.quantize(lm(), "q8_0", "layers.0.attn.q_proj")
    block = model.layers[0]
    assert not is_plain(block.attn.q_proj, nn.Linear)
    assert not block._plain_projections(mg.ones((1, 2, 32))) and block._plain_units(mg.ones((1, 2, 32)))


@pytest.mark.parametrize("layout", [*LAYOUTS, "float16"])
def test_a_checkpoint_goes_to_a_file_and_back(layout, tmp_path):
    model = nn.quantize(lm(tie_embeddings=True), layout)
    mg.save(tmp_path / "model.safetensors", model.state_dict())
    again = nn.quantize(nn.TransformerLM(**SIZES, tie_embeddings=True, generator=9), layout)
    again.load_state_dict(mg.load(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(again(TOKENS).numpy(), model(TOKENS).numpy())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.to(model.ln_final.weight.device)  # a pickled one is on the CPU
        np.testing.assert_array_equal(copied(TOKENS).numpy(), model(TOKENS).numpy())
    with pytest.raises(StateError, match="wrong shape"):
        lm(tie_embeddings=True).load_state_dict(model.state_dict())


def test_widths_that_are_no_multiple_of_32():
    model = nn.Sequential(nn.Linear(33, 8), nn.Linear(8, 64), nn.Linear(64, 2))
    with pytest.raises(ArgumentError, match=r"0 \(33\), 1 \(8\)"):
        nn.quantize(model, "q4_0", odd_widths="refuse")
    assert type(model[0]) is nn.Linear  # nothing was changed
    nn.quantize(model, "q4_0")
    assert [layer.layout for layer in model] == ["float16", "float16", "q4_0"]
    assert model.state_dict()["0.weight"].shape == (8, 66)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_trains_on_top_and_the_blocks_stay(layout):
    model = nn.quantize(lm(), layout)
    before, start = model.state_dict(), model(TOKENS).numpy()
    nn.lora(model, 4, targets="*", generator=1)
    np.testing.assert_array_equal(model(TOKENS).numpy(), start)
    assert all(".lora_" in name for name, p in model.named_parameters() if p.requires_grad)
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    with nn.disable_adapters(model):
        np.testing.assert_array_equal(model(TOKENS).numpy(), start)
    with pytest.raises(ArgumentError, match="quantized ones"):
        nn.merge_adapters(model)
    nn.delete_adapter(model)
    after = model.state_dict()
    assert after.keys() == before.keys() and type(model.lm_head) is nn.compressing.quantization.QuantizedLinear
    for name in before:
        np.testing.assert_array_equal(mg.asarray(after[name]).numpy(), mg.asarray(before[name]).numpy())


@NUMPY_ONLY
def test_the_gradients_of_an_adapter_are_those_beside_the_decoded_matrix():
    layer, twin = (nn.Sequential(nn.Linear(32, 6, False, dtype="float64", generator=2)) for _ in range(2))
    twin[0].weight.data = decoded(encoded(twin[0].weight.data, "q4_0"), "q4_0").astype(np.float64)
    nn.quantize(layer, "q4_0")
    x, found = np.random.default_rng(0).standard_normal((4, 32)), []
    for model in (layer, twin):
        nn.lora(model, 2, targets="*", generator=3).to("float64")
        model[0].adapters.default.lora_B.data = np.sin(np.arange(12.0)).reshape(6, 2)
        (model(x) ** 2).sum().backward()
        found.append([model[0].adapters.default.lora_A.grad, model[0].adapters.default.lora_B.grad])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_other_adapters_stand_beside_quantized_layers():
    for adapt in (nn.adapters, nn.prefixes):
        model = nn.quantize(lm(), "q8_0")
        before = model(TOKENS).numpy()
        adapt(model)
        model.loss(TOKENS, TOKENS).backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        with nn.disable_adapters(model):
            np.testing.assert_array_equal(model(TOKENS).numpy(), before)


def test_misuse_is_one_clear_error():
    model = nn.quantize(lm(), "q8_0")
    with pytest.raises(GraphError, match=r"quantized one.*\n.*nn.lora"):
        model.lm_head.weight.requires_grad = True
    with pytest.raises(ArgumentError, match="quantize once"):
        nn.quantize(model, "q4_0")
    with pytest.raises(ArgumentError, match="before adapters"):
        nn.quantize(nn.lora(lm(), 2))
    with pytest.raises(ArgumentError, match="'q5_0'"):
        nn.quantize(lm(), "q5_0")
    with pytest.raises(ArgumentError, match="odd_widths"):
        nn.quantize(lm(), odd_widths="pad")
    with pytest.raises(ArgumentError, match="qproj of no layer"):
        nn.quantize(lm(), targets="qproj")
    with pytest.raises(ArgumentError, match="lm_head shares a matrix"):
        nn.quantize(lm(tie_embeddings=True), targets="token_embeddings")
    with pytest.raises(ArgumentError, match="a module"):
        nn.quantize(3)
    for number in (np.nan, np.inf, 1e9):
        broken = lm()
        broken.layers[1].ffn.w2.weight.data[3, 4] = number
        with pytest.raises(NonFiniteError, match=r"layers\.1\.ffn\.w2"):
            nn.quantize(broken, "q8_0")
        assert type(broken.lm_head) is nn.Linear  # nothing was changed
    with pytest.raises(ShapeError, match="32"):
        nn.quantize(nn.Linear(32, 4))(np.ones((2, 33)))
