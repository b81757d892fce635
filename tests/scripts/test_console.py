"""The output for a terminal and for a log file."""

import io
import logging

import pytest

from protocol.lifecycle import Progress, Ready, Role
from scripts.supervisor.actions import Slot
from scripts.supervisor.console import Console, PhaseClock, render_bar, render_row
from scripts.supervisor.process_state import phase_name

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
    assert render_row("worker", clock, "cpu", 12.6) == (
        "  worker       2.6 s   start 0.2 s, import 1.8 s, weights 0.5 s, kv cache 0.1 s   (cpu)"
    )


def test_process_without_phases_has_only_a_total() -> None:
    """Its only phase would repeat the total."""
    assert render_row("core", PhaseClock(0.0), "", 0.2) == "  core         0.2 s"
    brief = PhaseClock(0.0, [("tokenizer", 0.19)])
    assert render_row("api", brief, "", 0.2) == "  api          0.2 s"


def test_long_row_is_wrapped_under_its_text() -> None:
    """No line is wider than the terminal, and a phase stays with its seconds."""
    clock = PhaseClock(0.0, [("import", 0.2), ("load weights", 2.0), ("allocate cache", 3.0)])
    assert render_row("worker", clock, "cpu", 3.5, columns=60) == (
        "  worker       3.5 s   start 0.2 s, import 1.8 s,\n"
        "                       load weights 1.0 s,\n"
        "                       allocate cache 0.5 s   (cpu)"
    )


def test_phases_read_well() -> None:
    """Underscores become spaces in the name of any phase."""
    assert phase_name("load_weights") == "load weights"


@pytest.mark.parametrize(
    ("done", "total", "bar"),
    [
        (0, 0, ""),
        (0, 1, ""),
        (0, 10, f"  [{'.' * 24}]   0%"),
        (5, 10, f"  [{'#' * 12}{'.' * 12}]  50%"),
        (10, 10, f"  [{'#' * 24}] 100%"),
        (11, 10, f"  [{'#' * 24}] 100%"),
    ],
)
def test_bar_shows_the_share_done(done: int, total: int, bar: str) -> None:
    """It never exceeds 100 %, and is left out for a single step; the time is that of the start."""
    row = render_bar("worker", PhaseClock(1.0), Progress("load_weights", done, total), 2.5)
    assert row == f"  worker       1.5 s   load weights{bar}"


def test_without_terminal_only_whole_lines_are_written() -> None:
    """Log files get no control characters and no bars."""
    stream = io.StringIO()
    console = Console(stream, is_terminal=False)
    play(console)
    assert stream.getvalue() == "  worker       1.0 s   start 0.5 s, weights 0.5 s\nready\n"


def test_bar_is_drawn_below_the_cursor_and_cleared_before_lines() -> None:
    """A log line of another process then does not mix with it."""
    stream = io.StringIO()
    play(Console(stream, is_terminal=True))
    before, after = stream.getvalue().split("  worker       1.0 s ", maxsplit=1)
    assert before.count("\r\x1b[J\n") == 2, "the third bar came too soon"
    assert before.count("\r\x1b[A") == 2, "up again after each"
    assert "weights  [############............]  50%" in before
    assert before.endswith("\r\x1b[A\r\x1b[J"), "cleared"
    assert "\x1b[J" not in after


def test_time_continues_while_nothing_is_reported_and_stops_with_the_start() -> None:
    """Importing takes seconds without a report; a dead or ready worker needs no ticks."""
    for end in (lambda c: c.ready(WORKER, Ready(), 3.0), lambda c: c.ended(WORKER)):
        stream = io.StringIO()
        console = Console(stream, is_terminal=True)
        console.starting(WORKER, 1.0)
        console.progress(WORKER, Progress("import"), 1.2)
        console.tick(2.0)
        console.tick(2.01)
        assert stream.getvalue().count("import") == 2
        assert "1.0 s   import" in stream.getvalue()
        assert console.next_tick() == pytest.approx(2.1)
        end(console)
        assert console.next_tick() is None
        assert stream.getvalue().count("\x1b[J") == 3, "no bar is left below the prompt of a shell"
    console.starting(Slot(Role.CORE), 5.0)
    assert console.next_tick() is None, "only what loads a model has a bar"


def test_a_long_load_without_a_terminal_prints_a_line_every_ten_seconds() -> None:
    """The load may be that of the zygote, which loads the model for the worker."""
    zygote = Slot(Role.ZYGOTE)
    stream = io.StringIO()
    console = Console(stream, is_terminal=False)
    console.starting(zygote, 1.0)
    console.starting(WORKER, 1.0)
    console.progress(zygote, Progress("load_weights", 1, 4), 10.9)
    console.progress(WORKER, Progress("import"), 10.95)
    assert stream.getvalue() == ""
    assert console.next_tick() == pytest.approx(11.0)
    console.tick(11.1)
    console.progress(zygote, Progress("check_model"), 21.0)
    console.tick(21.2)
    assert stream.getvalue() == (
        "  zygote      10.1 s   load weights 25%\n  zygote      20.2 s   check model\n"
    )
    console.ready(zygote, Ready(), 22.0)
    assert console.next_tick() is None
    console.starting(WORKER, 22.0)
    assert console.next_tick() == pytest.approx(32.0)


def test_the_slowest_rank_is_shown() -> None:
    ranks = [Slot(Role.ZYGOTE, rank) for rank in range(3)]
    stream = io.StringIO()
    console = Console(stream, is_terminal=False)
    for rank in ranks:
        console.starting(rank, 0.0)
        console.progress(rank, Progress("load_weights", 3, 4), 1.0)
    console.progress(ranks[1], Progress("load_weights", 2, 4), 2.0)
    console.progress(ranks[0], Progress("check_model"), 2.0)
    console.tick(11.0)
    console.ready(ranks[0], Ready(), 12.0)
    console.ended(ranks[1])
    console.tick(21.0)
    lines = stream.getvalue().splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "zygote 1 11.0 s load weights 50%",
        "zygote 12.0 s start 1.0 s, load weights 1.0 s, check model 10.0 s",
        "zygote 2 21.0 s load weights 75%",
    ]
    console.ready(ranks[2], Ready(), 22.0)
    assert console.next_tick() is None


def test_a_rank_that_omits_a_phase_is_not_shown_as_late() -> None:
    ranks = [Slot(Role.ZYGOTE, rank) for rank in range(2)]
    stream = io.StringIO()
    console = Console(stream, is_terminal=False)
    for rank in ranks:
        console.starting(rank, 0.0)
    for phase in ("compile_kernels", "load_weights"):
        console.progress(ranks[0], Progress(phase, 1, 4), 1.0)
    console.progress(ranks[1], Progress("load_weights", 3, 4), 1.0)
    console.tick(10.5)
    console.progress(ranks[0], Progress("load_weights", 4, 4), 11.0)
    console.tick(21.0)
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert lines == ["zygote 10.5 s load weights 25%", "zygote 1 21.0 s load weights 75%"]


def test_a_long_fact_is_wrapped_under_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is so on a terminal; a log file has it in one line."""
    monkeypatch.setenv("COLUMNS", "41")
    text = "no C++ compiler: attention is slower; install g++"
    for is_terminal, expected in (
        (True, "  no C++ compiler: attention is slower;\n    install g++\n"),
        (False, f"  {text}\n"),
    ):
        stream = io.StringIO()
        Console(stream, is_terminal=is_terminal).fact(text)
        assert stream.getvalue().removeprefix("\r\x1b[K") == expected


def test_lines_are_part_of_a_json_log(caplog: pytest.LogCaptureFixture) -> None:
    """Each row of the start is one message."""
    stream = io.StringIO()
    caplog.set_level(logging.INFO, "troika.supervisor")
    console = Console(stream, is_terminal=True, is_log_only=True)
    play(console)
    console.error("no such model")
    assert stream.getvalue() == ""
    assert caplog.messages == ["worker 1.0 s start 0.5 s, weights 0.5 s", "ready", "no such model"]


def test_note_wipes_the_echo_of_ctrl_c(caplog: pytest.LogCaptureFixture) -> None:
    """This is so on a terminal only; otherwise just the log is written."""
    for is_terminal, expected in ((True, "\r\x1b[K"), (False, "")):
        stream = io.StringIO()
        Console(stream, is_terminal=is_terminal).note(logging.WARNING, "finishing")
        assert stream.getvalue() == expected
    assert caplog.messages == ["finishing"] * 2


def test_quiet_console_prints_nothing_but_errors() -> None:
    """The terminal belongs to the embedding program."""
    stream = io.StringIO()
    console = Console(stream, is_terminal=True, is_quiet=True)
    play(console)
    assert stream.getvalue() == ""
    console.error("no such model")
    assert stream.getvalue() == "troika: no such model\n"


def test_terminal_that_goes_away_is_not_an_error() -> None:
    """The engine outlives the terminal in which it was started."""

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
