"""The whole public surface in one short file: tensors, gradients, a layer, a model, an optimizer, a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import minigrad as mg
import nn
import optim


def test_gradient_of_an_expression() -> None:
    x = mg.Tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    y = (mg.tanh(x @ x) * x.T).sum()
    y.backward()
    assert x.grad is not None and x.grad.shape == (2, 2)
    assert mg.gradcheck(lambda x: mg.tanh(x @ x) * x.T, [x.data])


def test_second_derivative() -> None:
    x = mg.Tensor(2.0, requires_grad=True)
    (slope,) = mg.grad(x**3, x, create_graph=True)
    (curvature,) = mg.grad(slope, x)
    assert (slope.item(), curvature.item()) == (12.0, 12.0)


def test_numpy_works_on_tensors() -> None:
    t = mg.Tensor([1.0, 2.0], requires_grad=True)
    np.sum(np.exp(t) * np.ones(2)).backward()
    np.testing.assert_allclose(t.grad, np.exp([1.0, 2.0]))


def test_an_operation_of_ones_own() -> None:
    @mg.primitive
    def cube(x):
        return x**3

    cube.defvjp(lambda g, x: g * 3 * x**2)
    mg.REGISTRY.pop("cube")
    assert mg.gradcheck(cube, [np.array([0.5, -1.5])]) and mg.gradgradcheck(cube, [np.array([0.5, -1.5])])


def test_a_model_learns_and_is_saved(tmp_path: Path) -> None:
    mg.random.seed(0)
    model = nn.TransformerLM(vocab_size=11, context_length=8, d_model=16, num_layers=1, num_heads=2)
    optimizer = optim.AdamW(optim.decay_groups(model.named_parameters(), weight_decay=0.1), lr=1e-2)
    tokens = np.arange(9) % 11
    losses = []
    for step in range(1, 41):
        for group in optimizer.param_groups:
            group["lr"] = optim.cosine_schedule(step, 1e-2, 1e-3, warmup_steps=5, total_steps=40)
        loss = model.loss(tokens[None, :-1], tokens[None, 1:])
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.0 and losses[-1] < 0.1
    mg.save(tmp_path / "model.safetensors", model.state_dict())
    again = nn.TransformerLM(vocab_size=11, context_length=8, d_model=16, num_layers=1, num_heads=2)
    again.load_state_dict(mg.load(tmp_path / "model.safetensors"))
    assert nn.generate(again, [0, 1, 2], max_new_tokens=5, temperature=0).tolist() == list(range(8))
