"""Run a talkative tool in silence, and show the end of what it said if it fails."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator

from voxport.errors import UserError, WorkError


class Watched(io.StringIO):
    """A log that shows every piece of text to `watch` as it comes."""

    def __init__(self, watch: Callable[[str], None]):
        super().__init__()
        self.watch = watch

    def write(self, text: str) -> int:
        self.watch(text)
        return super().write(text)


@contextlib.contextmanager
def quiet(tool: str, watch: Callable[[str], None] = lambda text: None) -> Iterator[io.StringIO]:
    """Keep `tool`'s output off the screen; any failure becomes a WorkError with its cause and its last lines."""
    log = Watched(watch)
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield log
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        tail = " | ".join(log.getvalue().splitlines()[-3:])
        raise WorkError(f"{tool} failed: {type(error).__name__}: {error}; its output ends: {tail!r}") from error
    finally:
        logging.disable(logging.NOTSET)
