"""The reasons for which a request is refused before it is queued."""

from core_proc.pausing import Pausing
from core_proc.preparation.adapters import ADAPTER_PARAM, KILLS_WORKERS, SAME_ID, Adapters
from core_proc.preparation.grammars import MAX_COMPILING, Grammars
from core_proc.recovery.quarantine import Quarantine
from core_proc.scheduler import Scheduler
from protocol.adapters import Adapter
from protocol.api_core import AddRequest, ErrorCode, RequestError
from protocol.config import EngineConfig
from protocol.fairness.account import Account
from protocol.fairness.shares import has_share
from protocol.model_facts import ModelFacts
from protocol.request_validation import validate_request

NO_LORA = "the engine was started without enable_lora"


class RequestCheck:
    """Checks requests against the load of an engine, its settings and its model."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        *,
        grammars: Grammars,
        adapters: Adapters,
        pausing: Pausing,
        quarantine: Quarantine,
    ) -> None:
        self._limits = config.scheduler
        self._takes_adapters = config.lora.enable_lora
        self._scheduler = scheduler
        self._grammars = grammars
        self._adapters = adapters
        self._pausing = pausing
        self._quarantine = quarantine

    def why_not(
        self, add: AddRequest, origin: str, facts: ModelFacts, now: float, *, was_accepted: bool
    ) -> RequestError | None:
        """Return why a request is refused, if it is.

        Drain and overload do not end a request that was accepted before, here or elsewhere.
        """
        if not was_accepted and (error := self._why_not_now(add, origin)) is not None:
            return error
        adapter_id = 0 if add.adapter is None else add.adapter.adapter_id
        if self._quarantine.refuses(add.prompt, add.sampling_params, now, adapter_id):
            text = "the same request has killed workers; it is refused for ten minutes"
            return RequestError(ErrorCode.QUARANTINED, text)
        if add.adapter is not None and (error := self._why_not_adapter(add.adapter)) is not None:
            return error
        return validate_request(add, facts)

    def _why_not_now(self, add: AddRequest, origin: str) -> RequestError | None:
        if self._pausing.is_draining:
            return RequestError(ErrorCode.DRAINING, "the engine is shutting down")
        if (error := self._overload(add)) is not None:
            return error
        grammar = add.sampling_params.grammar
        if grammar is not None and self._grammars.is_full(grammar, Account(origin, add.tenant)):
            text = f"its client's share of the {MAX_COMPILING} grammars at a time is used up"
            return RequestError(ErrorCode.OVERLOADED, text)
        return None

    def _overload(self, add: AddRequest) -> RequestError | None:
        """Return an error if the queue is full, or if the client has its share of it.

        A program that states no origin fills the queue by itself.
        """
        scheduler, limits, waiting = self._scheduler, self._limits, self._scheduler.waiting
        num_waiting, num_tokens = scheduler.num_waiting, waiting.num_prompt_tokens
        num_free = limits.max_num_waiting - num_waiting
        num_free_tokens = limits.max_waiting_tokens - num_tokens
        num_own = waiting.num_of[add.origin]
        num_own_tokens = waiting.num_prompt_tokens_of[add.origin]
        if num_free <= 0:
            text = f"{limits.max_num_waiting} requests are waiting already"
        elif num_waiting and add.num_prompt_tokens > num_free_tokens:
            text = f"prompts of {num_tokens} tokens are waiting already"
        elif add.origin and not has_share(num_own, num_free):
            text = f"{num_own} requests of this client are waiting already, its share of the queue"
        elif add.origin and not has_share(num_own_tokens, num_free_tokens, add.num_prompt_tokens):
            text = f"prompts of {num_own_tokens} tokens of this client are waiting already"
        else:
            return None
        return RequestError(ErrorCode.OVERLOADED, text)

    def _why_not_adapter(self, adapter: Adapter) -> RequestError | None:
        if not self._takes_adapters:
            return RequestError(ErrorCode.INVALID, NO_LORA, ADAPTER_PARAM)
        name = f"adapter {adapter.name!r}"
        if self._adapters.refuses(adapter):
            return RequestError(ErrorCode.QUARANTINED, f"{name}: {KILLS_WORKERS}", ADAPTER_PARAM)
        if self._adapters.has_id_conflict(adapter):
            return RequestError(ErrorCode.INVALID, f"{name}: {SAME_ID}", ADAPTER_PARAM)
        return None
