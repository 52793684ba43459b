"""Elastic weight consolidation: a term that holds weights where they were, most those that the old task needs most.

With the same hold on all weights it is L2 towards the old weights, which needs no data of the old task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minigrad import grad, random
from minigrad.backend import Array, array_module, array_of, to_device_of, to_numpy
from minigrad.errors import ArgumentError, StateError
from minigrad.messages.explain import describe, explained
from minigrad.tensor import Tensor
from .. import functional as F
from ..continuation import evaluating
from ..module import Module
from ..sampling import drawn, next_token_probabilities
from .adapted import few

IGNORED = -100  # the label of what isn't predicted, as in cross_entropy


def trained_parameters(model: Any) -> dict[str, Any]:
    """The parameters of a model that take a gradient, by their names."""
    if not isinstance(model, Module):
        raise ArgumentError("a module", describe(model), "nn.EWC(model, 100.0)")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ArgumentError("a model with parameters that take a gradient", "none", "model.requires_grad_(True)")
    return trained


# ---- how much the old task needs each weight -------------------------------------------------------------------------


@explained
def fisher(
    model: Module, batches: Iterable[tuple[Any, ...]], labels: str = "model", *, generator: Any = None
) -> dict[str, Array]:
    """The diagonal of the Fisher information of a classifier's weights, an array for each name, of one prediction.

    ``F_i = Σ_n (∂/∂θ_i Σ_t log p(y_nt | x_n))² / (number of labels)``, from one backward pass an example n. A batch is
    ``(*inputs, labels)``, whose rows are examples; ``model(*inputs)`` gives logits (batch, …, classes) for labels
    (batch, …). Labels of -100 aren't counted.

    - labels: "model" draws y from the model's own p, as the Fisher information is defined; "data" takes the labels
      given, which makes it the empirical Fisher: it vanishes where the model fits them
    - generator: for the draws

    Scores of the several labels of an example, a language model's, have a mean of 0 under "model", so that their
    products drop out in the mean: the squared sum is the sum of squares, at a T-th of the backward passes. The model is
    in evaluation mode meanwhile. Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks" (2017);
    on the two kinds of labels Kunstner et al. (2019).

    >>> import nn
    >>> model = nn.Linear(2, 3)
    >>> importance = nn.fisher(model, [(np.ones((5, 2), "float32"), np.array([0, 1, 2, 0, 1]))], generator=0)
    >>> {name: array.shape for name, array in importance.items()}
    {'weight': (3, 2), 'bias': (3,)}
    """
    if labels not in ("model", "data"):
        raise ArgumentError("labels of 'model' or 'data'", repr(labels), "'model' draws them from its probabilities")
    trained, draw = trained_parameters(model), random.generator(generator)
    total = {name: array_module(p.data).zeros_like(p.data) for name, p in trained.items()}
    count = 0
    with evaluating(model):
        for *inputs, given in batches:
            for row in range(len(given)):
                logits = model(*(part[row : row + 1] for part in inputs))
                targets = np.array(to_numpy(array_of(given[row : row + 1])))
                counted = targets != IGNORED
                if labels == "model":
                    p = next_token_probabilities(logits.detach().reshape(-1, logits.shape[-1]))
                    targets[counted] = drawn(p, draw).reshape(targets.shape)[counted]
                score = F.cross_entropy(logits, to_device_of(targets, logits.data), reduction="sum")
                for name, g in zip(total, grad(score, list(trained.values()), allow_unused=True), strict=True):
                    total[name] += 0 if g is None else g.data**2
                count += int(counted.sum())
    if not count:
        raise ArgumentError("at least one label to predict", "none", "batches of (*inputs, labels)")
    return {name: array / count for name, array in total.items()}


# ---- the term --------------------------------------------------------------------------------------------------------


class EWC:
    """The term ``strength/2 Σ_i F_i (θ_i - θ*_i)²`` to add to a loss, a scalar; θ* are the weights as they are now.

    - fisher: F, an array for each name of a trained parameter, as :func:`fisher` gives; None is 1 for all, which is
      L2 towards the old weights
    - strength: λ. F is that of one prediction, so λ counts the predictions of the old task that the term stands for
      beside a loss that is a mean over labels

    It holds what takes a gradient. ``state_dict`` has θ* and F, so that a run that goes on holds to the same weights.
    Kirkpatrick et al. (2017).

    >>> import nn
    >>> model = nn.Linear(1, 1)
    >>> term = nn.EWC(model, strength=2.0)
    >>> model.weight.data += 3.0
    >>> round(term().item(), 3)
    9.0
    """

    @explained
    def __init__(self, model: Module, strength: float, fisher: Mapping[str, Any] | None = None) -> None:
        number = isinstance(strength, int | float | np.number) and not isinstance(strength, bool)
        if not number or not 0 <= strength < math.inf:
            raise ArgumentError("a strength of at least 0", repr(strength), "the Fisher is of one prediction: try 10")
        self.strength, self._trained = float(strength), trained_parameters(model)
        self.start = {name: p.data.copy() for name, p in self._trained.items()}
        self.fisher = None if fisher is None else self._checked(fisher, "a Fisher")
        if self.fisher and (odd := [name for name, f in self.fisher.items() if not bool((f >= 0).all())]):
            got = f"a NaN or a number below 0 in {few(odd)}"
            raise ArgumentError("a Fisher of squares, none below 0", got, "nn.fisher(model, batches)")

    def __call__(self) -> Tensor:
        """The term, at the weights as they are."""
        total: Any = 0.0
        for name, parameter in self._trained.items():
            moved = parameter - self.start[name]
            total = total + (moved * moved * (1.0 if self.fisher is None else self.fisher[name])).sum()
        out: Tensor = self.strength / 2 * total
        return out

    def _checked(self, arrays: Mapping[str, Any], what: str) -> dict[str, Array]:
        """The arrays as those of the parameters are: of their device and dtype, with the same names and shapes."""
        own = {name: p.shape for name, p in self._trained.items()}
        given = {name: np.shape(array) for name, array in arrays.items()}
        if odd := sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name)):
            got = f"others in {few([f'{name}: {given.get(name)}, not {own.get(name)}' for name in odd])}"
            raise StateError(f"{what} with the names and shapes of what is trained", got, "it must be of this model")
        return {
            name: to_device_of(array_of(array), self._trained[name].data).astype(self._trained[name].dtype)
            for name, array in arrays.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """θ* and F by their names; F only where there is one."""
        return {"start": dict(self.start)} | ({} if self.fisher is None else {"fisher": dict(self.fisher)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold to the θ* and F of ``state``."""
        start = self._checked(state["start"], "a start")
        self.fisher = self._checked(state["fisher"], "a Fisher") if "fisher" in state else None
        self.start = start
