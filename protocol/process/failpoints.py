"""Failpoints: named places in the processes where tests inject faults.

Off unless the environment variable `_TROIKA_FAILPOINTS` is set when the engine is started; it then
applies to every process. Its value is one of two things:

- a list such as `worker.mid_step=kill9@3,core.after_drain=delay:20@*`: the action is taken at the
  third hit in every incarnation of a process, or at every hit;
- the absolute path of a directory, to arm failpoints while the engine runs: a file named like the
  failpoint holds `ACTION@HIT`, counts hits from its creation on, and is removed when it fires, so
  that the successor of a killed process lives. Each firing adds a line to `log`, and the first hit
  of each failpoint creates a file `reached.NAME`.

Actions: `kill9` (SIGKILL to this process), `segv` (SIGSEGV), `stop` (SIGSTOP), `exc` (raise
FailpointError), `enospc` (raise OSError), `delay:MS` (block this thread), `pause:MS` (the same, but
with a directory until `release`, and no longer than that), `hold:MS` (block the interpreter, and
with it all threads), `note` (only the line in the log).
"""

import ctypes
import errno
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple, Protocol

VARIABLE = "_TROIKA_FAILPOINTS"
"""Begins with an underscore: not a setting of the engine, and inherited by all its processes."""
LOG_FILE = "log"
REACHED_PREFIX = "reached."
PAUSED_PREFIX = "paused."
EVERY_HIT = 0
POISON_TOKEN_ID = 31_337
"""First token of prompts that hit `worker.poison` in null workers."""

FAILPOINTS = {
    "supervisor.after_death": "A child is dead and reaped, and not replaced yet.",
    "supervisor.after_start": "A child was started; it has not sent Hello.",
    "core.load": "Started and configured; no process can connect yet.",
    "core.after_drain": "Messages were handled; no step was scheduled yet.",
    "core.after_adopt": "Workers were adopted, first ones or successors; no step was sent to them.",
    "core.after_dispatch": "A step was sent to the workers.",
    "core.after_preemption": "A step was sent that takes its blocks from a running request.",
    "core.before_reply": "The results of a step were entered; none was sent to a client.",
    "worker.load": "Started and configured; the model is about to be loaded.",
    "worker.after_load": "The model is loaded; the core does not know it.",
    "worker.after_adopt": "Adopted by a core; no step has come.",
    "worker.before_step": "A step has arrived; nothing of it was done.",
    "worker.mid_step": "The mirror has taken the step over; no token was sampled.",
    "worker.after_step": "The step was computed; its result was not sent.",
    "worker.load_adapter": "A LoRA adapter is about to be read.",
    "worker.poison": "A request whose first token is POISON_TOKEN_ID is new to the null worker.",
    "grammar.compile": "A grammar is about to be compiled beside the worker.",
    "text.job": "A long text has come to a process beside the API; nothing of it was done.",
    "zygote.load": "Started and configured; what workers share is about to be loaded.",
    "api.load": "The tokenizer is loaded; nothing is served yet.",
    "ledger.after_accept": "A request was accepted, in the API or a host, and not sent.",
    "api.after_accept": "All sequences of an HTTP request were accepted; no byte was sent.",
    "api.before_flush": "New tokens have become server-sent events; they were not written.",
    "api.before_abort": "A client has disconnected; its requests run on.",
}
"""All failpoints. The part before the dot names the process."""


class FailpointError(Exception):
    """Raised by the action `exc`."""


class Failpoint(Protocol):
    """Marks a place in the code as a failpoint."""

    def __call__(self, name: str, when: bool = True) -> None: ...


class Order(NamedTuple):
    """The action of a failpoint, and at which hit it is taken."""

    action: str
    delay_s: float
    hit: int
    """Counted from 1; EVERY_HIT: each time."""


_ORDER = re.compile(
    r"(kill9|segv|stop|exc|enospc|note|(?:delay|pause|hold):(\d{1,6}))@([1-9]\d{0,8}|\*)"
)
_PAUSE_POLL_S = 0.001


def parse_order(text: str) -> Order:
    """Parse `ACTION@HIT`, or raise ValueError."""
    match = _ORDER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} must be ACTION@HIT, like kill9@1, delay:50@3 or note@*")
    hit = EVERY_HIT if match[3] == "*" else int(match[3])
    return Order(match[1].partition(":")[0], int(match[2] or 0) / 1000, hit)


def parse_orders(text: str) -> dict[str, Order]:
    """Parse `NAME=ACTION@HIT,...`, or raise ValueError."""
    pairs = [item.strip().partition("=") for item in text.split(",") if item.strip()]
    for name, _, _ in pairs:
        _check_name(name)
    return {name: parse_order(order) for name, _, order in pairs}


def _check_name(name: str) -> None:
    if name not in FAILPOINTS:
        raise ValueError(f"{name!r} is not a failpoint; these are: {', '.join(FAILPOINTS)}")


def arm(directory: Path, name: str, order: str) -> None:
    """Arm a failpoint in the processes that were started with this directory."""
    _check_name(name)
    parse_order(order)
    draft = directory / f".{name}"
    draft.write_text(order)
    draft.replace(directory / name)


def disarm(directory: Path) -> None:
    """Disarm all failpoints that have not fired, and end all pauses."""
    for name in FAILPOINTS:
        (directory / name).unlink(missing_ok=True)
    for file in directory.glob(f"{PAUSED_PREFIX}*"):
        file.unlink(missing_ok=True)


def release(directory: Path, name: str, pid: int) -> bool:
    """Let a paused process continue; returns False if its pause had ended by itself.

    A process that has died while it was paused has not ended its pause.
    """
    try:
        _pause_file(directory, name, pid).unlink()
    except FileNotFoundError:
        return False
    return True


def _pause_file(directory: Path, name: str, pid: int) -> Path:
    """Return the file that exists as long as the process is paused."""
    return directory / f"{PAUSED_PREFIX}{name}.{pid}"


class Failpoints:
    """Orders that are fixed when the engine is started."""

    def __init__(self, orders: dict[str, Order]) -> None:
        self._orders = orders
        self._hits = dict.fromkeys(orders, 0)

    def hit(self, name: str, when: bool = True) -> None:
        """Count a hit, and act if it is the one."""
        order = self._orders.get(name)
        if order is None or not when:
            return
        self._hits[name] += 1
        if order.hit in (EVERY_HIT, self._hits[name]):
            act(order)


class ArmedFile(NamedTuple):
    """One order of a directory, and its hits so far."""

    identity: tuple[int, int]
    order: Order
    num_hits: int


class FailpointDirectory:
    """Orders that come and go as files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._reached: set[str] = set()
        self._armed: dict[str, ArmedFile] = {}

    def hit(self, name: str, when: bool = True) -> None:
        """Count a hit since the file was created, and act if it is the one."""
        if not when:
            return
        if name not in self._reached:
            self._reached.add(name)
            (self._directory / f"{REACHED_PREFIX}{name}").touch()
        armed = self._read(name)
        if armed is None:
            return
        armed = self._armed[name] = armed._replace(num_hits=armed.num_hits + 1)
        if armed.order.hit not in (EVERY_HIT, armed.num_hits):
            return
        if armed.order.hit != EVERY_HIT:
            try:
                os.unlink(self._directory / name)
            except FileNotFoundError:  # another process has fired it
                return
        if armed.order.action == "pause":
            self._pause(name, armed.order)
            return
        self._log(name, armed.order)
        act(armed.order)

    def _pause(self, name: str, order: Order) -> None:
        """Block until `release` or the end of the pause, whichever comes first."""
        file = _pause_file(self._directory, name, os.getpid())
        file.touch()  # before the line in the log, after which the process may be released
        self._log(name, order)
        deadline = time.monotonic() + order.delay_s
        while file.exists():
            if time.monotonic() >= deadline:
                file.unlink(missing_ok=True)
            time.sleep(_PAUSE_POLL_S)

    def _read(self, name: str) -> ArmedFile | None:
        file = self._directory / name
        try:
            info = os.stat(file)
            identity = (info.st_ino, info.st_mtime_ns)
            known = self._armed.get(name)
            if known is not None and known.identity == identity:
                return known
            return ArmedFile(identity, parse_order(file.read_text()), 0)
        except FileNotFoundError:
            return None

    def _log(self, name: str, order: Order) -> None:
        """Append with one write, so that lines of several processes do not mix."""
        line = f"{time.monotonic():.6f} {name} {os.getpid()} {order.action}\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        descriptor = os.open(self._directory / LOG_FILE, flags, 0o600)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def act(order: Order) -> None:
    """Take the action of an order; `exc` raises FailpointError and `enospc` OSError."""
    match order.action:
        case "kill9":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exc":
            raise FailpointError("exception injected by a failpoint")
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "delay" | "pause":
            time.sleep(order.delay_s)
        case "hold":
            # In C, without releasing the interpreter. A signal ends usleep early.
            deadline = time.monotonic() + order.delay_s
            library = ctypes.PyDLL(None)
            while (left_s := deadline - time.monotonic()) > 0:
                library.usleep(int(left_s * 1e6))


def configured(value: str | None) -> Failpoint:
    """Return the function `failpoint` for the environment variable's value."""
    if not value:
        return _pass
    if value.startswith("/"):
        return FailpointDirectory(Path(value)).hit
    return Failpoints(parse_orders(value)).hit


def _pass(name: str, when: bool = True) -> None:
    """Failpoints are off."""


failpoint = configured(os.environ.get(VARIABLE))
"""Called with its name at each failpoint; it counts only if `when` is true. Bound once in the life
of a process, so that a failpoint costs an empty call when they are off."""
