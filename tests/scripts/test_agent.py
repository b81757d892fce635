"""The command of a host agent: wrong arguments, and addresses."""

from pathlib import Path

import pytest

from protocol.transport.curve import make_keys
from scripts import agent


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--curve-keys", "keys"], "--join"),
        (["--join", "10.0.0.1:7100"], "--curve-keys"),
        (["--join", "10.0.0.1", "--curve-keys", "keys"], "--join 10.0.0.1 is not HOST:PORT"),
        (
            ["--join", "a:1", "--curve-keys", "keys", "--listen", "a:b"],
            "--listen a:b is not HOST or HOST:PORT",
        ),
        (["--join", "a:1", "--curve-keys", "keys", "--name", "a b"], "--name must be 1 to 128"),
        (
            ["--join", "a:1", "--curve-keys", "keys", "--leave-after-s", "0"],
            "--leave-after-s 0 must be greater than 0",
        ),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        agent.main(arguments, "agent")
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_address_for_all_is_reported_as_the_one_towards_the_other_machine() -> None:
    assert agent._addresses("0.0.0.0:7000", "127.0.0.1:1") == ("0.0.0.0:7000", "127.0.0.1:7000")
    assert agent._addresses("10.0.0.2:7000", "127.0.0.1:1") == ("10.0.0.2:7000", "10.0.0.2:7000")
    listen, seen_at = agent._addresses(None, "127.0.0.1:1")
    assert listen == seen_at
    assert listen.startswith("127.0.0.1:")


def test_an_agent_without_an_answer_gives_up_after_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path, ["api"])
    flags = ["--join", "127.0.0.1:9", "--curve-keys", str(tmp_path), "--leave-after-s", "0.2"]
    assert agent.main(flags, "agent") == 1
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err
