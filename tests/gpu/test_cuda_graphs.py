"""A step as a CUDA graph: replays are the ordinary steps, bit for bit, and what can't be captured is told by its line.

On the simulated GPU a capture computes nothing: work is noted, and done at each launch on the numbers of then; memory
that the graph's pool could have given to something else holds rubbish before each launch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_lm
from support.simulated import device, streams
from training.run import read_metrics

import minigrad as mg
import nn
import optim
from minigrad import captures
from minigrad.backend import to_numpy
from minigrad.errors import DeviceError, GraphError, IndexRangeError, ShapeError
from minigrad.machine.cublas import FUNCTIONS
from minigrad.ops._gemm import ARGUMENTS


class Training:
    """A language model whose step accumulates two micro-batches, clips, scales its loss and has dropout."""

    def __init__(self, dtype: str = "float32", dropout: float = 0.1, init_scale: float = 2.0**16) -> None:
        mg.random.seed(0)
        sizes: dict[str, Any] = {"context_length": 8, "d_model": 32, "num_layers": 2, "num_heads": 2}
        self.model = nn.TransformerLM(40, **sizes, dropout=dropout, device="cuda")
        self.optimizer = optim.AdamW(optim.decay_groups(self.model.named_parameters(), 0.1))
        self.scaler = optim.GradScaler(init_scale, growth_interval=2, enabled=dtype == "float16")
        self.dtype, self.steps, self.rng = dtype, 0, np.random.default_rng(5)

    def step(self, parts: list[Any], share: Any) -> tuple[Any, Any]:
        total: Any = 0.0
        for ids in parts:
            with mg.autocast(self.dtype):
                loss = self.model.loss(ids[:, :-1], ids[:, 1:], ignore_index=7) * share
            self.scaler.scale(loss).backward()
            total = total + loss.data
        self.scaler.unscale_(self.optimizer)
        norm = optim.clip_grad_norm(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer, where=np.isfinite(total))
        self.scaler.update()
        self.optimizer.zero_grad()
        return total, norm

    def batch(self) -> list[Any]:
        """Two micro-batches, each time others, with another learning rate and another number of labels that count."""
        self.steps += 1
        for k, group in enumerate(self.optimizer.param_groups):
            group["lr"] = 1e-2 / (self.steps + k)
        return [self.rng.integers(0, 40, (2, 9)) for _ in range(2)]

    def run(self, step: Callable[..., Any], steps: int = 7) -> list[Any]:
        """All that the steps lead to: losses, norms, weights, moments, counts, and the state of the generator."""
        found = [[float(number) for number in step(self.batch(), 0.5)] for _ in range(steps)]
        weights = [parameter.numpy() for parameter in self.model.parameters()]
        state = self.optimizer.state_dict()["state"]
        moments = {name: to_numpy(value) for name, value in state.items()}
        return [found, weights, moments, self.scaler.state_dict(), mg.random.get_state()]


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 1.0), ("bfloat16", 1.0), ("float16", 2.0**16), ("float16", 2.0**22)]
)
def test_replays_are_the_ordinary_steps(dtype: str, scale: float, simulated: Any) -> None:
    """Bit for bit, with dropout, accumulation, clipping, other ids, rates and counts, and steps that overflow."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    plain = Training(dtype, init_scale=scale)
    expected = plain.run(plain.step)
    captured = Training(dtype, init_scale=scale)
    step = mg.cuda.graph(captured.step)
    found = captured.run(step)
    assert step.captured
    assert_same(found, expected)
    if scale == 2.0**22:
        assert 2 < captured.scaler.skipped < 7  # among them replays, and replays that moved the weights


def test_a_replay_uploads_once_and_waits_for_nothing(simulated: Any) -> None:
    training = Training("float16")
    step = mg.cuda.graph(training.step)
    for _ in range(2):
        step(training.batch(), 0.5)
    waited, batch = simulated.synchronisations, training.batch()
    simulated.launches.clear()
    step(batch, 0.5)
    assert simulated.synchronisations == waited
    assert simulated.launches == {"upload": 1, "setitem": 1, "graph": 1, "copy": 2}


def test_two_captures_have_the_same_launches(simulated: Any) -> None:
    """Grids, pointers and numbers do not depend on ids, rates, counts of steps, nor on what dropout draws."""
    training = Training("float16")
    logs = []
    for _ in range(2):
        step = mg.cuda.graph(training.step)
        for _ in range(3):
            step(training.batch(), 0.5)
        logs.append(step._recording._graph.recording.log)  # type: ignore[union-attr]
    assert len(logs[0]) > 300
    first, second = ([re.sub(r"\('before', \d+", "('before'", str(line)) for line in log] for log in logs)
    assert first == second
    places = [sorted(re.findall(r"\('before', (\d+)", str(log))) for log in logs]
    own = [set(one) - set(other) for one, other in (places, places[::-1])]
    assert all(len(pointers) <= 6 for pointers in own)  # what each graph is given: ids, shares


def test_graphs_take_turns(simulated: Any) -> None:
    """Each has its stream, pool, workspace of cuBLAS and places; weights and the state of the optimizer are shared."""
    found = []
    for wrap in (lambda step: step, mg.cuda.graph):
        training = Training("float16")
        whole, half = wrap(training.step), wrap(lambda parts, share, training=training: training.step(parts[:1], share))
        order = [whole, half, half, whole, whole, half, half, whole]
        found.append([[float(number) for number in step(training.batch(), 1.0)] for step in order])
    assert found[0] == found[1]


def test_kernels_of_a_captured_step_are_those_of_an_ordinary_one(simulated: Any) -> None:
    training = Training()
    simulated.launches.clear()
    training.step(training.batch(), 0.5)
    training.step(training.batch(), 0.5)
    simulated.launches.clear()
    training.step(training.batch(), 0.5)
    ordinary = {name: n for name, n in simulated.launches.items() if "_" in name and name != "zeros_like"}
    step = mg.cuda.graph(training.step)
    step(training.batch(), 0.5)
    simulated.launches.clear()
    step(training.batch(), 0.5)
    assert ordinary == {name: simulated.launches[name] for name in ordinary}


# ---- what a step may be given ----------------------------------------------------------------------------------------


def test_arguments_change_and_results_stay(gpu: Any) -> None:
    w = mg.Tensor(np.arange(4.0, dtype=np.float32), device="cuda")

    @mg.cuda.graph
    def step(x: Any, parts: dict[str, Any], factor: Any, name: str) -> Any:
        assert name == "a"
        return {"sum": x * w + parts["y"], "scaled": (w * factor,)}

    results = []
    for k in range(1, 5):
        x = mg.Tensor(np.full(4, k, np.float32), device="cuda")
        results.append(step(x, {"y": gpu.asarray(np.full(4, 10 * k, np.float32))}, k / 2, "a"))
    assert step.captured
    for k, result in enumerate(results, 1):
        np.testing.assert_array_equal(result["sum"].numpy(), k * np.arange(4) + 10 * k)
        np.testing.assert_array_equal(result["scaled"][0].numpy(), np.arange(4) * k / 2)


def test_an_encoder_decoder_with_padding(gpu: Any) -> None:
    """Masks of padding are made anew for each batch."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 20, (4, 2, 6)), rng.integers(1, 20, (4, 2, 5))
    source[0, 0, 4:] = source[2, 1, 1:] = target[1, 0, 3:] = target[3, 1, 2:] = 0
    found = []
    for wrap in (lambda step: step, mg.cuda.graph):
        mg.random.seed(1)
        options: dict[str, Any] = {"d_model": 16, "num_heads": 2, "num_layers": 1, "d_ff": 32, "pad_id": 0}
        model = nn.Transformer(20, 20, **options, dropout=0.1, attention_dropout=0.1, device="cuda")
        optimizer = optim.AdamW(model.parameters(), lr=0.01)

        def step(source: Any, target: Any, model: Any = model, optimizer: Any = optimizer) -> Any:
            loss = model.loss(source, target[:, :-1], target[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = wrap(step)
        found.append([float(run(s, t)) for s, t in zip(source, target, strict=True)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    assert len(set(found[0])) == 4


def test_other_shapes_are_refused_and_can_be_asked_for(gpu: Any) -> None:
    training = Training()
    step = mg.cuda.graph(training.step)
    for _ in range(3):
        step(training.batch(), 0.5)
    short = [ids[:1] for ids in training.batch()]
    assert step.takes(training.batch(), 0.25) and not step.takes(short, 0.25)
    with pytest.raises(ShapeError, match=r"int64 \(1, 9\) on the host.* at .*test_cuda_graphs.py:\d+"):
        step(short, 0.5)
    step.function(short, 0.5)  # as it is
    step(training.batch(), 0.5)
    with pytest.raises(ShapeError, match="by their places"):
        step(parts=training.batch(), share=0.5)


def test_ids_that_do_not_fit_move_nothing(gpu: Any) -> None:
    training = Training(dropout=0.0)
    step = mg.cuda.graph(training.step)
    for _ in range(3):
        step(training.batch(), 0.5)
    before = [parameter.numpy() for parameter in training.model.parameters()]
    wrong = training.batch()
    wrong[1][0, 3] = 40
    with pytest.raises(IndexRangeError, match="every id from 0 to 39"):
        step(wrong, 0.5)
    assert_same([parameter.numpy() for parameter in training.model.parameters()], before)
    step(training.batch(), 0.5)


def test_weights_that_were_replaced_are_refused(gpu: Any) -> None:
    training = Training()
    step = mg.cuda.graph(training.step)
    for _ in range(3):
        step(training.batch(), 0.5)
    weight = training.model.ln_final.weight
    data = weight.data
    weight.data = data.copy()
    with pytest.raises(GraphError, match=r"make a new mg\.cuda\.graph"):
        step(training.batch(), 0.5)
    weight.data = data
    step(training.batch(), 0.5)
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    with pytest.raises(GraphError, match=r"make a new mg\.cuda\.graph"):
        step(training.batch(), 0.5)


# ---- what can't be captured ------------------------------------------------------------------------------------------

X = np.arange(4.0, dtype=np.float32)


def upload(x: Any) -> Any:
    return x + mg.Tensor(np.ones(4, np.float32), device="cuda")


def upload_by_cupy(x: Any) -> Any:
    return x + device.cupy.asarray(np.ones(4, np.float32))


def product_of_cupy(x: Any) -> Any:
    return device.cupy.matmul(x.data, x.data)


def caught(x: Any) -> Any:
    with contextlib.suppress(RuntimeError):
        x.sum().item()
    return x


REFUSED: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "item": (lambda x: x.sum().item(), "a wait for the device", "look at it after the call"),
    "print": (lambda x: print(x), "a wait for the device", "look at it after the call"),
    "float": (lambda x: float(x.sum()), "a wait for the device", "look at it after the call"),
    "if": (lambda x: x if x.sum() > 0 else -x, "a wait for the device", "look at it after the call"),
    "numpy": (lambda x: x.numpy(), "a wait for the device", "look at it after the call"),
    "synchronize": (lambda x: mg.cuda.synchronize(), "a wait for the device", "look at it after the call"),
    "boolean index": (lambda x: x[x > 0], "a wait for the device", "look at it after the call"),
    "upload": (upload, "an upload of float32 (4,)", "make others before"),
    "upload by CuPy": (upload_by_cupy, "an upload of 16 bytes", "make constants before"),
    "product of CuPy": (product_of_cupy, "during stream capture", "can be captured"),
    "linalg": (lambda x: mg.linalg.inv(x.reshape(2, 2)), "a wait for the device", "look at it after the call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused_with_its_line(
    name: str, simulated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    function, got, hint = REFUSED[name]
    x = mg.Tensor(X + np.float32([1, 0, 0, 0]), device="cuda")
    step = mg.cuda.graph(function)
    step(x)  # rehearsed, it works
    with pytest.raises(DeviceError) as told:
        step(x)
    error = told.value
    assert error.expected == "a step that the GPU does without the host, in mg.cuda.graph"
    line = function.__code__.co_firstlineno
    (at,) = re.findall(r" at (.+):(\d+): ", error.got)
    assert error.got.startswith(got) or got in error.got
    assert at[0] == __file__ and line <= int(at[1]) <= line + 3 and hint in error.hint
    # the stream, the allocators and the library are what they were
    assert not streams.recordings and not streams.current and captures.now.capture is None
    np.testing.assert_array_equal((x + x).numpy(), 2 * x.numpy())
    fine = mg.cuda.graph(lambda x: x @ x)
    for _ in range(3):
        assert float(fine(x)) == pytest.approx(float((x.numpy() ** 2).sum()))


def test_an_error_that_the_step_catches_is_told_too(simulated: Any) -> None:
    step, x = mg.cuda.graph(caught), mg.Tensor(X, device="cuda")
    step(x)
    with pytest.raises(DeviceError, match="after an error that the step has caught"):
        step(x)
    assert not streams.recordings


def test_a_refused_capture_takes_back_what_the_host_counted(simulated: Any) -> None:
    training = Training("float16")
    wrong = [False]

    def step(parts: Any, share: Any) -> Any:
        total, _ = training.step(parts, share)
        return float(total) if wrong[0] else total

    run = mg.cuda.graph(step)
    run(training.batch(), 0.5)
    state, steps = mg.random.get_state(), [s["step"] for s in training.optimizer.state]
    weights = [parameter.numpy() for parameter in training.model.parameters()]
    wrong[0], batch = True, training.batch()
    with pytest.raises(DeviceError, match="a wait for the device"):
        run(batch, 0.5)
    assert mg.random.get_state() == state and [s["step"] for s in training.optimizer.state] == steps
    assert_same([parameter.numpy() for parameter in training.model.parameters()], weights)
    wrong[0] = False
    run(batch, 0.5)
    assert run.captured


@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, lr=0.1), lambda p: optim.SGD(p, lr=0.1, momentum=0.9)])
def test_an_optimizer_without_a_kernel_is_refused(make: Any, simulated: Any) -> None:
    w = mg.Tensor(X, requires_grad=True, device="cuda")
    optimizer = make([w])

    @mg.cuda.graph
    def step() -> Any:
        (w * w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pytest.raises(DeviceError, match="a step of SGD"):
        step()


def test_a_checkpoint_with_dropout_is_refused(simulated: Any) -> None:
    w = mg.Tensor(X, requires_grad=True, device="cuda")
    step = mg.cuda.graph(lambda: mg.checkpoint(lambda v: nn.functional.dropout(v * v), w).sum().backward())
    step()
    with pytest.raises(DeviceError, match=r"random numbers that mg\.checkpoint draws again"):
        step()


def test_arguments_are_constants(simulated: Any) -> None:
    w = mg.Tensor(X, requires_grad=True, device="cuda")
    with pytest.raises(DeviceError, match="requires_grad=True"):
        mg.cuda.graph(lambda x: x.sum())(w)


def test_cublas_is_called_with_as_many_arguments_as_by_cupy() -> None:
    assert len(FUNCTIONS["cublasGemmStridedBatchedEx"]) == len(ARGUMENTS.split())


# ---- the trainer -----------------------------------------------------------------------------------------------------

FLAGS = [
    *("--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--block-size", "8", "--batch-size", "2", "--seed", "3"),
    *("--max-iters", "6", "--warmup-iters", "3", "--log-interval", "1", "--eval-iters", "1", "--sample-tokens", "1"),
    *("--no-progress", "--dropout", "0.1", "--gradient-accumulation-steps", "2", "--device", "cuda"),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_train_lm_takes_a_graph_and_says_so(
    tmp_path: Path, simulated: Any, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    lines = []
    for flags in ([], ["--no-cuda-graph"]):
        folder = tmp_path / str(len(flags))
        assert train_lm.main([*FLAGS, *flags, "--dtype", dtype, "--out-dir", str(folder)]) == 0
        assert ("replayed as a CUDA graph" in capsys.readouterr().out) == (not flags)
        lines.append([(line["train_loss"], line["grad_norm"]) for line in read_metrics(folder / "metrics.jsonl")[1:]])
    assert lines[0] == lines[1] and len(lines[0]) == 6


def test_train_lm_goes_on_without_a_graph_where_it_must(
    tmp_path: Path, simulated: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = optim.clip_grad_norm
    monkeypatch.setattr(optim, "clip_grad_norm", lambda params, most: plain(params, most, error_if_nonfinite=True))
    assert train_lm.main([*FLAGS, "--out-dir", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "each kernel is launched by itself" in out and "a wait for the device" in out
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    monkeypatch.undo()
    assert train_lm.main([*FLAGS, "--no-cuda-graph", "--out-dir", str(tmp_path / "other")]) == 0
    others = read_metrics(tmp_path / "other" / "metrics.jsonl")
    assert [line["train_loss"] for line in lines] == [line["train_loss"] for line in others]
