"""The tokenizer of a model, with those methods of a Hugging Face tokenizer that programs call."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from api_proc.llm.prompts import Message, tokenized_chat
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import EncodeOptions
from protocol.model_facts import ModelFacts

_MAX_TOKENS = 2**24
"""Longest text, in tokens; it may exceed the model's context."""


class Tokenizer:
    """Turns texts and chats into the ids that the engine computes, and ids into text."""

    def __init__(
        self,
        text: TextProcessor,
        facts: ModelFacts,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        """`run` returns the result of a coroutine, in the event loop of `text`."""
        self._text = text
        self._run = run
        self.vocab_size = facts.vocab_size
        self.eos_token_id = facts.eos_token_ids[0] if facts.eos_token_ids else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        options = EncodeOptions(add_special_tokens, _MAX_TOKENS)
        return self._text.tokenizer.encode(text, options)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._text.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """Return the prompt of a chat: its ids, or its text. RequestFailed: it has none."""
        work = tokenized_chat(
            self._text,
            conversation,
            _MAX_TOKENS,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs or None,
        )
        prompt = self._run(work)
        return list(prompt.token_ids) if tokenize else str(prompt.text)
