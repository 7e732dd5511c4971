"""Run a step of a build in a process of its own: its memory comes back whole, and its death is an error like any other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from voxport.errors import UserError, WorkError

PATIENCE = 2.0  # seconds that a child is given to end after it has answered or was asked to stop


def run_in_child(label: str, function: Callable, *arguments: Any) -> Any:
    """`function(*arguments)` in a fresh interpreter; all of them, and what it returns, must be picklable.

    A UserError of the child is raised here. A child that dies becomes a WorkError naming `label` and the likely cause.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_serve, args=(theirs, label, function, arguments))
    with _main_forgotten():
        child.start()
    theirs.close()
    try:
        error, value = ours.recv()
    except EOFError:  # it died: only then does the pipe close without an answer
        child.join()
        raise WorkError(f"{label}: {explain_exit(child.exitcode)}") from None
    finally:
        _end(child)
    if error is not None:
        raise error
    return value


@contextlib.contextmanager
def _main_forgotten() -> Iterator[None]:
    """A child imports the script of its parent again, and all that this imports, unless it has no file. It needs none of it."""
    main = sys.modules["__main__"]
    file, spec = vars(main).pop("__file__", None), vars(main).get("__spec__")
    main.__spec__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


def _end(child: multiprocessing.process.BaseProcess) -> None:
    """Let the child end; one that does not, because this process was interrupted, must stop writing."""
    child.join(PATIENCE)
    if child.is_alive():
        child.kill()
        child.join()


def explain_exit(code: int) -> str:
    """Why a child ended without an answer."""
    if code == -getattr(signal, "SIGKILL", 9):
        return ("its process was killed, most likely because memory ran out; close other programs, or see what it needs with"
                " --plan")  # fmt: skip
    return f"its process ended with {signal.Signals(-code).name if code < 0 else f'status {code}'}"


def _serve(pipe: connection.Connection, label: str, function: Callable, arguments: tuple) -> None:
    """The child's side: answer with what the function returned or raised."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent ends this process
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        answer = (None, function(*arguments))
    except UserError as error:
        answer = (error, None)
    except Exception as error:
        answer = (WorkError(f"{label}: {type(error).__name__}: {error}"), None)
    pipe.send(answer)


def _die_with_parent() -> None:
    """End at once when the parent has gone: a killed build must not go on writing into a folder that the next one uses."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
