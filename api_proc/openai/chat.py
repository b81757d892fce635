"""POST /v1/chat/completions: messages become a prompt, text becomes a message."""

from typing import Any

from api_proc.bodies import ChatBody
from api_proc.http.json_body import BodyDecoder
from api_proc.openai.logprobs import chat_logprobs, prompt_logprobs
from api_proc.openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from api_proc.openai.serving import GenerationApi
from api_proc.params import truncated_length
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt
from api_proc.text.tokenizer import EncodeOptions
from protocol.core_worker import ModelFacts


async def _tokenize(state: ApiState, body: ChatBody, facts: ModelFacts) -> list[Prompt]:
    text = await state.text.render(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        extra=body.chat_template_kwargs,
    )
    add_special_tokens, keep_last = bool(body.add_special_tokens), truncated_length(body, facts)
    options = EncodeOptions(add_special_tokens, facts.max_model_len - 1, keep_last)
    [token_ids] = await state.text.encode([text], options, param="messages")
    return [Prompt(token_ids, None)]


def _restore_prompts(body: ChatBody, token_ids: list[list[int]]) -> list[Prompt]:
    return [Prompt(token_ids[0], None)]


class ChatFormat:
    """Chunks with a message's role first and then its text."""

    plain_choice = (b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null')
    echoes_prompt = False

    def __init__(
        self,
        state: ApiState,
        request_id: str,
        body: ChatBody,
        prompts: list[Prompt],
        created: int,
    ) -> None:
        self._tokenizer = state.text.tokenizer
        self._body = body
        self._prompt_token_ids = prompts[0].token_ids
        self.head = ChatChunk(
            id=f"chatcmpl-{request_id}",
            created=created,
            model=state.model_name,
            choices=[],
        )

    def opening(self, sequence: OutputSequence) -> dict[str, Any]:
        delta = ChatDelta(role="assistant", content="")
        return self._prompt_fields() | {
            "choices": [ChatChunkChoice(index=sequence.index, delta=delta)]
        }

    def choice(self, sequence: OutputSequence, delta: Delta, *, is_first: bool) -> ChatChunkChoice:
        choice = ChatChunkChoice(
            index=sequence.index,
            delta=ChatDelta(content=delta.text or None),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def whole(self, answers: list[tuple[OutputSequence, Delta]], usage: Usage) -> ChatCompletion:
        completion = ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=[self._whole_choice(sequence.index, delta) for sequence, delta in answers],
            usage=usage,
            **self._prompt_fields(),
        )
        num_top = self._body.prompt_logprobs
        if num_top is not None:
            entries = answers[0][0].prompt_logprobs
            completion.prompt_logprobs = prompt_logprobs(self._tokenizer, entries, num_top)
        return completion

    def _whole_choice(self, index: int, delta: Delta) -> ChatChoice:
        choice = ChatChoice(
            index=index,
            message=AssistantMessage(delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _prompt_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_token_ids} if self._body.return_token_ids else {}

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        num_top = self._body.num_logprobs
        if num_top is None or delta.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, delta.logprobs, num_top)


CHAT = GenerationApi(
    "/v1/chat/completions",
    BodyDecoder(ChatBody),
    "messages",
    _tokenize,
    _restore_prompts,
    ChatFormat,
)
