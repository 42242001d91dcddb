"""What keeps reporting from ending, delaying or spoiling a run: each reporter stands behind a Guard.

A reporter is whatever only tells of the run: terminal, metrics, report, curves, model card, trackers, advice. Whatever
one raises, at its start, at a step or at its end, becomes one printed sentence, and the run goes on without it.
"""

import os
import queue
import threading
import time
from collections.abc import Callable

AGAIN = "a restart with the same command tries it again"
MEND = "make room there, or mend what the message names"
END_SECONDS = 60.0  # that a reporter's end may take
ANSWER_SECONDS = 60.0  # that a reporter in a thread of its own may take for its start or for a step
BACKLOG = 10_000  # calls that may wait for such a reporter
LEAVE_SECONDS = 60.0  # from the end of the main thread to that of the process


class Guard:
    """Calls a reporter, which `start` makes, and says once what it gives up.

    After an OSError (a full disk, a lost connection) the reporter is tried again at the next call; after anything else
    it is switched off. Only KeyboardInterrupt passes through.
    """

    def __init__(self, name: str, start: Callable[[], object], remedy: str = AGAIN, release: Callable | None = None):
        self.name, self._start, self._remedy = name, start, remedy
        self._release = release  # called with a reporter that is given up, to take back what it has changed
        self._reporter = None
        self.given_up = self._fails = False

    def start(self) -> "Guard":
        """Make the reporter now, so that what is wrong with it is said early."""
        self(lambda reporter: None)
        return self

    def __call__(self, action: Callable, *args, default=None):
        """action(reporter, *args), or `default` where that fails."""
        if self.given_up:
            return default
        try:
            if self._reporter is None:
                self._reporter = self._start()
            return action(self._reporter, *args)
        except KeyboardInterrupt:
            raise
        except OSError as error:
            if not self._fails:
                self._fails = True
                self._say(f"{self.name} fails ({_brief(error)}) and is tried again at each step: {MEND}")
        except BaseException as error:  # foreign code runs here: it may raise anything, and even call sys.exit
            self.give_up(_brief(error))
        return default

    def within(self, seconds: float, action: Callable, *args) -> None:
        """The same, for at most so many seconds."""
        thread = _start_thread(lambda: self(action, *args), self.name)
        if thread is None:
            self(action, *args)
        elif not _ends(thread, seconds):
            self.give_up(f"it has not ended within {seconds:.0f} s")

    def give_up(self, why: str) -> None:
        """Switch the reporter off."""
        if self.given_up:
            return
        self.given_up = True
        if self._release and self._reporter is not None:
            try:
                self._release(self._reporter)
            except KeyboardInterrupt:
                raise
            except BaseException:  # foreign code again; that it is given up is said below
                pass
        self._say(f"{self.name} is given up ({why}), the run goes on without it: {self._remedy}")

    def _say(self, sentence: str) -> None:
        try:
            print(sentence, flush=True)
        except Exception:  # nobody is there to read it, or it is the live line itself that fails
            pass


class Apart:
    """A guarded reporter in a thread of its own, for one that may wait for a network: no call waits for it."""

    def __init__(self, guard: Guard):
        self._guard = guard
        self._calls: queue.Queue = queue.Queue(BACKLOG)
        self._since: float | None = time.monotonic()  # since when it has been at work, None while it is idle
        self._thread = _start_thread(self._run, guard.name)
        if self._thread is None:
            guard.give_up("it has no thread to work in")

    def __call__(self, action: Callable | None, *args) -> None:
        """Have action(reporter, *args) done, in order; None ends the thread."""
        since = self._since
        if since is not None and time.monotonic() - since > ANSWER_SECONDS:
            self._guard.give_up(f"it has not answered for {ANSWER_SECONDS:.0f} s")
        if self._guard.given_up:
            return
        try:
            self._calls.put_nowait((action, args))
        except queue.Full:
            self._guard.give_up(f"it is {BACKLOG} calls behind")

    def close(self, action: Callable) -> None:
        """Have the last action done, and wait for it, for at most END_SECONDS."""
        self(action)
        if not self._guard.given_up:
            self(None)
            if not _ends(self._thread, END_SECONDS):
                self._guard.give_up(f"it has not ended within {END_SECONDS:.0f} s")

    def _run(self) -> None:
        self._guard.start()
        while True:
            self._since = None
            action, args = self._calls.get()
            if action is None:
                return
            self._since = time.monotonic()
            self._guard(action, *args)


def leave_in_time(code: Callable[[], int]) -> None:
    """End the process LEAVE_SECONDS after its main thread, if what foreign code does at the exit still holds it up."""

    def watch() -> None:
        threading.main_thread().join()
        time.sleep(LEAVE_SECONDS)
        os._exit(code())

    _start_thread(watch, "leave in time")


def _start_thread(run: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that does not keep the process alive; None where the system allows no more of them."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def _ends(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


def _brief(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
