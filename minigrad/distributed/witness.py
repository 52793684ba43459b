"""A small program beside the ranks of one machine, which says who of them was killed: MPI ends the others at once.

The launcher's own message may name another rank, one that it has ended itself. Whoever leaves says so before; whoever
ends without a word was killed, or crashed. It needs Linux; elsewhere nobody is watched. It imports no package.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

ALL = b"all"  # said by a rank that is about to end all others


def call(names: Mapping[int, str]) -> str:
    """Start the program for these processes, and give the address at which it hears who leaves; "" where it can't."""
    if not hasattr(os, "pidfd_open"):
        return ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(f"\0minigrad-{os.getpid()}")
        ear.setblocking(False)
        told = [f"{process}:{name}" for process, name in names.items()]
        command = [sys.executable, "-S", "-E", __file__, str(ear.fileno()), *told]
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        program = subprocess.Popen(command, pass_fds=[ear.fileno()], start_new_session=True, **pipes)
        assert program.stdout
        with program.stdout as out:
            out.read()  # until it watches
        return str(ear.getsockname().decode())


def tell(address: str, word: bytes) -> None:
    """Say which process leaves, or ALL."""
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mouth:
            if mouth.connect_ex(address.encode()) == 0:  # else it has gone
                mouth.send(word)


def watch(ear: socket.socket, names: Mapping[int, str]) -> str:
    """Wait until all processes have left, or one has gone without a word; its name then."""
    poll, open_files, left = select.poll(), {os.pidfd_open(process): process for process in names}, set()
    for file in (ear.fileno(), *open_files):
        poll.register(file, select.POLLIN)
    os.close(sys.stdout.fileno())  # whoever called may go on
    while open_files:
        ended = [file for file, _ in poll.poll() if file in open_files]
        with suppress(BlockingIOError):  # it has heard all that was said before they ended
            while (word := ear.recv(100)) != ALL:
                left.add(int(word))
            return ""
        if gone := [names[open_files[file]] for file in ended if open_files[file] not in left]:
            return " or ".join(gone)
        for file in ended:
            poll.unregister(file)
            del open_files[file]
    return ""


def main(file: str, *told: str) -> None:
    """Say who was killed."""
    names = {int(process): name for process, _, name in (one.partition(":") for one in told)}
    if who := watch(socket.socket(fileno=int(file)), names):
        print(f"{who}: ended without a word, killed or crashed; all ranks end", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
