import numpy as np
import pytest
import torch

import minigrad as mg
import nn
import optim
from minigrad.errors import ArgumentError, ShapeError, StateError

SIZES = {"vocab_size": 11, "context_length": 8, "num_heads": 2, "dtype": "float64"}
TOKENS, TARGETS = np.arange(10).reshape(2, 5), np.array([[1, 2, 3, -100, 5], [6, 7, 8, 9, 10]])


def pair(**options):
    teacher = nn.TransformerLM(d_model=16, num_layers=2, generator=0, **SIZES).eval()
    return nn.TransformerLM(d_model=8, num_layers=1, generator=1, **SIZES, **options), teacher


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("temperature", "mix"), [(1.0, 1.0), (3.0, 0.7)])
def test_is_that_of_the_logits(temperature, mix, bias):
    """By torch, from the logits of both models; the gradient of the logits goes on through the student by ours."""
    student, teacher = pair(head_bias=bias)
    if bias:
        student.lm_head.bias.data = np.linspace(-1, 1, 11)
    loss = nn.distillation_loss(student, teacher, TOKENS, TARGETS, temperature, mix)
    logits = student(TOKENS)
    z = torch.tensor(mg.asarray(logits.data).numpy(), requires_grad=True)
    f, ids = torch.nn.functional, torch.tensor(TARGETS).flatten()
    p = f.softmax(torch.tensor(teacher(TOKENS).numpy()) / temperature, -1)
    apart = f.kl_div(f.log_softmax(z / temperature, -1), p, reduction="none").sum(-1).flatten()[ids >= 0].mean()
    expected = mix * temperature**2 * apart + (1 - mix) * f.cross_entropy(z.flatten(0, 1), ids)
    expected.backward()
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-12)
    parameters = list(student.parameters())
    ours = mg.grad(loss, parameters)
    theirs = mg.grad(logits, parameters, mg.Tensor(z.grad.numpy(), device=logits.device))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-10, atol=1e-13)


def test_nothing_of_the_teacher_is_recorded():
    student, teacher = pair()
    nn.distillation_loss(student, teacher, TOKENS, TARGETS).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for p in student.parameters())


def test_a_mix_of_0_is_the_students_own_loss():
    student, teacher = pair()
    loss = nn.distillation_loss(student, teacher, TOKENS, TARGETS, mix=0.0)
    np.testing.assert_allclose(loss.item(), student.loss(TOKENS, TARGETS).item(), rtol=1e-13)


def test_a_student_comes_nearer_to_its_teacher():
    """Of targets that are noise it learns nothing; the teacher's probabilities it does."""
    student, teacher = pair()
    optimizer, draw, losses = optim.AdamW(student.parameters(), 1e-2), np.random.default_rng(0), []
    for _ in range(60):
        tokens = draw.integers(0, 11, (4, 6))
        loss = nn.distillation_loss(student, teacher, tokens, draw.integers(0, 11, (4, 6)), 2.0, 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


def hooked(model):
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        (lambda s, t: (s, t.train()), StateError, "no longer trained"),
        (lambda s, t: (hooked(s), t), ArgumentError, "without hooks"),
        (lambda s, t: (s, hooked(t)), ArgumentError, "without hooks"),
        (
            lambda s, t: (s, nn.TransformerLM(d_model=8, num_layers=1, **{**SIZES, "vocab_size": 12}).eval()),
            ShapeError,
            "one vocabulary.*Got: 11 and 12",
        ),
    ],
)
def test_mistakes_are_explained(change, kind, said):
    with pytest.raises(kind, match=f"(?s){said}"):
        nn.distillation_loss(*change(*pair()), TOKENS, TARGETS)
