"""What all optimizers share: parameter groups, state, and one fused pass over every parameter.

A subclass names its moments (``moments``, ``_moments_for``), checks options that it alone has (``_check``), and says
how a tile of a parameter moves (``_update``). ``sgd.py`` is the shortest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from minigrad import captures
from minigrad.backend import Array, accumulator, array_module
from minigrad.errors import ArgumentError, GraphError, NonFiniteError, StateError
from minigrad.messages.explain import describe, explain_methods, explained
from minigrad.tensor import Tensor
from .groups import as_parameters, gradient_of, param_name
from .tiles import as_rows, map_tiles

Group: TypeAlias = dict[str, Any]
Update: TypeAlias = Callable[..., None]  # (weights, gradient, *moments): tiles, the first and the last in place


class OutOfRange(Exception):
    """Squares of a tile's gradients leave the range of the dtype; the update has begun and can go on in a wider one."""


LIMITS: dict[str, tuple[Callable[[float], bool], str, str]] = {
    "lr": (lambda x: 0 <= x < math.inf, "a finite learning rate lr >= 0", "0.001 is a usual first try"),
    "eps": (lambda x: 0 <= x < math.inf, "a finite eps >= 0", "1e-8 is usual"),
    "weight_decay": (lambda x: 0 <= x < math.inf, "a finite weight_decay >= 0", "0 is off, 0.1 is usual"),
    "momentum": (lambda x: 0 <= x < math.inf, "a finite momentum >= 0", "0 is off, 0.9 is usual"),
    "dampening": (math.isfinite, "a finite dampening", "0 is off"),
}


class Optimizer:
    """Updates parameters from their gradients, group by group, each group with options of its own.

    params is an iterable of Tensors, or of dicts ``{"params": tensors, option: value, ...}``; an option that a group
    leaves out is taken from ``defaults``. ``param_groups`` is the list of those dicts, complete, as in PyTorch: change
    ``group["lr"]`` at any time. ``state[i]`` holds the step count and the moments of the i-th parameter, counted
    through all groups. Parameters without a gradient and frozen ones are skipped.

    Moments are kept in the parameter's dtype; those of float16 and bfloat16 in float32, beside a float32 master copy of
    the parameter that collects updates too small for half precision. Where someone else assigned an entry of such a
    parameter, its master copy follows.

    Moments go on in float64 once a square leaves the range of float32 (on a GPU v keeps its root there); on the CPU a
    square that leaves the range of float64 is a NonFiniteError.

    Raises DTypeError for what is no Tensor, GraphError for the result of an operation, ArgumentError for an empty list,
    a parameter listed twice, and an option unknown or out of range.

    >>> import minigrad as mg
    >>> from optim import SGD
    >>> w, b = mg.Tensor([[1.0]], requires_grad=True), mg.Tensor([1.0], requires_grad=True)
    >>> optimizer = SGD([{"params": [w]}, {"params": [b], "lr": 0.01}], lr=0.1)
    >>> (w * 3 + b).sum().backward()
    >>> optimizer.step()
    >>> print(w.data, b.data)
    [[0.7]] [0.99]
    """

    moments: tuple[str, ...] = ()  # names of the arrays that a subclass keeps for each parameter
    element_ns = 3.0  # time of an update on one thread, for the choice between one thread and several

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        explain_methods(cls, ["__init__"])  # a wrong option is told with those that there are

    @explained
    def __init__(self, params: Iterable[Tensor] | Iterable[Group], defaults: Group) -> None:
        self.defaults = defaults
        self.param_groups: list[Group] = []
        self.state: list[dict[str, Any]] = []
        self._skipped: Array | None = None  # on a GPU: how many of the counted steps moved nothing
        self._check(self.defaults)
        given: Any = params
        if isinstance(given, Iterable) and not isinstance(given, Tensor | set):
            given = list(given)
        grouped = isinstance(given, list) and given and isinstance(given[0], dict)
        for group in given if grouped else [{"params": given}]:
            self.add_param_group(group)

    def add_param_group(self, group: Group) -> None:
        """Take in more parameters, ``{"params": tensors, option: value, ...}``: all of them or, on an error, none."""
        form = "such as {'params': [p], 'lr': 0.1}"
        if not isinstance(group, dict) or "params" not in group:
            got = f"the keys {sorted(group)}" if isinstance(group, dict) else repr(group)[:80]
            raise ArgumentError("a parameter group, a dict with 'params'", got, form)
        if unknown := sorted(group.keys() - {"params", *self.defaults}):
            raise ArgumentError(f"options among {sorted(self.defaults)}", str(unknown), form)
        params = as_parameters(group["params"])
        if not params:
            raise ArgumentError("at least one parameter", "an empty list", "a generator can be read only once")
        known = set(self._parameters())
        for place, param in enumerate(params, start=len(self.state)):
            if param in known:
                raise ArgumentError(
                    "each parameter once", f"{param_name(param, place)} twice", "tied weights count once"
                )
            if param.node is not None:
                got = f"{param_name(param, place)}, the result of {param.node.primitive.name!r}"
                raise GraphError("leaf tensors as parameters", got, "pass what it was computed from")
            known.add(param)
        complete = {**self.defaults, **group, "params": params}
        self._check(complete)
        self.param_groups.append(complete)
        self.state += [{} for _ in params]

    def _check(self, options: Group) -> None:
        """Refuse options out of range, and make plain floats of those in it (NumPy's would widen float32 arrays)."""
        for name, (legal, meaning, hint) in LIMITS.items():
            if name in options:
                value = options[name]
                if isinstance(value, bool) or not isinstance(value, Real) or not legal(float(value)):
                    raise ArgumentError(meaning, f"{name}={value!r}", hint)
                options[name] = float(value)

    def _update(self, group: Group, step: int) -> Update:
        """The function that moves a tile, for the ``step``-th update (from 1) of a parameter; subclasses say which."""
        raise NotImplementedError

    def _moments_for(self, group: Group) -> tuple[str, ...]:
        """The moments that a group needs under its present options."""
        return self.moments

    def _parameters(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    # ---- one update -----------------------------------------------------------------------------------------------

    def step(self, where: Any = None) -> None:
        """Move every parameter that has a gradient by one update, in place.

        where: a boolean of shape (); if it is False nothing moves, and no step is counted. Adam and AdamW on a GPU
        leave that choice to the device; elsewhere the host looks, and waits for it.

        Options and gradients are checked before anything changes. A graph that was recorded before and still needs the
        old values is stale from here on, and a backward pass through it says so.
        """
        active = self._active()
        self._replayed(active)
        moved = self._move_on_gpu(active, where)
        if not moved and captures.capturing():
            got = f"a step of {type(self).__name__}, whose numbers every replay would repeat"
            raise captures.Refusal(got, "Adam and AdamW of contiguous weights below float64 have a kernel")
        if not moved and (where is None or bool(where)):
            bodies = [self._body(self._counted(*which), *which) for which in active]
            data = [as_rows(param.data) for _, _, param in active]
            left = map_tiles(lambda i, rows: bodies[i](rows), data, self.element_ns)
            for which, tiles in zip(active, left, strict=True):
                if any(tiles):
                    self._finish(*which, [rows for rows in tiles if rows])
        for _, _, param in active:
            param.bump_version()

    def _replayed(self, active: list[tuple[int, Group, Tensor]]) -> None:
        """In a capture: let each replay check the options, and count, as this step does."""
        if not captures.capturing():
            return
        if any("step" not in self.state[place] for place, *_ in active):
            raise captures.Refusal("the first step of a parameter, which makes its moments", "let a step come before")
        states = [self.state[place] for place, *_ in active]
        steps = [state["step"] for state in states]
        arrays = [{n: x for n, x in state.items() if n != "step"} for state in states]
        weights = [param.data for *_, param in active]

        def again() -> None:
            for group in self.param_groups:
                self._check(group)
            for (place, _, param), data, state, kept in zip(active, weights, states, arrays, strict=True):
                same = param.data is data and self.state[place] is state
                for name, array in kept.items():
                    same &= state[name] is array
                if not same:
                    got = "others in their place, by load_state_dict() or an assignment"
                    raise GraphError("the weights and moments that were captured", got, "make a new mg.cuda.graph")
            for (*_, param), state in zip(active, states, strict=True):
                state["step"] += 1
                param.bump_version()

        def undo() -> None:
            for state, step in zip(states, steps, strict=True):
                state["step"] = step

        captures.again(again)
        captures.undone(undo)

    def _move_on_gpu(self, active: list[tuple[int, Group, Tensor]], where: Any) -> bool:
        """Move all parameters by one kernel, if the subclass has one that takes them."""
        return False

    def _active(self) -> list[tuple[int, Group, Tensor]]:
        """Place, group and Tensor of each parameter to update."""
        for group in self.param_groups:
            self._check(group)
        numbered = enumerate((group, param) for group in self.param_groups for param in group["params"])
        active = [(i, group, param) for i, (group, param) in numbered if param.requires_grad and param.grad is not None]
        for place, _, param in active:
            gradient_of(param, place)
            if not getattr(param.data.flags, "writeable", True):
                hint = "p.data = p.data.copy()"
                raise ArgumentError("parameters that can be written to", f"{param_name(param, place)}, read-only", hint)
        return active

    def _counted(self, place: int, group: Group, param: Tensor) -> dict[str, Any]:
        """The state of a parameter, with what was missing in it, and one step more."""
        xp, state, dtype = array_module(param.data), self.state[place], accumulator(param.data.dtype)
        missing = [name for name in self._moments_for(group) if name not in state]
        if missing and xp is np and param.data.flags.c_contiguous:
            moments = np.zeros((len(missing), *param.shape), dtype)  # in one array: fewer gaps in memory than with two
            state |= {name: moments[i, ...] for i, name in enumerate(missing)}  # an array also of shape ()
        elif missing:
            state |= {name: xp.zeros_like(param.data, dtype=dtype) for name in missing}
        if dtype != param.data.dtype and "master" not in state:
            state["master"] = param.data.astype(dtype)
        state["step"] = state.get("step", 0) + 1
        return state

    def _body(self, state: dict[str, Any], place: int, group: Group, param: Tensor) -> Callable[..., slice | None]:
        """The function that updates a tile, or gives back one that it had to leave: see :class:`OutOfRange`."""
        xp, data = array_module(param.data), param.data
        half = accumulator(data.dtype) != data.dtype
        update = self._update(group, state["step"])
        weights = as_rows(state["master"] if half else data)
        stored, grad, *moments = [as_rows(a) for a in (data, param.grad, *[state[n] for n in self._moments_for(group)])]

        def body(rows: slice, **begun: bool) -> slice | None:
            w = weights[rows]
            if half:  # an entry that isn't its master copy, rounded, was assigned by someone else
                xp.copyto(w, stored[rows], where=w.astype(stored.dtype) != stored[rows])
            try:
                update(w, grad[rows].astype(w.dtype, copy=False), *[moment[rows] for moment in moments], **begun)
            except OutOfRange:
                return rows
            if half:
                stored[rows] = w
            return None

        return body

    def _finish(self, place: int, group: Group, param: Tensor, tiles: list[slice]) -> None:
        """Go on with tiles that were left, with moments in float64; where they are, name the parameter instead."""
        state = self.state[place]
        narrow = {name for name in self._moments_for(group) if state[name].dtype != np.float64}
        state |= {name: state[name].astype(np.float64) for name in narrow}
        body = self._body(state, place, group, param)
        left = [rows for rows in tiles if body(rows, begun=True)]
        if left or not narrow:
            got = f"{param_name(param, place)}, of which some entries didn't move"
            hint = "optim.clip_grad_norm before step(), or an eps that isn't 0"
            raise NonFiniteError("gradients whose squares are numbers of float64", got, hint)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or with ``set_to_none=False`` make them zeros, under which moments still decay."""
        for param in self._parameters():
            if param.grad is not None:
                param.grad = None if set_to_none else array_module(param.grad).zeros_like(param.grad)

    # ---- saving and loading ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that the next step depends on, besides the parameters: arrays, and a part that JSON can hold.

        ``{"state": {"0.step": array(7), "0.exp_avg": array, ...}, "param_groups": [{"params": [0, 1], "lr": 0.1}]}``:
        a name in ``state`` is the place of the parameter, counted through all groups, and what the array is; the step
        count is an int64 array of shape (). So the first part goes into a safetensors file, the second as JSON into
        its metadata, and what comes back from there loads again, bit for bit.
        """
        arrays: dict[str, Array] = {}
        skipped = 0 if self._skipped is None else int(self._skipped)
        for place, state in enumerate(self.state):
            for name, value in state.items():
                arrays[f"{place}.{name}"] = (
                    np.array(value - skipped, np.int64) if name == "step" else self._saved(name, value).copy()
                )
        groups, start = [], 0
        for group in self.param_groups:
            self._check(group)
            stop = start + len(group["params"])
            groups.append({**group, "params": list(range(start, stop))})
            start = stop
        return {"state": arrays, "param_groups": groups}

    def _saved(self, name: str, value: Array) -> Array:
        """The numbers of a moment, where a subclass keeps them in another form."""
        return value

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a ``state_dict``, of which arrays are copied and options replace those of the groups.

        Raises StateError, and changes nothing, where groups, names or shapes are not those of this optimizer.
        """
        if not isinstance(state_dict, Mapping) or state_dict.keys() != {"state", "param_groups"}:
            got = str(sorted(map(str, state_dict))) if isinstance(state_dict, Mapping) else describe(state_dict)
            hint = "optimizer.state_dict() gives one; keep other things beside it"
            raise StateError("a state dict with 'state' and 'param_groups' alone", got, hint)
        groups = self._loaded_groups(state_dict["param_groups"])
        state = self._loaded_state(state_dict["state"], groups)
        self.param_groups, self.state, self._skipped = groups, state, None

    def _loaded_groups(self, saved: list[Group]) -> list[Group]:
        mine, theirs = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if mine != theirs:
            raise StateError(f"groups of {mine} parameters", f"groups of {theirs}", "group them as in the saved run")
        groups = [{**new, "params": old["params"]} for new, old in zip(saved, self.param_groups, strict=True)]
        for group in groups:
            missing = sorted(self.defaults.keys() - group.keys())
            if missing:
                raise StateError(f"options {sorted(self.defaults)}", f"no {missing}", "saved by another optimizer?")
            self._check(group)
        return groups

    def _loaded_state(self, arrays: Mapping[str, Array], groups: list[Group]) -> list[dict[str, Any]]:
        owners = [(param, group) for group in groups for param in group["params"]]
        state: list[dict[str, Any]] = [{} for _ in owners]
        for key, value in arrays.items():
            number, _, name = str(key).partition(".")
            place = int(number) if number.isdecimal() else len(owners)
            if place >= len(owners) or name not in {"step", "master", *self.moments}:
                hint = "saved by another optimizer?"
                raise StateError(f"names such as '0.step', for {len(owners)} parameters", repr(key), hint)
            param = owners[place][0]
            shape = () if name == "step" else param.shape
            if np.shape(value) != shape:
                got, hint = f"shape {np.shape(value)}", "saved for another model?"
                raise StateError(f"shape {shape} for {key!r}, {param_name(param, place)}", got, hint)
            state[place][name] = int(value) if name == "step" else _loaded(value, param)
        for place, (param, group) in enumerate(owners):
            missing = {"step", *self._moments_for(group)} - state[place].keys()
            if state[place] and missing:
                hint = "saved under other options?"
                raise StateError(
                    f"{sorted(missing)} of {param_name(param, place)}", f"only {sorted(state[place])}", hint
                )
        return state

    def __repr__(self) -> str:
        lines = []
        for group in self.param_groups:
            size = sum(param.size for param in group["params"])
            options = ", ".join(f"{name}={value}" for name, value in group.items() if name != "params")
            lines.append(f"  {len(group['params'])} parameters, {size} entries: {options}")
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])


def _loaded(value: Array, param: Tensor) -> Array:
    """A copy of a moment in the dtype that the parameter's have; as it is, if its numbers leave the range of that."""
    xp, dtype = array_module(param.data), accumulator(param.dtype)
    with np.errstate(over="ignore", under="ignore"):
        given = xp.array(value)
        found = given.astype(dtype)
    lost = (~xp.isfinite(found) & xp.isfinite(given) | (found == 0) & (given != 0)).any()
    return given if bool(lost) else found
