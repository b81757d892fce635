"""POST /v1/chat/completions: messages become a prompt, text becomes a message."""

from dataclasses import dataclass
from typing import Any, ClassVar

from api_proc.bodies import ChatBody
from api_proc.http.json_body import BodyDecoder
from api_proc.openai import responses
from api_proc.openai.logprobs import chat_logprobs, prompt_logprobs
from api_proc.openai.serving import GenerationApi
from api_proc.params import truncated_length
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt
from api_proc.text.tokenizer import EncodeOptions, TextTokenizer
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


@dataclass(frozen=True)
class ChatFormat:
    """Chunks with a message's role first and then its text."""

    plain_choice: ClassVar = (b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null')
    echoes_prompt: ClassVar = False

    tokenizer: TextTokenizer
    body: ChatBody
    prompts: list[Prompt]
    head: responses.ChatChunk

    def opening(self, sequence: OutputSequence) -> dict[str, Any]:
        delta = responses.ChatDelta(role="assistant", content="")
        return self._prompt_fields() | {
            "choices": [responses.ChatChunkChoice(index=sequence.index, delta=delta)]
        }

    def choice(
        self, sequence: OutputSequence, delta: Delta, *, is_first: bool
    ) -> responses.ChatChunkChoice:
        text = responses.ChatDelta(content=delta.text or None)
        return responses.ChatChunkChoice(
            index=sequence.index, delta=text, **self._choice_fields(delta)
        )

    def whole(
        self, answers: list[tuple[OutputSequence, Delta]], usage: responses.Usage
    ) -> responses.ChatCompletion:
        choices = [
            responses.ChatChoice(
                index=sequence.index,
                message=responses.AssistantMessage(delta.text),
                **self._choice_fields(delta),
            )
            for sequence, delta in answers
        ]
        completion = responses.ChatCompletion(
            id=self.head.id,
            created=self.head.created,
            model=self.head.model,
            choices=choices,
            usage=usage,
            **self._prompt_fields(),
        )
        num_top = self.body.prompt_logprobs
        if num_top is not None:
            entries = answers[0][0].prompt_logprobs
            completion.prompt_logprobs = prompt_logprobs(self.tokenizer, entries, num_top)
        return completion

    def _prompt_fields(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.prompts[0].token_ids}

    def _choice_fields(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"finish_reason": delta.finish_reason}
        num_top = self.body.num_logprobs
        if num_top is not None and delta.logprobs is not None:
            fields["logprobs"] = chat_logprobs(self.tokenizer, delta.logprobs, num_top)
        if delta.finish_reason is not None:
            fields["stop_reason"] = delta.stop_reason
        if self.body.return_token_ids:
            fields["token_ids"] = delta.token_ids
        return fields


CHAT = GenerationApi(
    "/v1/chat/completions",
    BodyDecoder(ChatBody),
    "messages",
    _tokenize,
    _restore_prompts,
    ChatFormat,
    "chatcmpl-",
    responses.ChatChunk,
)
