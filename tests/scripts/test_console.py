"""What a person at the terminal reads."""

import io

import pytest

from protocol.lifecycle import Progress, Ready, Role
from scripts.console import Console, PhaseClock, render_bar, render_phases
from scripts.supervised import Slot

WORKER = Slot(Role.WORKER)


def test_phases_add_up_to_the_whole() -> None:
    """Each phase lasts until the next one begins; repeated reports of one do not split it."""
    clock = PhaseClock(10.0)
    for phase, now in [("import", 10.2), ("weights", 12.0), ("weights", 12.3), ("kv cache", 12.5)]:
        clock.enter(phase, now)
    seconds = clock.seconds(12.6)
    assert [name for name, _ in seconds] == ["start", "import", "weights", "kv cache"]
    assert [round(duration, 3) for _, duration in seconds] == [0.2, 1.8, 0.5, 0.1]
    assert sum(duration for _, duration in seconds) == pytest.approx(2.6)
    assert render_phases("worker", clock, "cpu", 12.6) == (
        "  worker       2.6 s   start 0.2 s, import 1.8 s, weights 0.5 s, kv cache 0.1 s   (cpu)"
    )


def test_process_without_phases_has_only_a_total() -> None:
    """Its one phase would say the same again."""
    assert render_phases("core", PhaseClock(0.0), "", 0.2) == "  core         0.2 s"
    brief = PhaseClock(0.0, [("tokenizer", 0.19)])
    assert render_phases("api", brief, "", 0.2) == "  api          0.2 s"


@pytest.mark.parametrize(
    ("done", "total", "bar"),
    [
        (0, 10, f"[{'.' * 24}]   0%  1.5 s"),
        (5, 10, f"[{'#' * 12}{'.' * 12}]  50%  1.5 s"),
        (10, 10, f"[{'#' * 24}] 100%  1.5 s"),
        (11, 10, f"[{'#' * 24}] 100%  1.5 s"),
    ],
)
def test_bar_shows_the_share_done(done: int, total: int, bar: str) -> None:
    """Never more than the whole."""
    assert render_bar("worker", "weights", done, total, 1.5) == f"  worker    weights  {bar}"


def test_without_terminal_only_whole_lines_are_written() -> None:
    """Log files get no control characters and no bars."""
    stream = io.StringIO()
    console = Console(stream, is_terminal=False)
    play(console)
    assert stream.getvalue() == "  worker       1.0 s   start 0.5 s, weights 0.5 s\nready\n"


def test_bar_leaves_the_cursor_in_front_and_is_cleared_before_lines() -> None:
    """So that log lines of other processes cover it."""
    stream = io.StringIO()
    play(Console(stream, is_terminal=True))
    before, after = stream.getvalue().split("1.0 s ", maxsplit=1)
    assert before.count("\r\x1b[K") == 3, "two bars and one clearing; the third bar came too soon"
    assert "weights  [############............]  50%" in before
    assert "\x1b" not in after


def test_quiet_console_prints_nothing_but_errors() -> None:
    """An embedding program decides what its terminal shows."""
    stream = io.StringIO()
    console = Console(stream, is_terminal=True, is_quiet=True)
    play(console)
    assert stream.getvalue() == ""
    console.error("no such model")
    assert stream.getvalue() == "troika: no such model\n"


def test_terminal_that_goes_away_is_no_error() -> None:
    """The engine outlives the window in which it was started."""

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

    play(Console(Gone(), is_terminal=True))


def play(console: Console) -> None:
    console.starting(WORKER, 1.0)
    console.progress(WORKER, Progress("weights", 0, 2), 1.5)
    console.progress(WORKER, Progress("weights", 1, 2), 1.7)
    console.progress(WORKER, Progress("weights", 1, 2), 1.71)
    console.ready(WORKER, Ready(), 2.0)
    console.line("ready")
