"""Engines with another model than the client's get no requests, old or new."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from protocol.adapters import Adapter
from protocol.api_core import EngineState, PauseMode, RequestOutput
from protocol.client import ReplicatedClient, ReplicatedOptions, expected_model
from protocol.client.errors import EngineFailed, Overloaded, RequestFailed
from protocol.client.expected_model import ExpectedModel
from protocol.client.request_stream import RequestStream
from protocol.process.model_files import ModelFiles, read_model_files
from tests.protocol.fake_core import FACTS, FakeCore
from tests.protocol.replicas import (
    PARAMS,
    Cores,
    begun,
    output,
    play,
    pump,
    ticks,
    until,
    with_facts,
)

REMOTE = "tcp://10.0.0.2:7000"
OWN = ModelFiles("t1", "w1")


def renew(core: FakeCore, **facts: str) -> None:
    """Start a successor of the core with other facts."""
    with_facts(core, **facts)
    core.epoch += 1
    core.send(core.status)


def with_two_models(cores: Cores) -> None:
    for core, weights in zip(cores, ("w1", "w2"), strict=True):
        with_facts(core, weights=weights)


def run(
    cores: Cores,
    act: Callable[[ReplicatedClient], Awaitable[None]],
    *serving: FakeCore,
    stall_timeout_s: float = 120.0,
    allow_inexact_resume: bool = False,
    failover_s: float = 0.1,
) -> None:
    """Run a test with a client of all cores, of which these may answer first."""

    async def main() -> None:
        addresses = [core.address for core in cores]
        options = ReplicatedOptions(
            failover_s=failover_s,
            stall_timeout_s=stall_timeout_s,
            allow_inexact_resume=allow_inexact_resume,
        )
        async with ReplicatedClient(addresses, options, may_change=True) as client:
            first = asyncio.create_task(pump(list(serving)))
            indices = [cores.index(core) for core in serving]
            await until(lambda: all(client.clients[index].serves for index in indices))
            first.cancel()
            task = asyncio.create_task(pump(cores))
            await until(lambda: all(each.facts for each in client.clients))
            await act(client)
            task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("field", ["tokenizer", "weights"])
def test_an_engine_with_another_model_gets_no_request_and_is_named(
    field: str, cores: Cores, caplog: pytest.LogCaptureFixture
) -> None:
    own = with_facts(cores[0], **{field: "right"})
    other = with_facts(cores[1], **{field: "wrong"}, model="/elsewhere")
    caplog.set_level(logging.INFO)

    async def act(client: ReplicatedClient) -> None:
        wrong = client.clients[1]
        assert not wrong.serves
        for _ in range(20):
            client.submit([5], PARAMS)
        client.adopt(begun(own, 7), RequestStream(0, client.cancel))
        client.adopt(begun(other, 7), RequestStream(0, client.cancel))
        client.adopt(begun("", 7), RequestStream(0, client.cancel))
        client.adopt(begun(""), RequestStream(0, client.cancel))
        await until(lambda: cores[0].num_added >= 23)
        await ticks(client)
        assert not cores[1].adds
        assert "wrong" not in str(client.facts)
        difference = f"model '/elsewhere' has {field} wrong instead of right"
        assert wrong.engine.other_model == difference
        lines = [one for one in caplog.messages if "gets no requests" in one]
        assert lines == [f"replica 1, {cores[1].address}, gets no requests: its {difference}"]
        assert not [one for one in caplog.messages if "computes differently" in one]

    run(cores, act, cores[0])


def test_open_requests_of_an_engine_that_returns_with_another_model_continue_elsewhere(
    cores: Cores,
) -> None:
    for core in cores:
        with_facts(core, weights="w1")

    async def act(client: ReplicatedClient) -> None:
        await until(lambda: all(each.serves for each in client.clients))
        for number in range(1, 50):
            stream = client.submit([5], PARAMS)
            await until(lambda number=number: sum(core.num_added for core in cores) == number)
            if cores[1].adds:
                break
        output(cores[1], 7)
        await until(lambda: stream.num_unread == 1)
        cores[1].adds.clear()
        renew(cores[1], weights="w2")
        await until(lambda: [7] in [add.output_token_ids for add in cores[0].adds])
        assert not cores[1].adds

    run(cores, act, cores[0])


def test_where_only_engines_with_another_model_are_left_requests_are_refused_and_old_ones_wait(
    cores: Cores,
) -> None:
    with_two_models(cores)

    async def act(client: ReplicatedClient) -> None:
        stream = client.submit([5], PARAMS)
        await until(lambda: cores[0].num_added == 1)
        lost = cores.pop(0)
        lost.link.close()
        await until(lambda: not client.clients[0].connected)
        await ticks(client)
        client.adopt(begun(""), RequestStream(0, client.cancel))
        client.submit([5], PARAMS)  # it waits for the engine that is lost
        client.set_addresses([cores[0].address])  # which is no longer listed
        await ticks(client)
        with pytest.raises(RequestFailed) as caught:
            client.submit([5], PARAMS)
        assert isinstance(caught.value, EngineFailed | Overloaded)
        with pytest.raises(EngineFailed):
            await anext(stream)
        await until(lambda: client.facts is None)
        assert client.status is None
        assert not cores[0].adds

    run(cores, act, cores[0], stall_timeout_s=1.0)


def test_requests_leave_an_engine_that_turns_out_to_have_another_model(cores: Cores) -> None:
    with_two_models(cores)
    for core in cores:
        core.status = msgspec.structs.replace(core.status, state=EngineState.RECOVERING)

    async def act(client: ReplicatedClient) -> None:
        streams = [client.submit([5], PARAMS) for _ in range(20)]
        await until(lambda: sum(core.num_added for core in cores) == 20)
        lost = [add.request_id for add in cores[0].adds]
        assert lost
        with_facts(cores[1], weights="w2")
        cores[1].send(cores[1].status)
        await until(lambda: client.clients[1].serves)
        with_facts(cores[0], weights="w1")
        cores[0].send(cores[0].status)
        await until(lambda: sorted(cores[0].aborted)[: len(lost)] == sorted(lost))
        cores[0].emit(RequestOutput(lost[0], 0, [7]))
        await until(lambda: cores[1].num_added == 20)
        await ticks(client)
        assert not any(stream.num_unread for stream in streams)

    run(cores, act, failover_s=60.0)


@pytest.mark.usefixtures("fast_ticks")
def test_an_engine_with_another_model_serves_once_all_others_are_lost_for_good(
    cores: Cores,
) -> None:
    with_two_models(cores)

    async def act(client: ReplicatedClient) -> None:
        stream = client.submit([5], PARAMS)
        await until(lambda: cores[0].num_added == 1)
        cores.pop(0).link.close()
        with pytest.raises(EngineFailed):
            await anext(stream)
        await until(lambda: client.clients[1].serves)
        client.submit([5], PARAMS)
        await until(lambda: cores[0].num_added == 1)

    run(cores, act, cores[0], stall_timeout_s=0.5)


def test_no_request_continues_inexactly_at_an_engine_with_another_model(cores: Cores) -> None:
    with_two_models(cores)

    async def act(client: ReplicatedClient) -> None:
        stream = client.submit([5], PARAMS)
        await until(lambda: cores[0].num_added == 1)
        output(cores[0], 7)
        await until(lambda: stream.num_unread == 1)
        cores.pop(0).link.close()
        await until(lambda: not client.clients[0].connected)
        await ticks(client)
        assert not cores[0].adds

    run(cores, act, cores[0], allow_inexact_resume=True)


def test_once_all_engines_have_another_model_it_is_the_model(cores: Cores) -> None:
    """The engines get other weights one after the other."""
    for core in cores:
        with_facts(core, weights="w1")

    async def act(client: ReplicatedClient) -> None:
        renew(cores[0], weights="w2")
        await until(lambda: bool(client.clients[0].engine.other_model))
        renew(cores[1], weights="w2")
        await until(lambda: all(each.serves for each in client.clients))
        client.submit([5], PARAMS)
        await until(lambda: any(core.adds for core in cores))

    run(cores, act, *cores)


def test_a_pause_and_its_end_reach_engines_that_have_another_model_for_a_while(
    cores: Cores,
) -> None:
    """They serve once all have that model, and would hold or compute requests by mistake."""
    for core in cores:
        with_facts(core, weights="w1")

    async def control(work: Awaitable[bool], mode: PauseMode) -> None:
        for core in cores:
            core.controls.clear()
        task = asyncio.ensure_future(work)
        await until(lambda: all(core.controls for core in cores))
        for core in cores:
            core.done(mode)
        assert await task

    async def act(client: ReplicatedClient) -> None:
        renew(cores[0], weights="w2")
        await until(lambda: bool(client.clients[0].engine.other_model))
        await control(client.pause(), PauseMode.PAUSED_ALL)
        await control(client.resume(), PauseMode.RUNNING)

    run(cores, act, *cores)


def test_an_adapter_is_not_loaded_by_an_engine_with_another_model(cores: Cores) -> None:
    with_two_models(cores)

    async def act(client: ReplicatedClient) -> None:
        loading = asyncio.create_task(client.load_adapter(Adapter("a", "/a", bytes(32))))
        await until(lambda: bool(cores[0].controls))
        cores[0].done(PauseMode.RUNNING)
        assert await loading == ""
        assert not cores[1].controls
        client.clients[0].engine.other_model = "another one, too"
        with pytest.raises(Overloaded, match="no replica has the model"):
            await client.load_adapter(Adapter("a", "/a", bytes(32)))

    run(cores, act, cores[0])


def test_own_files_are_compared_with_engines_of_other_machines_only() -> None:
    facts = {
        name: type(FACTS)(**{**as_dict(), "tokenizer": tokenizer, "weights": weights})
        for name, tokenizer, weights in [
            ("same", "t1", "w1"),
            ("unknown", "", ""),
            ("weights", "t1", "w2"),
            ("tokenizer", "t2", "w1"),
        ]
    }
    expected = ExpectedModel(OWN)
    differ = {name for name, one in facts.items() if expected.difference(one, REMOTE)}
    assert differ == {"weights", "tokenizer"}
    assert not any(expected.difference(one, "ipc:///run/core") for one in facts.values())
    without_weights = ExpectedModel(ModelFiles("t1", ""))
    differ = {name for name, one in facts.items() if without_weights.difference(one, REMOTE)}
    assert differ == {"tokenizer"}


def test_a_digest_that_the_first_engine_lacks_is_that_of_another_with_its_model() -> None:
    first, second, third, strange = (
        type(FACTS)(**{**as_dict(), "tokenizer": tokenizer, "weights": weights})
        for tokenizer, weights in [("", "w1"), ("t1", "w1"), ("t2", "w1"), ("t2", "")]
    )
    expected = ExpectedModel()
    for facts in (first, strange):
        assert not expected.difference(facts, REMOTE)
        expected.learn(facts)
    assert not expected.difference(second, REMOTE)
    expected.learn(second)
    assert "tokenizer t2 instead of t1" in expected.difference(third, REMOTE)
    expected.keep_if_present([None, first, third])
    assert expected.difference(third, REMOTE)
    expected.keep_if_present([None, third])
    assert not expected.difference(third, REMOTE)


def as_dict() -> dict[str, object]:
    return {name: getattr(FACTS, name) for name in FACTS.__struct_fields__}


def test_a_single_engine_is_compared_with_the_files_here(core: FakeCore) -> None:
    """Its address is not remote in this test, so only the absence of learning shows."""
    with_facts(core, weights="w1")

    async def act(client: ReplicatedClient) -> None:
        renew(core, weights="w2")
        await until(lambda: client.facts is not None and client.facts.weights == "w2")
        client.submit([5], PARAMS)
        await until(lambda: core.num_added == 1)

    play([core], act)


def test_a_single_engine_with_another_model_is_named_in_the_log(
    core: FakeCore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_model, "is_remote", lambda address: True)
    with_facts(core, weights="w2")

    async def main() -> None:
        async with ReplicatedClient([core.address], files=OWN) as client:
            task = asyncio.create_task(pump([core]))
            await until(lambda: bool(client.clients[0].engine.other_model))
            with pytest.raises(EngineFailed, match="w2 instead of w1"):
                client.submit([5], PARAMS)
            task.cancel()

    asyncio.run(main())
    [line] = [one for one in caplog.messages if "gets no requests" in one]
    assert line == f"{core.address} gets no requests: its model 'fake' has weights w2 instead of w1"


def test_digests_differ_between_models_and_not_between_copies(tmp_path: Path) -> None:
    def make(name: str, tokenizer: str, weights: bytes, **more: str) -> ModelFiles:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "tokenizer.json").write_text(tokenizer)
        (directory / "model.safetensors").write_bytes(weights)
        for file, text in more.items():
            (directory / f"{file}.json").write_text(text)
        return read_model_files(str(directory))

    one = make("one", "{}", bytes(2**21))
    assert make("copy", "{}", bytes(2**21), original="more") == one
    other = make("other", "{ }", bytes(2**21 - 9) + b"x" * 9)
    assert other.tokenizer != one.tokenizer
    trained = make("trained", "{}", b"x" * 2**21)
    assert (trained.tokenizer, trained.weights != one.weights) == (one.tokenizer, True)
    (tmp_path / "one" / "model.safetensors").unlink()
    assert read_model_files(str(tmp_path / "one")) == one._replace(weights="")
    assert read_model_files("null") == ModelFiles(weights="null")
