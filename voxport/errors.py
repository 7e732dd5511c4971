"""The one error that a user is meant to read, and the exit codes of every script."""

import sys
from collections.abc import Callable

DONE, FAILED, BAD_INPUT = 0, 1, 2


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


def say(message: str, stream=None) -> None:
    """Print one line that survives a console that cannot show every character (cp1252, ASCII)."""
    stream = stream or sys.stderr
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(message.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()


def run_script(script: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call `script(argv)`; turn a `UserError` into one line on stderr and its exit code."""
    try:
        return script(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        say(f"error: {error}")
        return error.code
    except KeyboardInterrupt:
        say("interrupted")
        return 130
