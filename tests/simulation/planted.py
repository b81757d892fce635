"""Bugs that the simulation must find, planted in the real code for the time of a run.

A simulation that reports nothing proves something only if it reports these.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import msgspec

from api_proc.resumption import session_log, sessions
from api_proc.resumption.history import History
from core_proc import engine
from core_proc.kv import kv_cache
from core_proc.kv.kv_cache import KVCacheManager
from core_proc.links.worker_link import WorkerLink
from core_proc.loop import CoreLoop
from core_proc.outputs import rows
from core_proc.pausing import Pausing
from core_proc.preparation.adapter_turns import AdapterTurns
from core_proc.preparation.adapters import Adapters
from core_proc.preparation.grammars import Grammars
from core_proc.recovery.adapter_trials import REFUSED_POINTS, AdapterTrials
from core_proc.request import Request
from protocol.api_core import AddRequest, RequestOutput
from protocol.client.ledger import Ledger
from protocol.client.request_stream import RequestStream
from protocol.core_worker import NULL_BLOCK, CoreToWorker, NewRequestData, WorkerToCore
from protocol.process.child_runtime import ChildProcess
from protocol.sampling import SamplingParams
from tests.simulation.grammars import FIRST_TOKEN_ID
from tests.simulation.model import SimulatedModel
from worker_proc import mirror
from worker_proc.drafting.draft_states import HasDraftStates
from worker_proc.grammar.state import GrammarState
from worker_proc.mirror import Mirror
from worker_proc.request import MirroredRequest
from worker_proc.shim import WorkerShim

_EVERY = 23
"""A frequent bug strikes one time in this many."""
Place = tuple[type | ModuleType, str, Callable[..., Any]]


def _drop_token() -> list[Place]:
    """The client occasionally drops the first token of an output."""
    deliver = RequestStream.deliver

    def forget(stream: RequestStream, output: RequestOutput) -> None:
        if output.token_ids and output.token_ids[0] % _EVERY == 0:
            output = msgspec.structs.replace(output, token_ids=output.token_ids[1:])
        deliver(stream, output)

    return [(RequestStream, "deliver", forget)]


def _repeat_token() -> list[Place]:
    """The ledger occasionally repeats a token of a resent request."""
    take = Ledger.take

    def trusting(ledger: Ledger, output: RequestOutput) -> RequestOutput | AddRequest | None:
        news = take(ledger, output)
        if not isinstance(news, RequestOutput) or not news.token_ids or not news.first_index:
            return news
        again = news.token_ids[-1:] if news.token_ids[-1] % _EVERY == 0 else []
        return msgspec.structs.replace(news, token_ids=[*news.token_ids, *again])

    return [(Ledger, "take", trusting)]


def _skip_epoch_check() -> list[Place]:
    """Both ends of the worker link accept frames of any epoch."""
    handle, on_message = WorkerLink._handle, WorkerShim.on_message

    def accept_any_epoch(link: WorkerLink, peer: bytes, epoch: int, message: WorkerToCore) -> None:
        is_hello = type(message).__name__ == "WorkerHello"
        handle(link, peer, epoch if is_hello else link._adopted_epoch or epoch, message)

    def follow_any_epoch(
        shim: WorkerShim, epoch: int, message: CoreToWorker
    ) -> WorkerToCore | None:
        is_adoption = type(message).__name__ == "Adopt"
        return on_message(shim, epoch if is_adoption else shim.link_epoch or epoch, message)

    return [(WorkerLink, "_handle", accept_any_epoch), (WorkerShim, "on_message", follow_any_epoch)]


def _stateful_random() -> list[Place]:
    """A worker's random generator advances with every draw of any request."""
    draw = SimulatedModel._next_token_id

    def stateful(model: SimulatedModel, request: MirroredRequest, *more: Any) -> int:
        num_draws = vars(model)["num_draws"] = vars(model).get("num_draws", 0) + 1
        token_id = draw(model, request, *more)
        return token_id if num_draws % _EVERY else FIRST_TOKEN_ID

    return [(SimulatedModel, "_next_token_id", stateful)]


def _outputs_as_prompt() -> list[Place]:
    """A resumed request counts its outputs as prompt."""
    append = Mirror._append

    def merging(mirror: Mirror, new: NewRequestData) -> None:
        length = len(new.token_ids) // 4
        append(mirror, msgspec.structs.replace(new, num_prompt_tokens=length))

    return [(Mirror, "_append", merging)]


def _forget_pause() -> list[Place]:
    """Replacement workers compute during a pause."""
    workers_lost = Pausing.workers_lost

    def forget(pausing: Pausing) -> None:
        workers_lost(pausing)
        pausing._resume()

    return [(Pausing, "workers_lost", forget)]


def _promote_old_epoch() -> list[Place]:
    """A promoted standby keeps the epoch that it had while it waited."""
    wait = ChildProcess.wait_for_promotion

    def keep_epoch(child: ChildProcess) -> bool:
        epoch = child.epoch
        is_promoted = wait(child)
        child.epoch = child.reporter.epoch = epoch
        if is_promoted and child._supervisor is not None:
            child._supervisor.promoted(epoch)
        return is_promoted

    return [(ChildProcess, "wait_for_promotion", keep_epoch)]


def _forget_grammars() -> list[Place]:
    """The core takes a new worker's grammars for compiled."""
    return [(Grammars, "workers_lost", lambda grammars: None)]


def _grammar_from_start() -> list[Place]:
    """A request that comes back begins its grammar again."""
    make = GrammarState.__init__

    def begin_again(state: GrammarState, matcher: Any, num_prompt: int, error: str = "") -> None:
        make(state, matcher, 10**9, error)

    advance = GrammarState.advance

    def follow(state: GrammarState, token_ids: list[int]) -> None:
        if state._position == 10**9:  # the outputs so far
            state._position = len(token_ids)
        advance(state, token_ids)

    return [(GrammarState, "__init__", begin_again), (GrammarState, "advance", follow)]


def _swap_vectors() -> list[Place]:
    """The core sends the first vector of a step to all requests that get one."""
    row = rows.output_row

    def other(result: Any, owner: Any, output: Any) -> RequestOutput:
        found = row(result, owner, output)
        vectors = list(output.pooled.values())
        return found if found.embedding is None else _with(found, embedding=vectors[0])

    return [(engine, "output_row", other)]


def _drain_at_once() -> list[Place]:
    """A core that is restarted during the shutdown does not wait for its clients."""
    return [(CoreLoop, "_are_all_back", lambda loop, now: True)]


def _resume_other_seed() -> list[Place]:
    """A request that survives its API process continues with another seed."""

    def reseeded(add: AddRequest, history: History) -> AddRequest:
        params = msgspec.structs.replace(add.sampling_params, seed=add.sampling_params.seed ^ 1)
        again = session_log.resumed(add, history)
        return msgspec.structs.replace(again, sampling_params=params)

    return [(sessions, "resumed", reseeded)]


def _stale_states() -> list[Place]:
    """The core keeps the cached states of a lost worker."""

    def forget_kv(kv: KVCacheManager) -> bool:
        kv.pool.forget_all()
        return True

    return [(KVCacheManager, "reset_prefix_cache", forget_kv)]


def _keep_wrong_drafts() -> list[Place]:
    """A worker continues from the state after all drafts, whichever were right."""

    def after_all(request: HasDraftStates, num_drafts: int, num_right: int) -> int:
        return NULL_BLOCK

    return [(mirror, "state_after", after_all)]


def _forget_adapters() -> list[Place]:
    """The core takes a new worker's adapters for loaded."""
    return [(Adapters, "workers_lost", lambda adapters: None)]


def _keep_turns() -> list[Place]:
    """A turn keeps all requests that it had when another adapter asked for one."""
    return [(AdapterTurns, "_cut", lambda turns, requests: None)]


def _share_prefixes() -> list[Place]:
    """Requests with different adapters share cached prefixes."""
    root = kv_cache.prefix_root

    def without_adapter(request: Request) -> bytes:
        return root(Request(0, [5], SamplingParams(), cache_salt=request.cache_salt))

    return [(kv_cache, "prefix_root", without_adapter)]


def _load_for_ever() -> list[Place]:
    """Signals from outside do not count against the load in which workers die."""
    attribute = AdapterTrials.attribute_death

    def only_faults(trials: AdapterTrials, *, is_fault: bool) -> list[int]:
        return attribute(trials, is_fault=True) if is_fault else []

    return [(AdapterTrials, "attribute_death", only_faults)]


def _refuse_at_once() -> list[Place]:
    """One death during the load of an adapter refuses it."""
    give = AdapterTrials._give

    def most(trials: AdapterTrials, adapter_id: int, points: int) -> None:
        give(trials, adapter_id, REFUSED_POINTS)

    return [(AdapterTrials, "_give", most)]


_with = msgspec.structs.replace

PLANTS: dict[str, Callable[[], list[Place]]] = {
    "drop-token": _drop_token,
    "repeat-token": _repeat_token,
    "skip-epoch-check": _skip_epoch_check,
    "stateful-random": _stateful_random,
    "outputs-as-prompt": _outputs_as_prompt,
    "forget-pause": _forget_pause,
    "promote-old-epoch": _promote_old_epoch,
    "resume-other-seed": _resume_other_seed,
    "drain-at-once": _drain_at_once,
    "forget-grammars": _forget_grammars,
    "grammar-from-start": _grammar_from_start,
    "swap-vectors": _swap_vectors,
    "stale-states": _stale_states,
    "keep-wrong-drafts": _keep_wrong_drafts,
    "forget-adapters": _forget_adapters,
    "keep-turns": _keep_turns,
    "share-prefixes": _share_prefixes,
    "load-for-ever": _load_for_ever,
    "refuse-at-once": _refuse_at_once,
}


@contextlib.contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Run with one of `PLANTS`; None: without a bug."""
    places = PLANTS[name]() if name is not None else []
    before = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in places]
    try:
        for owner, attribute, bug in places:
            setattr(owner, attribute, bug)
        yield
    finally:
        for owner, attribute, original in before:
            setattr(owner, attribute, original)
