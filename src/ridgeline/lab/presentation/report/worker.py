"""Processes that do a stage's work: each sends its findings as they come, and is ended when the time is over."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

Send = Callable[..., None]


class Worker:
    """A process that calls `work(send, *args)`.

    what: its name in an error. environment: variables that are set in it, or unset if None.
    `found` holds what it has sent, each message the tuple of `send`'s arguments; `ended`: whether it ended by itself.
    """

    def __init__(self, what: str, work: Callable[..., None], *args: Any, **environment: str | None):
        context = get_context("spawn")
        self.what, self.found, self.ended = what, [], False  # type: ignore[var-annotated]
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(theirs, work, args))
        with _changed(environment):
            self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Takes one message that is there. Raises RidgelineError if the process has broken off."""
        from ridgeline.op import RidgelineError

        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            self.ended = True
            if self.process.exitcode:
                raise RidgelineError(
                    f"{self.what} broke off with exit code {self.process.exitcode}; its error is above"
                ) from None
            return
        if message[0] == "error":
            raise RidgelineError(message[1])
        self.found.append(message)

    def end(self) -> None:
        """Ends the process, whatever it does."""
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(2)
            self.process.kill()
        self.process.join()
        self.connection.close()


def collect(
    workers: list[Worker],
    until: float,
    report: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    first: bool = False,
) -> None:
    """Waits until all workers have come to their end or the clock to `until`, then ends those that have not.

    first: a worker's first message is waited for without regard to the clock. report: called after each message.
    """
    try:
        while open_ := {w.connection: w for w in workers if not w.ended}:
            rest = until - clock()
            if rest <= 0 and not (first and any(not w.found for w in open_.values())):
                break
            for connection in wait(list(open_), timeout=min(max(rest, 0.1), 1.0)):
                open_[connection].receive()  # type: ignore[index]
                report()
        for worker in workers:  # what was sent in time and not yet read
            while not worker.ended and worker.connection.poll():
                worker.receive()
    finally:
        for worker in workers:
            worker.end()


def _run(connection: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    from ridgeline.op import RidgelineError

    def send(*message: Any) -> None:
        connection.send(message)

    try:
        work(send, *args)
    except RidgelineError as error:
        send("error", str(error))
    except (BrokenPipeError, KeyboardInterrupt):  # the report itself has ended
        sys.exit(1)


@contextmanager
def _changed(environment: dict[str, str | None]) -> Iterator[None]:
    """Inside, the environment that a new process gets has these variables."""
    before = {name: os.environ.get(name) for name in environment}
    try:
        _set(environment)
        yield
    finally:
        _set(before)


def _set(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
