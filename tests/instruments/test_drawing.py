"""``draw``: boxes, arrows, values and gradients against closed forms; folding by the names of parameters."""

from __future__ import annotations

import itertools
import runpy
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import minigrad as mg
import nn
import nn.functional as F
from minigrad.errors import ArgumentError, DTypeError, GraphError, MiniGradError

needs_graphviz = pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")


def leaf(values: Any, name: str | None = None) -> Any:
    t = mg.Tensor(values, requires_grad=True)
    t.name = name
    return t


def titles(drawing: Any) -> list[str]:
    return [box.lines[0] for box in drawing.boxes]


def arrows(drawing: Any) -> set[tuple[str, str]]:
    return {(titles(drawing)[a], titles(drawing)[b]) for a, b, _ in drawing.arrows}


def language_model(**options: Any) -> tuple[Any, Any]:
    mg.random.seed(0)
    model = nn.TransformerLM(11, 8, 16, 2, 2, **options)
    tokens = np.arange(12).reshape(2, 6) % 11
    return model, F.cross_entropy(model(tokens), tokens)


# ---- the graph ------------------------------------------------------------------------------------------------------


def test_boxes_arrows_values_and_gradients() -> None:
    a, b = leaf(2.0, "a"), leaf([1.0, 3.0], "b")
    drawing = mg.draw((a * b + 10).sum())
    # s = Σ (a b + 10): ds/da = Σ b = 4, ds/db = a, and 1 at every element on the way
    assert drawing.text.splitlines() == [
        "0: a  float64 ()  = 2  ∂ 4",
        "1: b  float64 (2,)  = [1, 3]  ∂ [2, 2]",
        "2: multiply  float64 (2,)  ∂ [1, 1]  from 0, 1",
        "3: add  float64 (2,)  ∂ [1, 1]  from 2",
        "4: sum  float64 ()  = 28  ∂ 1  from 3",
    ]


def test_values_that_the_graph_keeps_and_constants_are_shown() -> None:
    x = leaf([1.0, 2.0], "x")
    drawing = mg.draw(mg.concatenate([mg.square(x), x * 3.0]).prod())
    lines = dict(zip(titles(drawing), (box.lines[1:] for box in drawing.boxes), strict=True))
    assert lines["multiply(y=3.0)"][1] == "∂ [24, 12]"  # prod of [1, 4, 3, 6] = 72, over 3 and over 6
    assert lines["concatenate"] == ("float64 (4,)", "= [1, 4, 3, 6]", "∂ [72, 18, 24, 12]")  # kept by prod
    assert lines["x"][2] == "∂ [216, 108]"  # 72·2x + 24·3, 18·2x + 12·3


def test_of_many_numbers_the_norm_of_the_gradient_is_shown() -> None:
    assert mg.draw((leaf(np.zeros(100)) * 3.0).sum()).boxes[0].lines == ("leaf", "float64 (100,)", "‖∂‖ = 30")


def test_nothing_is_changed_by_drawing() -> None:
    model, loss = language_model()
    mg.draw(loss)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    drawn = [p.grad for p in model.parameters()]
    model.zero_grad()
    language_model()[1]  # the same again, not drawn
    other, plain = language_model()
    plain.backward()
    for mine, p in zip(drawn, other.parameters(), strict=True):
        np.testing.assert_allclose(mine, p.grad, rtol=1e-5, atol=1e-7)


def test_without_a_scalar_or_with_changed_data_leaves_show_their_own_gradient() -> None:
    x = leaf([1.0, 2.0], "x")
    (x * x).sum().backward()
    assert mg.draw(x * x).boxes[0].lines[-1] == "∂ [2, 4]"
    assert mg.draw((x * 7.0).sum(), gradients=False).boxes[0].lines[-1] == "∂ [2, 4]"
    y = (x * x).sum()
    x.data = np.array([5.0, 5.0])
    assert mg.draw(y).boxes[0].lines == ("x", "float64 (2,)", "= [5, 5]", "∂ [2, 4]")


def test_a_leaf_alone_and_several_results() -> None:
    assert mg.draw(leaf(1.0, "x")).text == "0: x  float64 ()  = 1  ∂ 1"

    @mg.primitive
    def both(x: Any) -> Any:
        return x + 1, x * 2

    both.defvjp(lambda g: g[0] + 2 * g[1])
    drawing = mg.draw(both(leaf(3.0, "x"))[1])
    assert titles(drawing) == ["x", "both", "pick"] and drawing.boxes[1].lines[1] == "2 results"
    assert drawing.boxes[0].lines == ("x", "float64 ()", "= 3", "∂ 2")


def test_deep_graphs_are_cut_and_say_so() -> None:
    x = y = leaf(1.0, "x")
    for _ in range(20_000):
        y = y * 1.0
    drawing = mg.draw(y, max_nodes=3)
    assert drawing.boxes[0].lines == ("19,997 more operations", "max_nodes=3")
    assert len(drawing.boxes) == 4 and [arrow[:2] for arrow in drawing.arrows] == [(0, 1), (1, 2), (2, 3)]
    assert drawing.boxes[-1].lines[-1] == "∂ 1" and x.grad is None
    assert len(mg.draw(y).boxes) == 201


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mg.draw(np.ones(3)), DTypeError, "a Tensor, whose graph is to be drawn"),
        (lambda: mg.draw(leaf(1.0), max_nodes=0), ArgumentError, "max_nodes from 1"),
        (lambda: mg.draw(leaf(1.0)).save("graph.gif"), ArgumentError, "a file name that ends in .dot"),
    ],
)
def test_misuse(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_freed_graph_is_refused() -> None:
    y = mg.exp(leaf(1.0))
    y.backward()
    with pytest.raises(GraphError, match="draw it before backward"):
        mg.draw(y)


# ---- folding --------------------------------------------------------------------------------------------------------


def test_a_model_folds_into_its_modules() -> None:
    model, loss = language_model()
    drawing = mg.draw(loss, fold=True)
    stages = ["token_embeddings", "layers.0", "layers.1", "ln_final", "lm_head", "cross_entropy"]
    assert titles(drawing) == stages
    assert arrows(drawing) == set(itertools.pairwise(stages))
    assert all(label == "(2, 6, 16)" for a, _, label in drawing.arrows if a < 4)
    counts = {box.lines[0]: int(box.lines[1].split(", ")[1].split()[0].replace(",", "")) for box in drawing.boxes[:-1]}
    for name, count in counts.items():
        assert count == sum(p.size for key, p in model.named_parameters() if key.startswith(f"{name}."))
    loss.backward()
    norm = np.sqrt(sum((p.grad.astype(float) ** 2).sum() for p in model.layers[1].parameters()))
    assert drawing.boxes[2].lines[-1] == f"‖∂‖ = {norm:.3g}"


@pytest.mark.cpu_only("a kernel that the CPU alone has")
def test_two_levels_show_the_parts_of_a_block_with_its_residual_connections() -> None:
    """The norms are parts of the operations that read what they normalise: their gains go into these."""
    drawing = mg.draw(language_model()[1], fold=2)
    parts = {f"layers.{i}.{part}" for i in (0, 1) for part in ("ln1.weight", "attn", "ln2.weight", "ffn")}
    assert parts < set(titles(drawing)) and titles(drawing).count("add") == 4
    found = arrows(drawing)
    assert {("layers.0.ln1.weight", "layers.0.attn"), ("layers.0.attn", "add"), ("token_embeddings", "add")} < found
    assert {("token_embeddings", "layers.0.attn"), ("layers.0.ln2.weight", "layers.0.ffn")} < found
    assert {("add", "layers.0.ffn"), ("layers.0.ffn", "add"), ("add", "ln_final")} < found


def test_a_module_that_runs_twice_gets_two_boxes_and_arrows_never_go_back() -> None:
    drawing = mg.draw(language_model(tie_embeddings=True)[1], fold=True)
    assert titles(drawing)[0] == "token_embeddings" and titles(drawing)[-2] == "token_embeddings (2)"
    assert all(a < b for a, b, _ in drawing.arrows)


def test_unnamed_inputs_stay_outside_of_the_fold() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = leaf(np.ones((5, 3)), "x")
    drawing = mg.draw((model(x) ** 2).mean(), fold=True)
    assert titles(drawing)[:2] == ["x", "0"] and titles(drawing)[-3] == "2" and "mean" in titles(drawing)
    assert ("x", "0") in arrows(drawing) and any(b == "2" for _, b in arrows(drawing))


# ---- its forms ------------------------------------------------------------------------------------------------------


def test_dot_holds_every_box_and_arrow() -> None:
    drawing = mg.draw(language_model()[1])
    assert len(drawing.boxes) > 40
    assert drawing.dot.count("[label=") == len(drawing.boxes) and drawing.dot.count(" -> ") == len(drawing.arrows)


@needs_graphviz
def test_graphviz_draws_them_all_whatever_the_names() -> None:
    awkward = '"\\n<b>&#35; {x|y} é'
    drawing = mg.draw(leaf(1.0, awkward) + leaf(2.0, "plain"))
    picture = ElementTree.fromstring(drawing.svg())
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert awkward in texts and "plain" in texts
    kinds = [group.get("class") for group in picture.iter("{http://www.w3.org/2000/svg}g")]
    assert (kinds.count("node"), kinds.count("edge")) == (3, 2)
    assert drawing._repr_svg_() == drawing.svg()


def test_without_graphviz_the_texts_remain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    drawing = mg.draw(mg.exp(leaf(1.0)))
    with pytest.raises(MiniGradError, match=r"Expected: Graphviz.*\nGot: no 'dot' on the PATH\nHint: install it"):
        drawing.svg()
    assert drawing._repr_svg_() is None and repr(drawing) == drawing.text
    for suffix, text in (
        (".dot", drawing.dot),
        (".gv", drawing.dot),
        (".TXT", drawing.text),
    ):
        drawing.save(tmp_path / f"graph{suffix}")
        assert (tmp_path / f"graph{suffix}").read_text(encoding="utf-8") == text


@needs_graphviz
@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_pictures_are_saved_by_suffix(suffix: str, start: bytes, tmp_path: Path) -> None:
    mg.draw(leaf(1.0)).save(tmp_path / f"graph{suffix}")
    assert (tmp_path / f"graph{suffix}").read_bytes().startswith(start)


# ---- the pictures of docs/instruments.md ----------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"


def written(svg: str) -> list[str | None]:
    """All that is written in a picture."""
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_the_pictures_are_up_to_date() -> None:
    """If not: ``python docs/make_pictures.py``."""
    script = runpy.run_path(str(DOCS / "make_pictures.py"))
    assert (DOCS / "memory.svg").read_text(encoding="utf-8") == script["memory_curves"]()
    for name, picture in (("graph.svg", script["regression"]()), ("model.svg", script["language_model"]())):
        fold = name == "model.svg"
        boxes = [box.lines for box in mg.draw(picture, fold=fold, gradients=not fold).boxes]
        found = written((DOCS / name).read_text(encoding="utf-8"))
        expected = [lines[0] for lines in boxes] if fold else [line for lines in boxes for line in lines]
        assert set(expected) <= set(found), name
    page = (DOCS / "instruments.md").read_text(encoding="utf-8")
    assert all(f"]({name})" in page for name in script["PICTURES"])
