"""Turns prompts into token ids: short texts in place, longer ones in a single thread."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from api_proc.chat.families import find_dialect
from api_proc.chat.formats import Dialect
from api_proc.errors import ApiError, invalid, overloaded
from api_proc.text.chat_template import ChatTemplate, ChatTemplateError
from api_proc.text.checkpoint import SamplingDefaults, chat_templates, read_json, sampling_defaults
from api_proc.text.final_message import render_open
from api_proc.text.literal import LiteralText
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
REASONING_TAIL_TOKENS = 32
"""Tokens at the end of a prompt that hold the marker of reasoning which the prompt begins."""
_NULL_CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>\n"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
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
        dialect: Dialect | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.template_with_tools = template
        self.defaults = defaults or SamplingDefaults()
        self.tokenizer_config = tokenizer_config or {}
        self.dialect = dialect or Dialect()
        """How the model writes reasoning and tool calls."""
        self._num_waiting = 0
        self._executor = ThreadPoolExecutor(1, "tokenize", initializer=_lower_priority)

    @classmethod
    def load(cls, model: ModelConfig) -> "TextProcessor":
        """Read the files of a checkpoint; the model "null" has none."""
        names = model.tool_call_parser, model.reasoning_parser
        if model.model == NULL_MODEL and model.tokenizer is None:
            dialect = find_dialect(_NULL_CHAT_TEMPLATE, *names)
            return cls(ByteTokenizer(), ChatTemplate(_NULL_CHAT_TEMPLATE, {}), dialect=dialect)
        directory = Path(model.tokenizer or model.model)
        config = read_json(directory / "tokenizer_config.json")
        tokenizer = HfTokenizer(directory, config)
        templates = chat_templates(directory, config, model.chat_template)
        template: ChatTemplate | None = None
        with_tools: ChatTemplate | None = None
        if "default" in templates:
            template = ChatTemplate(templates["default"], tokenizer.special_tokens)
        if "tool_use" in templates:
            with_tools = ChatTemplate(templates["tool_use"], tokenizer.special_tokens)
        sources = "".join(templates[name] for name in ("tool_use", "default") if name in templates)
        dialect = find_dialect(sources, *names)
        defaults = sampling_defaults(Path(model.model))
        processor = cls(tokenizer, template, defaults, config, dialect)
        processor.template_with_tools = with_tools or template
        return processor

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
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        extra: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of a chat, as a `LiteralText`: special tokens in it stay text.

        It may end within the final message.
        """
        template = self.template_with_tools if tools else self.template
        if template is None:
            message = "the model has no chat template; set one with --chat-template"
            raise invalid("messages", message, "no_chat_template")
        num_chars = sum(len(str(message.get("content"))) + 32 for message in messages)
        others = [tools, [m["tool_calls"] for m in messages if "tool_calls" in m]]
        num_chars += len(msgspec.json.encode(others))
        mark = self.tokenizer.special.mark

        def work() -> str:
            render = partial(
                template.render,
                add_generation_prompt=add_generation_prompt,
                extra=mark(extra),
                tools=mark(tools),
            )
            if continue_final_message:
                render = partial(render_open, render=render)
            return LiteralText.from_marked(render(mark(messages)))

        try:
            return await self._run(work, num_chars)
        except ChatTemplateError as error:
            raise invalid("messages", str(error), "chat_template_error") from error

    def is_reasoning_open(self, prompt_token_ids: list[int]) -> bool:
        """Whether a prompt ends with the start of the model's reasoning."""
        reasoning = self.dialect.reasoning
        if reasoning is None:
            return False
        tail = prompt_token_ids[-REASONING_TAIL_TOKENS:]
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        return text.rstrip().endswith(reasoning.begin)

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
