"""The training loop, whatever is trained: what one update does, and what happens between updates.

A program describes its task by a model, batches, a loss, and what to evaluate and to show; ``prepare`` and ``train`` do
the rest, with the flags of ``TrainingFlags``. Reading order: ``train``, ``update``, ``Step``, ``backward``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import minigrad as mg
import nn
import optim
from minigrad.backend import array_module
from minigrad.errors import DeviceError, NonFiniteError
from training.flags import TrainingFlags
from training.run import Run

MicroBatch = tuple[Any, ...]  # what the model reads, and last the labels


class Batches(Protocol):
    """Micro-batches without end, and where they are."""

    def draw(self) -> MicroBatch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Task:
    """What is trained."""

    model: Any
    batches: Batches
    loss: Callable[..., Any]  # of a micro-batch, the mean over its labels
    count: Callable[..., int]  # the labels of a micro-batch that are counted
    evaluate: Callable[[], tuple[float, dict[str, float]] | None]  # validation loss and more; None: a signal came
    sample: Callable[[int], str]  # what the model can do at this step, to look at
    saved: Any = None  # the part of the model that checkpoints hold, by default all of it
    overlap: mg.distributed.Overlap | None = None  # exchanges the gradients of several processes beside the last pass
    parts: Mapping[str, Any] = field(default_factory=dict)  # what else they hold, of a term of the loss, say
    step: Step | None = None  # made at the first update


# ---- the loop --------------------------------------------------------------------------------------------------------


def prepare(config: TrainingFlags, run: Run, task: Task) -> tuple[optim.AdamW, optim.GradScaler]:
    """Make the optimizer and the loss scale, restore the state of a continued run, and print what is trained.

    Only float16 needs a loss scale: its gradients would vanish below 6e-8, and overflow above 65504.
    """
    groups = optim.decay_groups(task.model.named_parameters(), config.weight_decay)
    optimizer = optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))
    scaler = optim.GradScaler(enabled=config.dtype == "float16")
    parts = {"model": task.saved or task.model, "optimizer": optimizer, "batches": task.batches, **task.parts}
    if scaler.enabled:
        parts["scaler"], run.facts = scaler, lambda: loss_scale(scaler)
    run.attach(**parts)
    begin_together(config, run, task)
    if config.overlap:
        task.overlap = mg.distributed.Overlap(task.model.parameters())
    print(nn.summary(task.model))
    loops = ", compiled loops (numba)" if run.compiled else ""
    run.print(f"{config.dtype} on {config.device}{loops}, {run.origin}")
    return optimizer, scaler


def begin_together(config: TrainingFlags, run: Run, task: Task) -> None:
    """Give every process the weights of the first, and random numbers of its own for dropout."""
    mg.distributed.broadcast_model(task.model)
    if ranks := mg.distributed.size() - 1:
        run.print(f"{ranks + 1} processes of {mg.get_num_threads()} threads, each with its part of the batch")
        run.print(*mg.distributed.get_communicator().names)  # mpiexec names a killed one by its process
    if rank := mg.distributed.rank():
        mg.random.seed(int(np.random.SeedSequence([config.seed, run.step, rank]).generate_state(1)[0]))


def my_rows(micro_batch: MicroBatch) -> MicroBatch:
    """This process's rows of a micro-batch that all have drawn."""
    rank, size = mg.distributed.rank(), mg.distributed.size()
    rows = [len(part) for part in micro_batch]
    return tuple(part[rank * n // size : (rank + 1) * n // size] for part, n in zip(micro_batch, rows, strict=True))


def shared_out(function: Callable[[list[Any]], list[Any]], items: Sequence[Any]) -> list[Any]:
    """``function(items)``, item by item a result for JSON, of which each process computes its part."""
    rank, size = mg.distributed.rank(), mg.distributed.size()
    text = np.frombuffer(json.dumps(function(list(items[rank::size]))).encode(), np.uint8)
    lengths = mg.distributed.all_gather(np.array([len(text)]))
    texts = mg.distributed.all_gather(np.pad(text, (0, lengths.max() - len(text)), constant_values=ord(" "))[None])
    found = [None] * len(items)
    for other, part in enumerate(texts):
        found[other::size] = json.loads(part.tobytes())
    return found


def loss_scale(scaler: optim.GradScaler) -> dict[str, int]:
    """What the log says of the loss scale and of the updates that were left out; an error where no scale helps."""
    scale = scaler.get_scale()
    if scale < 1:
        got = f"overflow, whatever the loss scale, in {scaler.skipped} updates that were left out"
        raise NonFiniteError("gradients that float16 can hold", got, "a lower --learning-rate, or --dtype bfloat16")
    return {"skipped": scaler.skipped, "loss_scale": int(scale)}


def train(config: TrainingFlags, run: Run, task: Task, optimizer: optim.AdamW, scaler: optim.GradScaler) -> int:
    """Update, evaluate, report, save and sample until the last update or a signal; returns the exit status."""
    watch = mg.detect_anomaly() if config.detect_anomaly else np.errstate(all="ignore")  # update() looks itself
    with run.writing(), watch:
        while True:
            with mg.distributed.long_work():
                if run.evaluation_due and (found := task.evaluate()):
                    run.evaluated(*found)
                run.stop.agree()
                run.report()
                if run.checkpoint_due:
                    mg.distributed.check_replicas(task.model)
                    run.save()
                if run.sample_due and mg.distributed.rank() == 0:
                    run.print(f"---- sample at step {run.step}\n{task.sample(run.step)}\n----")
                if run.finished:
                    return run.conclude()
            update(config, run, task, optimizer, scaler)


def update(config: TrainingFlags, run: Run, task: Task, optimizer: optim.AdamW, scaler: optim.GradScaler) -> None:
    """One step of the optimizer on the gradient of all micro-batches together.

    What is not finite moves nothing. In float16 that is no error: the loss scale is lowered, and the next step may fit.
    """
    run.begin_update()
    micro_batches = [my_rows(task.batches.draw()) for _ in range(config.gradient_accumulation_steps)]
    counts = [task.count(*micro_batch) for micro_batch in micro_batches]
    rate = learning_rate(config, run.step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    total = sum(counts) or 1
    shares = [count / total for count in counts]  # of the tokens
    if task.step is None:
        task.step = Step(config, run, task, optimizer, scaler)
    loss, norm, fine, tokens = task.step(micro_batches, shares, sum(counts))
    run.end_update(loss=loss, lr=rate, grad_norm=norm, tokens=tokens, good=fine)


class Step:
    """The part of an update between its batches and its numbers, on a GPU as a CUDA graph where that can be.

    The first update with micro-batches of some shapes rehearses their graph, the second captures it. Each has memory of
    its own, so that there are FORMS at most. Others are computed without one, and so are all where something can't be
    captured.
    """

    FORMS = 32

    def __init__(
        self, config: TrainingFlags, run: Run, task: Task, optimizer: optim.AdamW, scaler: optim.GradScaler
    ) -> None:
        self.config, self.run, self.task, self.optimizer, self.scaler = config, run, task, optimizer, scaler
        wanted = config.device == "cuda" and not (config.no_cuda_graph or config.detect_anomaly)
        self.most = self.FORMS if wanted and mg.distributed.size() == 1 else 0
        self.graphs: list[Any] = []

    def __call__(self, micro_batches: list[MicroBatch], shares: list[float], tokens: int) -> tuple[Any, ...]:
        """Loss, norm of the gradient, whether they are finite, and how many tokens counted."""
        graph = next((graph for graph in self.graphs if graph.takes(micro_batches, shares)), None)
        if graph is None and len(self.graphs) < self.most:
            graph = mg.cuda.graph(self.compute)
            self.graphs.append(graph)
        if graph is None:
            return self.compute(micro_batches, shares, tokens)
        first = not any(other.captured for other in self.graphs)
        try:
            found = graph(micro_batches, shares)
        except DeviceError as error:
            if graph.captured:
                raise
            self.run.print(f"each kernel is launched by itself: expected {error.expected}, got {error.got}")
            self.most, self.graphs = 0, []
            self.optimizer.zero_grad()
            return self.compute(micro_batches, shares, tokens)
        if first and graph.captured:
            self.run.print("updates are replayed as a CUDA graph")
        return *found[:3], tokens

    def compute(self, micro_batches: list[MicroBatch], shares: list[Any], tokens: int = 0) -> tuple[Any, ...]:
        """The same, kernel by kernel."""
        task, dtype = self.task, self.config.dtype
        loss = backward(task.loss, micro_batches, shares, dtype, self.scaler, task.overlap, tokens)
        if mg.distributed.size() > 1:
            loss, tokens = over_all(task, loss, tokens)
        self.scaler.unscale_(self.optimizer)
        norm = optim.clip_grad_norm(task.model.parameters(), self.config.grad_clip or math.inf)
        good = np.isfinite(loss) & np.isfinite(norm)
        fine = good | self.scaler.enabled
        if self.config.device == "cpu" and not fine:  # a GPU leaves it out, and is asked at the next line of the log
            what = "gradient norm" if np.isfinite(loss) else "loss"
            raise non_finite(what, task.model, lambda: [task.model(*inputs) for *inputs, _ in micro_batches])
        self.scaler.step(self.optimizer, where=good)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss, norm, fine, tokens


def over_all(task: Task, loss: Any, tokens: int) -> tuple[Any, int]:
    """The loss and the tokens of all processes; averages their gradients too, where that isn't done."""
    params = list(task.model.parameters())
    if task.overlap:
        total = float(mg.distributed.all_reduce(np.float64(tokens)))
    else:
        total = mg.distributed.average_gradients(params, tokens)
    loss = array_module(params[0].data).asarray(loss, "float64") * (tokens / (total or 1))  # where the others have it
    return mg.distributed.all_reduce(loss)[()], int(total)


def learning_rate(config: TrainingFlags, step: int) -> float:
    """The rate of an update, the first being number 1; both schedules rise to --learning-rate.

    The paper's own peak of noam is 1 / √(width · warm-up).
    """
    if config.schedule == "noam":
        return optim.noam_schedule(
            step, 1, config.warmup_iters, factor=config.learning_rate * math.sqrt(config.warmup_iters or 1)
        )
    total = config.lr_decay_iters or config.max_iters
    return optim.cosine_schedule(step, config.learning_rate, config.min_lr or 0.0, config.warmup_iters, total)


# ---- the gradient, and what to say when it is not finite -------------------------------------------------------------


def backward(
    loss_of: Callable[..., Any],
    micro_batches: Sequence[MicroBatch],
    shares: Sequence[Any],
    dtype: str,
    scaler: optim.GradScaler,
    overlap: mg.distributed.Overlap | None = None,
    tokens: int = 0,
) -> Any:
    """The loss over all counted tokens of the micro-batches, with its gradient added to that of the parameters.

    It is a number on the device of the parameters, which nobody waits for. Matrix products are made in ``dtype``, and
    the gradient is that of the loss times the scaler's factor; the loss is returned without it.

    ``loss_of(*micro_batch)`` is the mean over the tokens of one micro-batch, ``shares`` what part of all ``tokens``
    these are. With n_i tokens in micro-batch i, loss = Σ n_i loss_i / Σ n_i: the same as one batch of them all,
    whatever their lengths. With ``overlap`` the last of them exchanges the gradients of all processes.
    """
    result: Any = 0.0
    for k, (micro_batch, share) in enumerate(zip(micro_batches, shares, strict=True), 1):
        scaled = None
        if len(micro_batch[-1]):  # a batch may have fewer rows than there are processes
            with mg.autocast(dtype):
                loss = loss_of(*micro_batch) * share
            scaled, result = scaler.scale(loss), result + loss.data
        if overlap and k == len(micro_batches):
            overlap.backward(scaled, tokens)
        elif scaled is not None:
            scaled.backward()
    return result


def non_finite(what: str, model: Any, forward: Callable[[], Any]) -> NonFiniteError:
    """The error for a loss or a gradient (``what``) that is not finite; it names the first tensor at fault.

    First in the order of the computation: the weights, the modules' outputs when ``forward`` runs once more, and the
    gradients, from the last parameter to the first.
    """
    parameters = list(model.named_parameters())
    culprit = (
        _first((f"weight {name}", parameter.data) for name, parameter in parameters)
        or _first((f"output of {name}", out.data) for name, out in _outputs(model, forward))
        or _first((f"gradient of {name}", p.grad) for name, p in reversed(parameters) if p.grad is not None)
        or "no output of a module"
    )
    hint = "a lower --learning-rate, or --detect-anomaly, which names the operation"
    return NonFiniteError(f"a finite {what}", f"NaN or infinity, first in {culprit}", hint)


def _first(arrays: Iterable[tuple[str, Any]]) -> str:
    for name, array in arrays:
        if not bool(array_module(array).isfinite(array).all()):
            return name
    return ""


def _outputs(model: Any, forward: Callable[[], Any]) -> list[tuple[str, Any]]:
    """The output of each module, by name, in the order in which ``forward`` computes them."""
    outputs: list[tuple[str, Any]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.append((name, output))

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        with mg.no_grad(), np.errstate(all="ignore"):
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return outputs
