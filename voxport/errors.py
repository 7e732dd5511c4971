"""The one error that a user is meant to read, the exit codes of every script, and how a script ends when it is told to stop."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

DONE, FAILED, BAD_INPUT = 0, 1, 2
BY_SIGNAL = 128  # added to the number of the signal that ended a script, as shells do: 130 for Ctrl-C, 143 for SIGTERM
BY_SIGNALS = "128 and the signal's number if a signal ended it (130 Ctrl-C, 143 SIGTERM, 129 SIGHUP)"
EXIT_CODES = f"exit codes: 0 done, 1 failed, 2 wrong input, {BY_SIGNALS}"  # what --help ends with
LONGEST_LINE = 2000  # characters of a message
PATIENCE = 1.0  # seconds for which further signals are ignored, so that an impatient user does not cut the cleaning short
STOPS = {name: getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)}


class UserError(Exception):
    """What went wrong, where, and what to do: one line, no traceback.

    `code` is the exit status of the script: 2 when the input is wrong (the default), 1 when work failed.
    """

    def __init__(self, message: str, code: int = BAD_INPUT):
        super().__init__(" ".join(message.splitlines()))  # names and other libraries' messages may hold line breaks
        self.code = code


class WorkError(UserError):
    """The input was fine and the work failed: a kernel, a disk, a broken part. Exit status 1."""

    def __init__(self, message: str):
        super().__init__(message, FAILED)


class Stopped(KeyboardInterrupt):
    """A signal asked this script to end. It is a KeyboardInterrupt, so that whatever cleans up after Ctrl-C does so now."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def say(message: str, stream=None) -> None:
    """Print one line that survives a console that cannot show every character (cp1252, ASCII), or that has gone.

    Nobody reading any more is no reason to stop work. WorkError if stdout goes to a disk that is full.
    """
    stream = stream or sys.stderr
    if stream is None:  # started without any
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        stream.write(message.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()
    except OSError as error:
        silence(stream)
        if stream is sys.stdout and not isinstance(error, BrokenPipeError):
            raise WorkError(f"cannot write to stdout: {error.strerror}; send it to another place") from error


def silence(stream) -> None:
    """Let what is still in the buffer of a stream that cannot be written go nowhere, or Python complains of it when it ends."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def run_script(script: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call `script(argv)`; turn whatever a user can meet into one line on stderr and an exit code.

    A `UserError` has its own code; a signal that asks the script to end gives 128 and its number.
    """
    heard: list[int] = []
    try:
        with stoppable(heard):
            return script(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt as stop:
        return _say_stopped(getattr(stop, "number", signal.SIGINT))
    except Exception as error:
        if heard:  # some libraries make an error of their own of an exception that comes in the middle of their import
            return _say_stopped(heard[-1])
        return _say_failed(error)
    finally:
        _flush()


def _say_stopped(number: int) -> int:
    say("interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}")
    return BY_SIGNAL + number


def _say_failed(error: Exception) -> int:
    """One line for what a user can meet; anything else is a fault of this program and is raised."""
    if isinstance(error, UserError):
        say(f"error: {one_line(error)}")
        return error.code
    if isinstance(error, MemoryError):
        say(f"error: memory ran out ({error or 'no more is to be had'}); close other programs, ask for less at once, or raise the limit")
        return FAILED
    if isinstance(error, OSError):
        say(f"error: {describe(error)}")
        return FAILED
    raise error


def start_quietly() -> None:
    """Let Ctrl-C end this process without a word while its modules are being loaded: there is nothing to clean up yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def stoppable(heard: list[int] | None = None) -> Iterator[None]:
    """Inside, a signal that asks to end raises `Stopped`; another one does so again if the first was swallowed. `heard` gets the
    number of each."""
    if threading.current_thread() is not threading.main_thread():  # signals are none of its business
        yield
        return
    last = -PATIENCE

    def stop(number, frame):
        nonlocal last
        if time.monotonic() - last >= PATIENCE:
            last = time.monotonic()
            if heard is not None:
                heard.append(number)
            raise Stopped(number)

    ignored = {number for number in STOPS.values() if signal.getsignal(number) is signal.SIG_IGN}  # as nohup wants it
    before = {number: signal.signal(number, stop) for number in STOPS.values() if number not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(error: BaseException) -> str:
    """The message without line breaks; some tools put whole tensors into theirs, which nobody reads to the end."""
    message = " ".join(str(error).splitlines())
    return message if len(message) <= LONGEST_LINE else f"{message[:LONGEST_LINE]} ..."


def describe(error: OSError) -> str:
    """An error of the system in words: which file, what was wrong."""
    reason = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {reason}" if error.filename else reason


def _flush() -> None:
    """Write out what is left for stdout and stderr; a pipe that was closed is no error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            silence(stream)
        except ValueError:  # closed
            pass
