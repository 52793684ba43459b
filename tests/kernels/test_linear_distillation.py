import numpy as np
import pytest
import torch
from support.kernel_checks import check, check_threads, derived, many_rows, of_the_threads, random, rng

import minigrad as mg
from minigrad.errors import ArgumentError, DTypeError, MiniGradError, ShapeError
from nn import functional as F


def twin(x, weight, teacher_x, teacher_weight, ids, temperature=2.0, mix=0.5, reduction="mean"):
    """By torch's Kullback-Leibler divergence and cross-entropy of whole logits."""
    logits, teacher = ((a @ w.T).flatten(0, -2) for a, w in ((x, weight), (teacher_x, teacher_weight)))
    ids, f = torch.as_tensor(ids).flatten(), torch.nn.functional
    log_q, p = f.log_softmax(logits / temperature, -1), f.softmax(teacher / temperature, -1)
    rows = mix * temperature**2 * f.kl_div(log_q, p, reduction="none").sum(-1)
    rows = torch.where(ids >= 0, rows + (1 - mix) * f.cross_entropy(logits, ids, reduction="none"), 0)
    if reduction == "none":
        return rows.reshape(x.shape[:-1])
    return rows.sum() / ((ids >= 0).sum() if reduction == "mean" else 1)


def arguments(lead, classes, d=6, teacher_d=9, seed=0):
    x, weight, teacher_x, teacher_weight = random(
        (*lead, d), (classes, d), (*lead, teacher_d), (classes, teacher_d), seed=seed
    )
    ids = rng(seed + 1).integers(0, classes, lead)
    ids.reshape(-1)[::4] = -100
    ids.reshape(-1)[:1] = classes - 1
    return [x, weight, teacher_x, teacher_weight, ids]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("temperature", "mix"), [(1.0, 1.0), (2.0, 0.5), (0.5, 0.0), (20.0, 0.9)])
@pytest.mark.parametrize(("lead", "classes"), [((1,), 2), ((3, 5), 7), many_rows((500,), 300)])
def test_is_torch(lead, classes, temperature, mix, reduction):
    options = {"temperature": temperature, "mix": mix, "reduction": reduction}
    check(F.linear_distillation, twin, arguments(lead, classes), length=classes * lead[-1], **options)


def test_the_gradient_of_the_students_logits_is_the_temperature_times_the_difference():
    """With the identity as the head, so that x are the logits: τ (q - p) for a mix of 1."""
    z, teacher, ids = *random((4, 5), (4, 5)), np.zeros(4, int)
    _, (gz,) = derived(
        lambda leaf: F.linear_distillation(leaf, np.eye(5), teacher, np.eye(5), ids, 3.0, 1.0, reduction="sum"), [z]
    )
    soft = [np.exp(a / 3) / np.exp(a / 3).sum(1, keepdims=True) for a in (z, teacher)]
    np.testing.assert_allclose(gz, 3.0 * (soft[0] - soft[1]), rtol=1e-12)


def test_a_mix_of_0_is_cross_entropy():
    x, weight, _, _, ids = args = arguments((3, 5), 7)
    value, (gx, gweight) = derived(lambda *leaves: F.linear_distillation(*leaves, *args[2:], mix=0.0), [x, weight])
    same, (hx, hweight) = derived(lambda *leaves: F.linear_cross_entropy(*leaves, ids), [x, weight])
    for ours, theirs in ((value, same), (gx, hx), (gweight, hweight)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_a_student_that_is_its_teacher_is_at_distance_0(scale):
    """Also where the logits are so large that most probabilities underflow."""
    x, weight, _, _, ids = arguments((3, 5), 7)
    args = [scale * x, weight, scale * x, weight, ids]
    value, (gx,) = derived(lambda leaf: F.linear_distillation(leaf, *args[1:], mix=1.0), [args[0]])
    assert abs(value) < 1e-12
    np.testing.assert_allclose(gx, 0, atol=1e-14)


@pytest.mark.parametrize("wanted", range(4))
def test_one_gradient_alone(wanted):
    """Twice from one graph, and with an upstream gradient: what the forward pass made is used once."""
    args = arguments((3, 5), 7)
    _, full = derived(F.linear_distillation, args)
    leaf = mg.Tensor(args[wanted], requires_grad=True)
    loss = F.linear_distillation(*args[:wanted], leaf, *args[wanted + 1 :])
    (first,) = mg.grad(loss, [leaf], retain_graph=True)
    (again,) = mg.grad(loss, [leaf], 3.0 * mg.ones_like(loss))
    np.testing.assert_allclose(first.numpy(), full[wanted], rtol=1e-13)
    np.testing.assert_allclose(again.numpy(), 3 * full[wanted], rtol=1e-13)


@pytest.mark.cpu_only("chunks of the CPU")
def test_two_sets_of_logits_never_exist():
    """The peak of memory stays far below them: 2 048 rows of 8 192 classes in float32 are 64 MB."""
    args = [a.astype(np.float32) if a.dtype == np.float64 else a for a in arguments((2048,), 8192, 16, 16)]
    leaf = mg.Tensor(args[0], requires_grad=True)
    with mg.track_memory() as memory:
        F.linear_distillation(leaf, *args[1:]).backward()
    assert memory.peak < 2048 * 8192 * 4


def test_half_precision_under_autocast():
    """Products in half precision; losses and sums are not."""
    args = [a.astype(np.float32) if a.dtype == np.float64 else a for a in arguments((30,), 20)]
    leaves = [mg.Tensor(a, requires_grad=True) for a in args[:2]]
    with mg.autocast("float16"):
        loss = F.linear_distillation(*leaves, *args[2:])
    loss.backward()
    exact, wanted = derived(lambda *pair: F.linear_distillation(*pair, *args[2:]), args[:2])
    assert loss.dtype == np.float32
    np.testing.assert_allclose(loss.item(), exact, rtol=2e-3)
    for leaf, theirs in zip(leaves, wanted, strict=True):
        np.testing.assert_allclose(mg.asarray(leaf.grad).numpy(), theirs, rtol=1e-2, atol=2e-3 * abs(theirs).max())


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({3: np.ones((8, 9))}, ShapeError, "one vocabulary.*Got: 7 and 8"),
        ({2: np.ones((3, 4, 9))}, ShapeError, "of the same rows"),
        ({1: np.ones((7, 5))}, ShapeError, r"x \(\.\.\., d\) and weight"),
        ({4: np.ones((3, 5))}, DTypeError, "class ids"),
        ({4: np.full((3, 5), 7)}, MiniGradError, "class"),
        ({5: 0.0}, ArgumentError, "positive, finite temperature.*Got: 0.0"),
        ({5: np.inf}, ArgumentError, "positive, finite temperature"),
        ({5: True}, ArgumentError, "positive, finite temperature"),
        ({5: 2.0, 6: 1.5}, ArgumentError, "mix from 0 to 1.*Got: 1.5"),
        ({5: 2.0, 6: np.nan}, ArgumentError, "mix from 0 to 1"),
    ],
)
def test_mistakes_are_explained(change, kind, said):
    args = dict(enumerate(arguments((3, 5), 7))) | change
    with pytest.raises(kind, match=f"(?s){said}"):
        F.linear_distillation(*args.values())


@of_the_threads
def test_threads():
    args = [a.astype(np.float32) if a.dtype == np.float64 else a for a in arguments((900,), 2000, 32, 32)]
    check_threads(F.linear_distillation, args, blas_alone=True)
