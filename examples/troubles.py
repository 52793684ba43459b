"""Troubles of training, each planted in a small model, seen, found and cured, in seconds.

    python examples/troubles.py               all of them
    python examples/troubles.py mask labels   these alone

docs/troubleshooting.md tells of each. The data is a chain whose entropy is known: no honest model has a lower loss.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import minigrad as mg
import nn
import optim

VOCABULARY, LENGTH = 8, 16
STEPS, CHANCES = (1, 3), (0.75, 0.25)  # a token is followed by the one so many places on
ENTROPY = -sum(p * math.log(p) for p in CHANCES)  # nats a token: 0.562; guessing costs log 8 = 2.079


@dataclass(frozen=True)
class Case:
    """What one trouble looks like, and what its cure changes: a measure of both, and the instrument's finding."""

    symptom: str
    found: str
    cure: str
    sick: float
    cured: float


def chains(count: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """``count`` sequences (count, LENGTH + 1) of the chain."""
    moves = generator.choice(STEPS, p=CHANCES, size=(count, LENGTH))
    starts = generator.integers(VOCABULARY, size=(count, 1))
    return np.concatenate([starts, starts + moves.cumsum(1)], 1) % VOCABULARY


def small_model(dropout: float = 0.0) -> nn.TransformerLM:
    """A model of one block."""
    return nn.TransformerLM(VOCABULARY, LENGTH, d_model=32, num_layers=1, num_heads=2, dropout=dropout, generator=1)


def trained(
    model: nn.TransformerLM,
    rate: float = 1e-2,
    max_norm: float = 1.0,
    labels: Callable[[Any], Any] = lambda tokens: tokens[:, 1:],
    kind: Callable[..., optim.Optimizer] = optim.AdamW,
) -> float:
    """Train the model on the chain; the mean loss of the last ten updates."""
    generator, losses = np.random.default_rng(0), []
    optimizer = kind(model.parameters(), lr=rate)
    for _ in range(80):
        tokens = chains(16, generator)
        loss = model.loss(tokens[:, :-1], labels(tokens))
        optimizer.zero_grad()
        loss.backward()
        optim.clip_grad_norm(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses[-10:]))


# ---- the troubles ----------------------------------------------------------------------------------------------------


def explodes() -> Case:
    """The loss explodes or is NaN: steps ten times too long, and nothing that limits them."""
    ends = {norm: trained(small_model(), 3.0, norm, kind=optim.SGD) for norm in (math.inf, 100.0, 10.0, 1.0)}
    cured = trained(small_model(), 0.3, kind=optim.SGD)
    raised = ", ".join(f"{end:.3g} with {norm:g}" for norm, end in ends.items() if norm > 1)
    return Case(
        f"the loss ends at {ends[math.inf]:.3g}; guessing costs {math.log(VOCABULARY):.2f}",
        f"raising the clipping threshold makes it worse: {raised}; lowering it helps: {ends[1.0]:.2f} with 1",
        f"a rate of 0.3 instead of 3 ({cured:.2f}), or a threshold of 1",
        ends[100.0],
        cured,
    )


def mask() -> Case:
    """The loss is better than can be: attention sees the tokens that are to be predicted."""

    def leak(model: nn.TransformerLM) -> float:
        """How much the last token changes what is predicted before it."""
        tokens = chains(4, np.random.default_rng(3))[:, :-1]
        changed = tokens.copy()
        changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
        return float(np.abs(model(tokens).data - model(changed).data)[:, :-1].max())

    healthy, blind = small_model(), small_model()
    blind.layers[0].forward = partial(blind.layers[0].forward, is_causal=False)
    sick, cured = trained(blind), trained(healthy)
    return Case(
        f"the loss ends at {sick:.2f}, below the entropy of the data, {ENTROPY:.2f}",
        f"another last token changes earlier logits by {leak(blind):.2g}; in the cured model by {leak(healthy):.2g}",
        "is_causal=True",
        sick,
        cured,
    )


def labels() -> Case:
    """The loss falls to 0: the targets are the inputs, not the tokens after them."""
    model = small_model()
    sick, cured = trained(model, labels=lambda tokens: tokens[:, :-1]), trained(small_model())
    model.eval()
    text = nn.generate(model, [2], 7, temperature=0)
    return Case(
        f"the loss ends at {sick:.2f}, below the entropy of the data, {ENTROPY:.2f}",
        f"the likeliest text repeats its prompt: {text.tolist()}",
        "targets are tokens[:, 1:] for inputs tokens[:, :-1]",
        sick,
        cured,
    )


def evaluation() -> Case:
    """Two evaluations of the same data differ, and both are worse than the model is: dropout is still on."""
    model = small_model(dropout=0.5)
    trained(model)
    tokens = chains(64, np.random.default_rng(4))
    sick, again = (model.loss(tokens[:, :-1], tokens[:, 1:]).item() for _ in range(2))
    model.eval()
    cured = model.loss(tokens[:, :-1], tokens[:, 1:]).item()
    return Case(
        f"the same data gives {sick:.4f} and {again:.4f}",
        "model.training is True",
        "model.eval() before an evaluation, model.train() after it",
        sick,
        cured,
    )


def temperature() -> Case:
    """Samples are poor though the loss is good: a temperature of 2 flattens what was learned."""
    model = small_model()
    trained(model)
    model.eval()
    last = model([[0, 1, 2, 3]]).data[0, -1]
    impossible = [token for token in range(VOCABULARY) if (token - 3) % VOCABULARY not in STEPS]
    sick, cured = (float(nn.next_token_probabilities(last, t)[impossible].sum()) for t in (2.0, 1.0))
    return Case(
        f"{sick:.0%} of the tokens never follow in the data",
        f"next_token_probabilities at 1 gives them {cured:.1%}: the model knows better",
        "a temperature of 1 or less",
        sick,
        cured,
    )


def detached() -> Case:
    """A part of the model doesn't learn: the graph was cut before it, and its gradient is None."""

    def without(cut: Callable[[mg.Tensor], mg.Tensor]) -> list[str]:
        """The parameters that one backward pass gives no gradient."""
        model = small_model()
        model.token_embeddings.register_forward_hook(lambda module, inputs, out: cut(out))
        tokens = chains(4, np.random.default_rng(5))
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        return [name for name, p in model.named_parameters() if p.grad is None]

    sick, cured = without(lambda x: x.detach()), without(lambda x: x)
    return Case(
        "the embeddings stay as they were, whatever the rate",
        f"parameters whose .grad is None after backward(): {', '.join(sick)}",
        "no detach(), .data or .numpy() between parameters and loss",
        len(sick),
        len(cured),
    )


TROUBLES = {trouble.__name__: trouble for trouble in (explodes, mask, labels, evaluation, temperature, detached)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the troubles that were named, or all, and print what each looks like."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TROUBLES)} (default: all)")
    names = parser.parse_args(argv).names
    if unknown := [name for name in names if name not in TROUBLES]:
        parser.error(f"expected names of {', '.join(TROUBLES)}, got {', '.join(unknown)}")
    for name in names or TROUBLES:
        mg.random.seed(0)
        with np.errstate(all="ignore"):
            case = TROUBLES[name]()
        print(f"{name}: {TROUBLES[name].__doc__}")
        print(f"  seen    {case.symptom}\n  found   {case.found}")
        print(f"  cure    {case.cure}\n  figures {case.sick:.3g} sick, {case.cured:.3g} cured\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
