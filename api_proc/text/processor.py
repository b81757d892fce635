"""Turns prompts into token ids: short texts in place, longer ones in a single thread."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from api_proc.errors import ApiError, invalid, overloaded
from api_proc.text.chat_template import ChatTemplate, ChatTemplateError
from api_proc.text.checkpoint import SamplingDefaults, chat_templates, read_json, sampling_defaults
from api_proc.text.tokenizer import (
    ByteTokenizer,
    EncodeOptions,
    HfTokenizer,
    TextTokenizer,
    TooManyTokens,
)
from protocol.api_core import ErrorCode
from protocol.config import ModelConfig

INLINE_CHARS = 2048
"""Texts up to this length take less than a millisecond, about as long as a thread hand-over."""
MAX_LONG_TEXTS = 64
_NICENESS = 5

NULL_MODEL = "null"
_NULL_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
T = TypeVar("T")


class TextProcessor:
    """Tokenizer, chat template and sampling defaults of one model."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
        tokenizer_config: dict[str, object] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.defaults = defaults or SamplingDefaults()
        self.tokenizer_config = tokenizer_config or {}
        self._num_waiting = 0
        self._executor = ThreadPoolExecutor(1, "tokenize", initializer=_lower_priority)

    @classmethod
    def load(cls, model: ModelConfig) -> "TextProcessor":
        """Read the files of a checkpoint; the model "null" has none."""
        if model.model == NULL_MODEL and model.tokenizer is None:
            return cls(ByteTokenizer(), ChatTemplate(_NULL_CHAT_TEMPLATE, {}))
        directory = Path(model.tokenizer or model.model)
        config = read_json(directory / "tokenizer_config.json")
        tokenizer = HfTokenizer(directory, config)
        templates = chat_templates(directory, config, model.chat_template)
        template = None
        if "default" in templates:
            template = ChatTemplate(templates["default"], tokenizer.special_tokens)
        return cls(tokenizer, template, sampling_defaults(Path(model.model)), config)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self, texts: list[str], options: EncodeOptions, *, param: str
    ) -> list[list[int]]:
        """Return the ids of several texts; `param` is the field to name in errors."""
        max_tokens = options.max_tokens
        if options.keep_last is None:  # reject early what is too long however it is split
            longest = max(map(len, texts), default=0)
            num_tokens_min = -(-longest // self.tokenizer.longest_token_chars)
            if num_tokens_min > max_tokens:
                raise too_long(num_tokens_min, max_tokens, param)
        try:
            return await self._run(
                lambda: [self.tokenizer.encode(text, options) for text in texts],
                sum(map(len, texts)),
            )
        except TooManyTokens as error:
            raise too_long(error.num_tokens, max_tokens, param) from error

    async def render(
        self,
        messages: list[dict[str, object]],
        *,
        add_generation_prompt: bool,
        extra: dict[str, object] | None,
    ) -> str:
        """Return the prompt of a chat."""
        template = self.template
        if template is None:
            message = "the model has no chat template; set one with --chat-template"
            raise invalid("messages", message, "no_chat_template")
        num_chars = sum(len(str(message.get("content"))) + 32 for message in messages)
        try:
            return await self._run(
                lambda: template.render(
                    messages, add_generation_prompt=add_generation_prompt, extra=extra
                ),
                num_chars,
            )
        except ChatTemplateError as error:
            raise invalid("messages", str(error), "chat_template_error") from error

    async def _run(self, work: Callable[[], T], num_chars: int) -> T:
        if num_chars <= INLINE_CHARS:
            return work()
        if self._num_waiting >= MAX_LONG_TEXTS:
            raise overloaded(f"{MAX_LONG_TEXTS} long prompts are waiting for the tokenizer")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._num_waiting -= 1


def too_long(num_tokens: int, max_tokens: int, param: str) -> ApiError:
    return invalid(
        param,
        f"the prompt has at least {num_tokens} tokens; the model's context of {max_tokens + 1} "
        "tokens must hold it and at least one output token",
        ErrorCode.TOO_LONG,
    )


def _lower_priority() -> None:
    """Give running streams precedence over long prompts on a busy machine."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
