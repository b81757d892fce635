"""Adapters are loaded beside the worker: order, adoptions, and room."""

import select
import threading
import time

import pytest

from protocol.adapters import Adapter, AdapterError
from protocol.core_worker import AdapterLoaded, LoadAdapter, UnloadAdapter
from scripts.testing import eventually
from worker_proc.adapters import service as service_module
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.adapters.service import AdapterService

TIMEOUT_S = 30.0
A, B, C = (Adapter(name, f"/{name}", name.encode() * 32) for name in "abc")
BAD = Adapter("bad", "/bad", b"x" * 32)


class Reading:
    """Reads adapters when it may."""

    def __init__(self) -> None:
        self.may_read = threading.Event()
        self.may_read.set()
        self.read: list[str] = []

    def __call__(self, adapter: Adapter) -> str:
        assert self.may_read.wait(TIMEOUT_S)
        self.read.append(adapter.name)
        if adapter is BAD:
            raise AdapterError("r is 64")
        return adapter.name


def make(num_kept: int = 2) -> tuple[Reading, KeptAdapters[str], AdapterService[str]]:
    reading = Reading()
    kept = KeptAdapters(reading, num_kept)
    return reading, kept, AdapterService(kept)


def wait(service: AdapterService[str], number: int) -> list[AdapterLoaded]:
    """Return the next answers, in their order."""
    found: list[AdapterLoaded] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < number:
        ready, _, _ = select.select([service.wake_fd], [], [], max(0, deadline - time.monotonic()))
        assert ready, f"only {found} came"
        found += service.take_results()
    return found


def test_good_and_bad_adapters_are_answered_in_order() -> None:
    _, kept, service = make()
    for adapter in (A, BAD, B):
        assert service.load(LoadAdapter(adapter)) is None
    assert wait(service, 3) == [
        AdapterLoaded(A.adapter_id),
        AdapterLoaded(BAD.adapter_id, "r is 64"),
        AdapterLoaded(B.adapter_id),
    ]
    assert A.adapter_id in kept
    assert B.adapter_id in kept
    assert BAD.adapter_id not in kept
    assert service.load(LoadAdapter(A)) == AdapterLoaded(A.adapter_id), "at once"
    service.unload(UnloadAdapter(A.adapter_id))
    assert A.adapter_id not in kept


def test_a_load_that_hangs_is_in_error_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads go on until too many hang; when these end, what they have read is dropped."""
    monkeypatch.setattr(service_module, "LOAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(service_module, "MAX_HANGING", 1)
    reading, kept, service = make()
    reading.may_read.clear()
    service.load(LoadAdapter(A))
    [answer] = wait(service, 1)
    assert answer.error == "its files could not be read within 0.05 s"
    service.load(LoadAdapter(B))
    [answer] = wait(service, 1)
    assert answer.error == "the files of 1 other adapters are still being read"
    monkeypatch.setattr(service_module, "LOAD_TIMEOUT_S", TIMEOUT_S)
    reading.may_read.set()
    eventually(lambda: reading.read == ["a"], "the first load has ended")
    eventually(lambda: not service._hanging[0].is_alive(), "its thread has ended")
    service.load(LoadAdapter(B))
    assert wait(service, 1) == [AdapterLoaded(B.adapter_id)]
    assert A.adapter_id not in kept


def test_another_adapter_with_the_same_id_is_read() -> None:
    reading, kept, service = make()
    service.load(LoadAdapter(A))
    wait(service, 1)
    service.begin_adoption()
    other = Adapter("other", "/other", A.digest[:8] + b"z" * 24)
    assert service.load(LoadAdapter(other)) is None
    wait(service, 1)
    assert reading.read == ["a", "other"]
    assert kept[A.adapter_id] == "other"


def test_what_is_only_checked_is_not_kept() -> None:
    _, kept, service = make()
    service.load(LoadAdapter(A, keeps=False))
    assert wait(service, 1) == [AdapterLoaded(A.adapter_id)]
    assert len(kept) == 0


def test_another_core_takes_over_what_is_loaded_and_gets_no_old_answer() -> None:
    reading, kept, service = make()
    service.load(LoadAdapter(A))
    wait(service, 1)
    reading.may_read.clear()
    service.load(LoadAdapter(B))
    service.load(LoadAdapter(C))
    service.begin_adoption()
    reading.may_read.set()
    assert service.load(LoadAdapter(A)) == AdapterLoaded(A.adapter_id)
    service.load(LoadAdapter(C))
    assert wait(service, 1) == [AdapterLoaded(C.adapter_id)]
    assert "B" not in reading.read[2:], "what had not begun is not read"
    assert len(kept) == 2


def test_what_the_present_core_does_not_know_makes_room() -> None:
    _, kept, service = make()
    for adapter in (A, B):
        service.load(LoadAdapter(adapter))
    wait(service, 2)
    service.begin_adoption()
    service.load(LoadAdapter(B))
    service.load(LoadAdapter(C))
    wait(service, 1)
    assert A.adapter_id not in kept
    assert B.adapter_id in kept
    assert C.adapter_id in kept
