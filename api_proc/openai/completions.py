"""POST /v1/completions: accepts prompts as text or token ids, and returns text."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import msgspec

from api_proc.bodies import CompletionBody
from api_proc.errors import invalid
from api_proc.generation.prompt_items import prompt_items
from api_proc.generation.serving import GenerationApi
from api_proc.http.json_body import BodyDecoder
from api_proc.openai.encoded_list import EncodedLists
from api_proc.openai.logprobs import (
    completion_logprobs,
    prompt_logprobs,
    prompt_offsets,
    token_text_of,
)
from api_proc.openai.objects import Completion, CompletionChoice, CompletionLogprobs, Usage
from api_proc.openai.reply import chunk_answers
from api_proc.params import truncated_length
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt
from api_proc.text.processor import too_long
from api_proc.text.tokenizer import EncodeOptions, TextTokenizer
from protocol.core_worker import TokenLogprobs
from protocol.model_facts import ModelFacts

MAX_SEQUENCES = 2048
"""Maximum number of prompts multiplied by n in one request."""
_SLICE_TOKENS = 1024
"""Number of tokens that take about two milliseconds to decode."""


class _PromptItems(NamedTuple):
    """The prompts of a body; one of the lists is empty."""

    texts: list[str]
    ids: list[list[int]]


def _prompt_items(body: CompletionBody) -> _PromptItems:
    """Return the prompts of a body, whose sequences are bounded."""
    items = prompt_items(body.prompt, "prompt")
    num_sequences = len(items) * body.num_sequences
    if num_sequences > MAX_SEQUENCES:
        name = "n" if body.num_sequences == (body.n or 1) else "best_of"
        message = f"prompts times {name} are {num_sequences} sequences, more than {MAX_SEQUENCES}"
        raise invalid("prompt", message)
    return _PromptItems(items, []) if isinstance(items[0], str) else _PromptItems([], items)


async def _tokenize(state: ApiState, body: CompletionBody, facts: ModelFacts) -> list[Prompt]:
    items = _prompt_items(body)
    max_tokens = facts.max_model_len - 1
    keep_last = truncated_length(body, facts)
    if items.ids:
        longest = max(map(len, items.ids))
        if longest > max_tokens and keep_last is None:
            raise too_long(longest, max_tokens, "prompt")
        body.prompt = ""  # the prompts have its ids
        return [Prompt(ids if keep_last is None else ids[-keep_last:], None) for ids in items.ids]
    options = EncodeOptions(body.add_special_tokens is not False, max_tokens, keep_last)
    texts = items.texts
    is_literal = body.parse_special is False
    encoded = await state.text.encode(texts, options, param="prompt", is_literal=is_literal)
    body.prompt = ""  # it is large, and the ids are known
    kept = texts if body.echo else [None] * len(texts)
    return [Prompt(ids, text) for ids, text in zip(encoded, kept, strict=True)]


def _restore_prompts(body: CompletionBody, token_ids: list[list[int]]) -> list[Prompt]:
    texts: list[str | None] = [*_prompt_items(body).texts] or [None] * len(token_ids)
    return [Prompt(ids, text) for ids, text in zip(token_ids, texts, strict=True)]


@dataclass(frozen=True)
class CompletionFormat:
    """Chunks of text; the first may begin with the prompt."""

    plain_choice: ClassVar = (
        b'"text":',
        b',"logprobs":null,"finish_reason":null,"stop_reason":null',
    )

    tokenizer: TextTokenizer
    body: CompletionBody
    prompts: list[Prompt]
    head: Completion
    lists: EncodedLists = field(default_factory=EncodedLists)
    echoed: dict[int, str] = field(default_factory=dict)
    """Texts of prompts that were decoded, by the place of the prompt."""

    def opening(self, sequence: OutputSequence) -> None:
        return None

    def whole(self, first: OutputSequence, usage: Usage) -> Completion:
        return msgspec.structs.replace(self.head, usage=usage)

    def whole_choice(self, sequence: OutputSequence, delta: Delta) -> CompletionChoice:
        return self.choice(sequence, delta, is_first=True)

    def choice(self, sequence: OutputSequence, delta: Delta, *, is_first: bool) -> CompletionChoice:
        body = self.body
        if body.is_echo_alone:
            delta = Delta("", [], finish_reason=delta.finish_reason and "length")
        place = sequence.index // (body.n or 1)
        prompt = self.prompts[place]
        echoed = self._echoed(place) if is_first and body.echo else ""
        choice = CompletionChoice(
            index=sequence.index,
            text=echoed + delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if delta.finish_reason is not None and sequence.stream.resumed_inexactly:
            choice.resumed_inexactly = True
        if body.logprobs is not None:
            choice.logprobs = self._logprobs(sequence, delta, place, is_first=is_first)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
            if is_first:
                choice.prompt_token_ids = prompt.token_ids
        if body.prompt_logprobs is not None and is_first:
            choice.prompt_logprobs = prompt_logprobs(
                self.tokenizer, sequence.prompt_logprobs, body.prompt_logprobs, self.lists
            )
        return choice

    def _logprobs(
        self, sequence: OutputSequence, delta: Delta, place: int, *, is_first: bool
    ) -> CompletionLogprobs:
        prompt, token_ids = self.prompts[place], delta.token_ids
        entries: list[TokenLogprobs | None] = list(delta.logprobs or [])
        offsets = list(delta.text_offsets)
        if self.body.echo:
            num_echoed = len(self._echoed(place))
            offsets = [num_echoed + offset for offset in offsets]
        if self.body.echo and is_first:
            token_ids = prompt.token_ids + token_ids
            known = sequence.prompt_logprobs
            assert len(known) == len(prompt.token_ids), "prompt logprobs are incomplete"
            entries = known + entries
            shown = self._echoed(place) if self._echoes_special(prompt) else ""
            offsets = prompt_offsets(self.tokenizer, prompt.token_ids, shown) + offsets
        num_top = self.body.num_logprobs or 0
        text_of = token_text_of(self.tokenizer, as_ids=self.body.return_tokens_as_token_ids)
        return completion_logprobs(text_of, token_ids, entries, offsets, num_top, lists=self.lists)

    def _is_sent(self, prompt: Prompt) -> bool:
        """Return whether a prompt is echoed as it was sent, not decoded."""
        return prompt.text is not None and self.body.truncate_prompt_tokens is None

    def _echoes_special(self, prompt: Prompt) -> bool:
        """Return whether the text of a prompt may have special tokens."""
        if self._is_sent(prompt):
            return self.body.parse_special is not False
        return self.body.skip_special_tokens is False

    def _echoed(self, place: int) -> str:
        """Return the text of a prompt as the answer has it; it is decoded once."""
        prompt = self.prompts[place]
        if self._is_sent(prompt) and prompt.text is not None:
            return prompt.text
        if place not in self.echoed:
            skip = self.body.skip_special_tokens is not False
            self.echoed[place] = _decoded(self.tokenizer, prompt.token_ids, skip_special=skip)
        return self.echoed[place]


def _decoded(tokenizer: TextTokenizer, token_ids: list[int], *, skip_special: bool) -> str:
    """Return the text of a prompt; that of a long one is decoded in slices.

    The library lets no other thread run while it decodes.
    """
    if len(token_ids) <= _SLICE_TOKENS:
        return tokenizer.decode(token_ids, skip_special_tokens=skip_special)
    detokenizer = tokenizer.detokenizer([], skip_special_tokens=skip_special)
    starts = range(0, len(token_ids), _SLICE_TOKENS)
    pieces = [detokenizer.push(token_ids[start : start + _SLICE_TOKENS]) for start in starts]
    return "".join([*pieces, detokenizer.flush()])


COMPLETIONS = GenerationApi(
    path="/v1/completions",
    decode=BodyDecoder(CompletionBody),
    prompt_param="prompt",
    tokenize=_tokenize,
    restore_prompts=_restore_prompts,
    make_answer=chunk_answers(CompletionFormat, "cmpl-", Completion),
)
