"""Against forgetting: Fisher and EWC in closed form, a reservoir that is fair, batches that go on where they were."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

import minigrad as mg
import nn
import optim
from minigrad.errors import ArgumentError, ShapeError, StateError


def classifier(dtype="float64"):
    """Softmax regression of 4 classes on 3 inputs, with its inputs and labels."""
    rng = np.random.default_rng(0)
    model = nn.Linear(3, 4).to(dtype=dtype)
    model.load_state_dict({"weight": rng.standard_normal((4, 3)), "bias": rng.standard_normal(4)})
    return model, rng.standard_normal((7, 3)).astype(dtype), rng.integers(4, size=7)


def probabilities(model, x):
    logits = x @ np.asarray(model.weight.numpy()).T + model.bias.numpy()
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


# ---- the Fisher ------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("the expectation is NumPy's")
def test_the_fisher_of_the_data_is_that_of_softmax_regression():
    """The score of class y is (1[c = y] - p_c) x_j, and its square's mean is the empirical Fisher."""
    model, x, y = classifier()
    squares = (probabilities(model, x) - np.eye(4)[y]) ** 2
    found = nn.fisher(model, [(x[:5], y[:5]), (x[5:], y[5:])], "data")
    np.testing.assert_allclose(found["bias"], squares.mean(axis=0), rtol=1e-10)
    np.testing.assert_allclose(found["weight"], np.einsum("nc,nj->cj", squares, x**2) / 7, rtol=1e-10)


@pytest.mark.cpu_only("the expectation is NumPy's")
def test_the_fisher_of_the_model_is_p_times_one_less_p():
    """E[(1[c = y] - p_c)²] = p_c (1 - p_c). Over 700 draws, an estimate strays by 5 of its standard errors at most."""
    model, x, _ = classifier()
    times = 100
    found = nn.fisher(model, [(np.repeat(x, times, axis=0), np.zeros(7 * times, int))], generator=3)
    p = probabilities(model, x)
    expected = (p * (1 - p)).mean(axis=0)
    fourth = p * (1 - p) ** 4 + (1 - p) * p**4
    error = np.sqrt((fourth - (p * (1 - p)) ** 2).mean(axis=0) / (7 * times))
    assert (np.abs(found["bias"] - expected) < 5 * error).all()
    assert np.abs(found["bias"] - expected).max() > 0  # it was drawn


@pytest.mark.cpu_only("compared on the host")
def test_the_fisher_of_sequences_sums_the_scores_of_each_and_counts_labels():
    model = nn.TransformerLM(11, context_length=6, d_model=8, num_layers=1, num_heads=2, dropout=0.5, generator=0)
    tokens = np.random.default_rng(1).integers(11, size=(3, 7))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
    targets[0, :4] = -100
    found = nn.fisher(model, [(inputs, targets)], "data")
    assert model.training
    model.eval()
    expected = 0.0
    for row in range(3):
        model.zero_grad()
        model.loss(inputs[row : row + 1], targets[row : row + 1], reduction="sum").backward()
        expected = expected + model.lm_head.weight.grad.astype("float64") ** 2
    np.testing.assert_allclose(found["lm_head.weight"], expected / 14, rtol=1e-4, atol=1e-9)
    ignored = np.full((3, 6), -100)
    with pytest.raises(ArgumentError, match="at least one label"):
        nn.fisher(model, [(inputs, ignored)])


# ---- the term --------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("the minimum is NumPy's")
def test_the_minimum_beside_a_quadratic_is_where_algebra_puts_it():
    """½ (θ-c)ᵀ A (θ-c) + λ/2 (θ-θ*)ᵀ F (θ-θ*) is least at (A + λF)⁻¹ (A c + λ F θ*)."""
    rng = np.random.default_rng(0)
    root = rng.standard_normal((5, 5))
    a, c, f = root @ root.T / 5 + np.eye(5), rng.standard_normal(5), rng.random(5)
    model = nn.Linear(5, 1, bias=False).to(dtype="float64")
    start = model.weight.numpy().copy().ravel()
    for fisher, hold in (({"weight": f[None]}, np.diag(f)), (None, np.eye(5))):
        model.load_state_dict({"weight": start[None]})
        term = nn.EWC(model, 3.0, fisher)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for _ in range(600):
            away = model.weight - c
            ((away @ a) * away / 2).sum().backward(retain_graph=False)
            term().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = np.linalg.solve(a + 3 * hold, a @ c + 3 * hold @ start)
        np.testing.assert_allclose(model.weight.numpy().ravel(), expected, rtol=1e-8, atol=1e-10)


def test_the_gradient_of_the_term_is_right():
    model, _, _ = classifier()
    term = nn.EWC(model, 2.0, {"weight": np.arange(12.0).reshape(4, 3), "bias": np.ones(4)})
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3
    values = dict(model.named_parameters())

    def of(weight, bias):
        term._trained = {"weight": weight, "bias": bias}
        return term()

    assert mg.gradcheck(of, [values["weight"], values["bias"]])


@pytest.mark.cpu_only("saved on the host")
def test_a_term_is_saved_and_loaded_with_what_it_holds_to(tmp_path):
    model, x, y = classifier("float32")
    term = nn.EWC(model, 2.0, nn.fisher(model, [(x, y)], "data"))
    state = term.state_dict()
    arrays = {f"{part}/{name}": array for part, held in state.items() for name, array in held.items()}
    mg.save(tmp_path / "term.safetensors", arrays)
    model.weight.data += 1.0
    value = term().item()
    other = nn.EWC(model, 2.0)
    assert other().item() == 0
    read = mg.load(tmp_path / "term.safetensors")
    other.load_state_dict({p: {n: read[f"{p}/{n}"] for n in held} for p, held in state.items()})
    assert other().item() == value > 0
    plain = nn.EWC(model, 2.0)
    other.load_state_dict(plain.state_dict())
    assert other.fisher is None and other().item() == 0


def test_what_a_term_is_not_made_of_is_refused():
    model, x, y = classifier()
    good = {"weight": np.ones((4, 3)), "bias": np.ones(4)}
    for strength in (-1.0, float("nan"), float("inf"), "1", True, None):
        with pytest.raises(ArgumentError, match="a strength of at least 0"):
            nn.EWC(model, strength)
    with pytest.raises(StateError, match="bias: None, not"):
        nn.EWC(model, 1.0, {"weight": good["weight"]})
    with pytest.raises(StateError, match=r"weight: \(3, 4\), not \(4, 3\)"):
        nn.EWC(model, 1.0, {**good, "weight": np.ones((3, 4))})
    for wrong in (-1.0, np.nan):
        with pytest.raises(ArgumentError, match="bias"):
            nn.EWC(model, 1.0, {**good, "bias": np.array([1, 1, wrong, 1])})
    with pytest.raises(ArgumentError, match="labels of 'model' or 'data'"):
        nn.fisher(model, [(x, y)], "true")
    with pytest.raises(ArgumentError, match="take a gradient"):
        nn.EWC(nn.Linear(2, 2).requires_grad_(False), 1.0)
    with pytest.raises(ArgumentError, match="a module"):
        nn.EWC({"weight": 1}, 1.0)
    with pytest.raises(StateError):
        nn.EWC(model, 1.0).load_state_dict(nn.EWC(nn.Linear(2, 2), 1.0).state_dict())


# ---- the reservoir ---------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("a reservoir is NumPy's")
def test_each_example_stays_with_the_same_chance():
    """Which 4 of 12 stay, 3000 times: each of the 12, and the place of each, uniform by χ² at the level 0.1 %."""
    counts, first = np.zeros(12), np.zeros(12)
    for seed in range(3000):
        kept = nn.Reservoir(4, generator=seed)
        for part in np.array_split(np.arange(12), 5):
            kept.add(part)
        rows = kept.examples[0]
        assert len(kept) == 4 and kept.seen == 12 and len(set(rows.tolist())) == 4
        counts[rows] += 1
        first[rows.max()] += 1
    # the 4 of one time are chosen without putting back, so the sum of squares has less spread: (n-k)/(n-1) of it
    statistic = ((counts - 1000) ** 2 / 1000).sum() * 11 / 8
    assert statistic < scipy.stats.chi2.ppf(0.999, 11)
    chances = np.array([scipy.special.comb(largest, 3) for largest in range(12)])
    expected = 3000 * chances / chances.sum()  # of the largest of 4 of 12
    assert scipy.stats.chisquare(first[3:], expected[3:]).pvalue > 0.001


@pytest.mark.cpu_only("a reservoir is NumPy's")
def test_drawing_is_uniform_over_what_is_kept():
    kept = nn.Reservoir(8, generator=0)
    kept.add(np.arange(5), np.arange(5.0)[:, None] * np.ones(3))
    numbers, rows = kept.draw(5000)
    assert rows.shape == (5000, 3) and (rows[:, 0] == numbers).all()
    assert scipy.stats.chisquare(np.bincount(numbers, minlength=5)).pvalue > 0.001


class Counting:
    """Batches 0, 1, 2, … that know where they are."""

    def __init__(self):
        self.at = 0

    def draw(self):
        self.at += 1
        return np.full((6, 2), self.at), np.full(6, self.at)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.cpu_only("a reservoir is NumPy's")
def test_batches_with_old_rows_go_on_where_they_were():
    def made():
        kept = nn.Reservoir(3, generator=1)
        return nn.Replay(Counting(), kept, 0.4)

    replay = made()
    replay.reservoir.add(-np.arange(1, 9)[:, None] * np.ones(2, int), -np.arange(1, 9))
    before = [replay.draw() for _ in range(400)]
    shares = np.array([(labels < 0).sum() for _, labels in before])
    assert abs(shares.sum() / 2400 - 0.4) < 5 * np.sqrt(0.24 / 2400)
    assert all((inputs == labels[:, None]).all() for inputs, labels in before)  # rows stay whole
    state = {**replay.state_dict(), "examples": {k: v.copy() for k, v in replay.state_dict()["examples"].items()}}
    after = [replay.draw() for _ in range(5)]
    other = made()
    other.load_state_dict(state)
    for expected, found in zip(after, (other.draw() for _ in range(5)), strict=True):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)
    replay.reservoir.add(np.zeros((5, 2), int), np.zeros(5, int))
    other.reservoir.add(np.zeros((5, 2), int), np.zeros(5, int))
    np.testing.assert_array_equal(replay.reservoir.examples[1], other.reservoir.examples[1])


@pytest.mark.cpu_only("a reservoir is NumPy's")
def test_the_batches_own_arrays_are_not_written_to():
    class Same:
        rows = np.ones(4, int)

        def draw(self):
            return (self.rows,)

    kept = nn.Reservoir(1, generator=0)
    kept.add(np.zeros(1, int))
    assert not nn.Replay(Same(), kept, 1.0).draw()[0].any()
    assert Same.rows.all()


@pytest.mark.cpu_only("a reservoir is NumPy's")
def test_what_a_reservoir_does_not_take_is_refused():
    kept = nn.Reservoir(3)
    with pytest.raises(ArgumentError, match="a reservoir with examples"):
        kept.draw(1)
    with pytest.raises(ShapeError, match="as many rows"):
        kept.add(np.zeros(2), np.zeros(3))
    for columns in ((), (1.0,)):
        with pytest.raises(ShapeError, match="as many rows"):
            kept.add(*columns)
    kept.add(np.zeros((2, 4)))
    for other in (np.zeros((2, 5)), np.zeros((2, 4), "int64")):
        with pytest.raises(ShapeError, match="rows as those in the reservoir"):
            kept.add(other)
    assert kept.seen == 2
    with pytest.raises(ShapeError, match="rows as those in the reservoir"):
        nn.Replay(Counting(), kept, 1.0).draw()
    with pytest.raises(ArgumentError, match="a probability from 0 to 1"):
        nn.Replay(Counting(), kept, 1.5)
    with pytest.raises(ArgumentError, match="capacity"):
        nn.Reservoir(0)
    with pytest.raises(StateError, match="capacity 1"):
        nn.Reservoir(1).load_state_dict(kept.state_dict())
