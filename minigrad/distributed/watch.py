"""Nobody is waited for without end: whoever waits gives signs of life, and a rank without one ends the run by name.

A rank that waits for more than a moment tells all others, again and again, in which exchange it is. One that works long
between two exchanges, and says so (:meth:`Watch.long_work`), does the same from a thread. So whoever waits can tell a
rank that is late from one that is silent, and ranks that wait for each other in different exchanges from both. Signs
are counted by the clock of whoever receives them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minigrad.distributed.communicator import Communicator

EXCHANGES = ("broadcast", "all_gather", "all_to_all", "all_reduce", "barrier")  # as signs of life name them
WORKING = -1  # in place of the number of an exchange
SPIN, NAP = 0.002, 0.0005  # seconds: so long a wait takes the core whenever nobody else does; then it sleeps so long


def _yield() -> None:
    os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)


class Watch:
    """What a rank knows of the others' lives; ``comm`` is an MPI communicator for signs alone."""

    def __init__(self, comm: Any, timeout: float, threads: bool, ranks: Communicator) -> None:
        self._comm, self.timeout, self._threads, self._ranks = comm, timeout, threads, ranks
        self.waited = 0.0  # seconds in exchanges, all together
        self.number = 0  # of exchanges so far
        self._every = min(5.0, timeout / 10)
        self._sending: list[tuple[Any, Any]] = []
        self._heard: dict[int, tuple[float, int, int]] = {}  # by rank: when, and what it said
        self._at_work = 0.0  # when anybody last said that it works
        self._waiting = False
        self._works = 0  # blocks of long work that are open
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wait(self, done: Callable[[], bool], kind: str) -> None:
        """Return once ``done()``; ends every rank where one is silent for longer than the timeout."""
        self.number += 1
        self._waiting = True
        began = now = time.monotonic()
        next_sign = began + self._every
        while not done():
            now = time.monotonic()
            if now - began < SPIN:
                _yield()
            else:
                time.sleep(NAP)
            if now > next_sign:
                next_sign = now + self._every
                self._send(self.number, EXCHANGES.index(kind))
                self._receive(now)
                if complaint := self._complaint(now, began, kind):
                    self.end(complaint)
        self._waiting = False
        self.waited += now - began

    @contextmanager
    def long_work(self) -> Iterator[None]:
        """Give signs of life from a thread meanwhile, which begins with the first of these blocks and stays."""
        if self._thread is None and self._threads:  # else this MPI takes calls of one thread alone
            self._thread = threading.Thread(target=self._give_signs, daemon=True)
            self._thread.start()
        self._works += 1
        try:
            yield
        finally:
            self._works -= 1

    def _give_signs(self) -> None:
        while True:
            time.sleep(self._every)
            if self._works and not self._waiting:  # a wait says where it is
                self._send(WORKING, 0)

    def _send(self, number: int, kind: int) -> None:
        with self._lock:
            self._sending = [(request, sign) for request, sign in self._sending if not request.Test()]
            sign = np.array([self._ranks.rank, number, kind], np.int64)
            self._sending += [(self._comm.Isend(sign, other), sign) for other in self._others()]

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]

    def _receive(self, now: float) -> None:
        while self._comm.Iprobe():
            sign = np.empty(3, np.int64)
            self._comm.Recv(sign)
            rank, number, kind = map(int, sign)
            self._heard[rank] = now, number, kind
            self._at_work = now if number == WORKING else self._at_work

    def _complaint(self, now: float, began: float, kind: str) -> str:
        """Why it makes no sense to wait on, in words; empty where it does."""
        here, names = f"exchange {self.number}, {kind}", self._ranks.names
        last = {rank: max(began, self._heard.get(rank, (0.0,))[0]) for rank in self._others()}
        if silent := [names[rank] for rank, heard in last.items() if now - heard > self.timeout]:
            return f"no sign of life of {', '.join(silent)} for {self.timeout:g} s, in {here}"
        if now - max(began, self._at_work) > self.timeout:
            said = [f"{names[r]} in exchange {n}, {EXCHANGES[k]}" for r, (_, n, k) in sorted(self._heard.items())]
            return f"all ranks wait for each other for {self.timeout:g} s: this one in {here}; {'; '.join(said)}"
        return ""

    def end(self, complaint: str) -> None:
        """End every rank with a line."""
        print(f"{self._ranks.names[self._ranks.rank]}: {complaint}; all ranks end", file=sys.stderr, flush=True)
        self._ranks.abort(1)
