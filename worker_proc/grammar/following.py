"""Connects the requests of a mirror to their grammars."""

from protocol.message import MAX_TEXT
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.errors import GrammarError
from worker_proc.grammar.state import GrammarState
from worker_proc.request import MirroredRequest, ScheduledRequest

_MAX_ERROR_CHARS = 2**18
"""Characters of all errors of one step: they take at most 1 MiB of the answer's frame."""


def grammar_state_of(request: MirroredRequest, grammars: GrammarCompiler | None) -> GrammarState:
    """Return the grammar state of a request; it is created from the outputs on first use.

    The grammar is compiled already, unless others have displaced it since.
    """
    if request.grammar_state is None:
        grammar = request.sampling_params.grammar
        assert grammar is not None
        try:
            if grammars is None:
                raise GrammarError("this worker cannot compile grammars")
            matcher = grammars.matcher(grammar)
        except GrammarError as error:
            request.grammar_state = GrammarState(None, request.num_prompt_tokens, str(error))
        else:
            request.grammar_state = GrammarState(
                matcher,
                request.num_prompt_tokens,
                num_tokens=grammars.num_tokens,
                tokenizer=grammars.tokenizer,
            )
            request.grammar_state.advance(request.token_ids)
    return request.grammar_state


def follow(scheduled: list[ScheduledRequest]) -> dict[int, str]:
    """Advance the states by the tokens that the mirror has appended; return errors by request."""
    errors = {}
    for part in scheduled:
        state = part.request.grammar_state
        if state is not None and part.samples:
            state.advance(part.request.token_ids)
            if state.error:
                errors[part.request.req_id] = f"grammar: {state.error}"
    limit = min(MAX_TEXT, _MAX_ERROR_CHARS // max(len(errors), 1))
    return {req_id: error[:limit] for req_id, error in errors.items()}
