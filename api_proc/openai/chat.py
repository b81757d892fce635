"""POST /v1/chat/completions: turns messages into a prompt, and text into a message."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from api_proc.bodies import ChatBody, wants_generation_prompt
from api_proc.chat.grammar import output_grammar
from api_proc.chat.lark import GrammarTooLarge
from api_proc.chat.parser import OutputParser
from api_proc.chat.tools import no_tool_format
from api_proc.errors import invalid
from api_proc.generation.serving import GenerationApi
from api_proc.http.json_body import BodyDecoder
from api_proc.openai import objects
from api_proc.openai.chat_message import assistant_message, call_ids, chat_delta
from api_proc.openai.encoded_list import EncodedLists
from api_proc.openai.logprobs import chat_logprobs, prompt_logprobs, token_text_of
from api_proc.openai.reply import chunk_answers
from api_proc.params import truncated_length
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt
from api_proc.text.tokenizer import EncodeOptions, TextTokenizer
from protocol.model_facts import ModelFacts
from protocol.sampling import MAX_GRAMMAR_CHARS, FinishReason, SamplingParams


async def tokenize_chat(state: ApiState, body: ChatBody, facts: ModelFacts) -> list[Prompt]:
    """Return the prompt, which fits into the model's context; the body keeps its messages."""
    use = body.tool_use
    tools = None
    if use is not None:
        if not state.text.dialect.has_tools:
            raise no_tool_format()
        tools = [tool.for_template() for tool in use.shown]
    add_special_tokens, keep_last = bool(body.add_special_tokens), truncated_length(body, facts)
    token_ids = await state.text.encode_chat(
        [message.for_template() for message in body.messages],
        EncodeOptions(add_special_tokens, facts.max_model_len - 1, keep_last),
        add_generation_prompt=wants_generation_prompt(body),
        extra=body.template_variables,
        tools=tools,
        continue_final_message=bool(body.continue_final_message),
    )
    return [Prompt(token_ids, None)]


async def _tokenize(state: ApiState, body: ChatBody, facts: ModelFacts) -> list[Prompt]:
    prompts = await tokenize_chat(state, body, facts)
    body.messages, body.chat_template_kwargs = [], None  # they may be large, and the ids are known
    return prompts


def _restore_prompts(body: ChatBody, token_ids: list[list[int]]) -> list[Prompt]:
    return [Prompt(token_ids[0], None)]


def _make_parser(
    state: ApiState, body: ChatBody, prompt_token_ids: list[int], key: str
) -> OutputParser | None:
    """Return the parser of an output that may contain calls or reasoning."""
    dialect, use = state.text.dialect, body.tool_use
    if use is None and not dialect.has_reasoning:
        return None
    return OutputParser(
        dialect,
        schemas=None if use is None else use.schemas,
        is_reasoning_open=state.text.is_reasoning_open(prompt_token_ids),
        make_id=call_ids(key, dialect),
        keeps_reasoning=body.include_reasoning is not False,
    )


def _constrain(
    state: ApiState, body: ChatBody, prompt_token_ids: list[int], params: SamplingParams
) -> SamplingParams:
    """Constrain the output to the calls that the request demands, and to strict arguments.

    If the parameters already have a grammar, it applies to the content only.
    """
    use, content = body.tool_use, params.grammar
    if content is None and (use is None or not use.needs_grammar):
        return params
    try:
        grammar = output_grammar(
            state.text.dialect,
            use,
            content,
            is_reasoning_open=state.text.is_reasoning_open(prompt_token_ids),
            is_reasoning_over=state.text.is_reasoning_over(prompt_token_ids),
            added_token_id=state.text.tokenizer.added_token_id,
        )
    except GrammarTooLarge:
        message = f"need a grammar of more than {MAX_GRAMMAR_CHARS} characters"
        raise invalid("tools", message) from None
    return msgspec.structs.replace(params, grammar=grammar)


@dataclass(frozen=True)
class ChatFormat:
    """Chunks that begin with the message's role, followed by its text."""

    plain_choice: ClassVar = (b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null')

    tokenizer: TextTokenizer
    body: ChatBody
    prompts: list[Prompt]
    head: objects.ChatChunk
    lists: EncodedLists = field(default_factory=EncodedLists)

    def opening(self, sequence: OutputSequence) -> dict[str, Any]:
        delta = objects.ChatDelta(role="assistant", content="")
        return self._prompt_fields() | {
            "choices": [objects.ChatChunkChoice(index=sequence.index, delta=delta)]
        }

    def choice(
        self, sequence: OutputSequence, delta: Delta, *, is_first: bool
    ) -> objects.ChatChunkChoice:
        if delta.events is None:
            piece = objects.ChatDelta(content=delta.text or None)
        else:
            piece = chat_delta(delta.events)
        return objects.ChatChunkChoice(
            index=sequence.index, delta=piece, **self._choice_fields(sequence, delta)
        )

    def whole(self, first: OutputSequence, usage: objects.Usage) -> objects.ChatCompletion:
        completion = objects.ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[],
            usage=usage,
            **self._prompt_fields(),
        )
        num_top = self.body.prompt_logprobs
        if num_top is not None:
            entries = first.prompt_logprobs
            completion.prompt_logprobs = prompt_logprobs(
                self.tokenizer, entries, num_top, self.lists
            )
        return completion

    def whole_choice(self, sequence: OutputSequence, delta: Delta) -> objects.ChatChoice:
        return objects.ChatChoice(
            index=sequence.index,
            message=objects.AssistantMessage(delta.text)
            if delta.events is None
            else assistant_message(delta.events),
            **self._choice_fields(sequence, delta),
        )

    def _prompt_fields(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.prompts[0].token_ids}

    def _choice_fields(self, sequence: OutputSequence, delta: Delta) -> dict[str, Any]:
        finish_reason = delta.finish_reason
        if finish_reason == FinishReason.STOP and sequence.parser and sequence.parser.num_calls:
            finish_reason = "tool_calls"
        fields: dict[str, Any] = {"finish_reason": finish_reason}
        num_top = self.body.num_logprobs
        if num_top is not None and delta.logprobs is not None:
            text_of = token_text_of(self.tokenizer, as_ids=self.body.return_tokens_as_token_ids)
            fields["logprobs"] = chat_logprobs(
                self.tokenizer, delta.logprobs, num_top, self.lists, text_of
            )
        if delta.finish_reason is not None:
            fields["stop_reason"] = delta.stop_reason
            if sequence.stream.resumed_inexactly:
                fields["resumed_inexactly"] = True
        if self.body.return_token_ids:
            fields["token_ids"] = delta.token_ids
        return fields


CHAT = GenerationApi(
    path="/v1/chat/completions",
    decode=BodyDecoder(ChatBody),
    prompt_param="messages",
    tokenize=_tokenize,
    restore_prompts=_restore_prompts,
    make_answer=chunk_answers(ChatFormat, "chatcmpl-", objects.ChatChunk),
    make_parser=_make_parser,
    constrain=_constrain,
)
