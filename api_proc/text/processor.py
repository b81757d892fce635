"""Turns prompts into token ids: short texts in place, longer ones in a thread or in a process.

Texts longer than `INLINE_CHARS` are processed in a single thread, and those longer than
`THREAD_CHARS` in the pool, whose processes are killed if they exceed their limits. The pool also
processes every chat whose template is not simple (`api_proc.text.template_meter`), or needs more
steps than a rendering in this process is allowed.
"""

import asyncio
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from api_proc.chat.families import find_dialect
from api_proc.chat.formats import Dialect
from api_proc.errors import ApiError, invalid, unavailable
from api_proc.fairness.fair_gate import FairGate
from api_proc.fairness.waiting import current_client
from api_proc.text.chat_template import ChatTemplate, ChatTemplateError
from api_proc.text.checkpoint import SamplingDefaults, chat_templates, read_json, sampling_defaults
from api_proc.text.final_message import render_open
from api_proc.text.jobs import (
    Chat,
    Decode,
    Encode,
    EncodeChat,
    EncodePairs,
    Job,
    Pieces,
    Render,
    Result,
    TextLimitReached,
    TextPoolUnavailable,
    TokenIdLists,
)
from api_proc.text.literal import LiteralText
from api_proc.text.pool import TextPool, too_many_long_texts
from api_proc.text.template_meter import MAX_STEPS, TooManySteps
from api_proc.text.tokenizer import (
    ByteTokenizer,
    EncodeOptions,
    HfTokenizer,
    TextTokenizer,
    TooManyTokens,
)
from protocol.api_core import ErrorCode
from protocol.config import ModelConfig
from protocol.process.model_files import NULL_MODEL

INLINE_CHARS = 2048
"""Texts up to this length take less than a millisecond, about as long as a thread hand-over."""
THREAD_CHARS = 2**14
"""Longer texts go to the pool."""
MAX_LONG_TEXTS = 64
"""Maximum number of texts of one client that wait for the thread, or for the pool."""
_NICENESS = 5
_SLICE_IDS = 2**15
_ID_CHARS = 2
"""Number of characters that take as long to encode as one id takes to decode."""

REASONING_TAIL_TOKENS = 32
"""Number of tokens at the end of a prompt that contain the marker if the prompt begins or ends
reasoning."""
_NULL_CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>\n"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


class TextProcessor:
    """Tokenizer, chat template and sampling defaults of one model."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate | None = None,
        defaults: SamplingDefaults | None = None,
        tokenizer_config: dict[str, object] | None = None,
        dialect: Dialect | None = None,
        *,
        template_defaults: dict[str, Any] | None = None,
        pool: TextPool | None = None,
    ) -> None:
        """Without a pool, all work is done in this process and without limits."""
        self.tokenizer = tokenizer
        self.template = template
        self.template_with_tools = template
        self._template_defaults = template_defaults or {}
        """Variables of the template that a request may set to other values."""
        self.defaults = defaults or SamplingDefaults()
        self.tokenizer_config = tokenizer_config or {}
        self.dialect = dialect or Dialect()
        """The model's format for reasoning and tool calls."""
        self._pool = pool
        self._thread = FairGate()
        self._num_waiting: Counter[str] = Counter()
        """Texts of each client that wait for the thread, or are processed there."""
        self._executor = ThreadPoolExecutor(1, "tokenize", initializer=_lower_priority)

    @classmethod
    def load(cls, model: ModelConfig, pool_size: int = 0) -> "TextProcessor":
        """Read the files of a checkpoint; the model "null" has none."""
        pool = TextPool(model, pool_size, MAX_LONG_TEXTS) if pool_size else None
        names = model.tool_call_parser, model.reasoning_parser
        variables = model.default_chat_template_kwargs
        defaults = sampling_defaults(model)
        if model.model == NULL_MODEL and model.tokenizer is None:
            dialect = find_dialect(_NULL_CHAT_TEMPLATE, *names)
            plain = ChatTemplate(_NULL_CHAT_TEMPLATE, {})
            return cls(
                ByteTokenizer(),
                plain,
                defaults,
                dialect=dialect,
                template_defaults=variables,
                pool=pool,
            )
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
        processor = cls(
            tokenizer, template, defaults, config, dialect, template_defaults=variables, pool=pool
        )
        processor.template_with_tools = with_tools or template
        return processor

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    async def encode(
        self, texts: list[str], options: EncodeOptions, *, param: str, is_literal: bool = False
    ) -> list[list[int]]:
        """Return the ids of several texts; `param` is the field to name in errors.

        Special tokens in a `LiteralText`, or in all texts if `is_literal`, stay text.
        """
        try:
            self._check_length(max(map(len, texts), default=0), options)
        except TooManyTokens as error:
            raise _too_long(error, options, param) from error
        pieces = [text.pieces if isinstance(text, LiteralText) else [text] for text in texts]
        job = Encode(pieces, options, is_literal)
        return await self._token_ids(job, sum(map(len, texts)), options, param)

    async def encode_pairs(
        self, pairs: list[tuple[str, str]], options: EncodeOptions, *, param: str
    ) -> list[tuple[list[int], int]]:
        """Return the ids of each text pair, and where its tokens of type 1 begin, or 0."""
        num_chars = [len(first) + len(second) for first, second in pairs]
        try:
            self._check_length(max(num_chars, default=0), options)
        except TooManyTokens as error:
            raise _too_long(error, options, param) from error
        job = EncodePairs(pairs, options)
        lists = await self._token_ids(job, sum(num_chars), options, param)
        starts = (start for [start] in lists[1::2])
        return list(zip(lists[::2], starts, strict=True))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        options: EncodeOptions,
        *,
        add_generation_prompt: bool,
        extra: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        param: str = "messages",
    ) -> list[int]:
        """Return the ids of a chat's prompt, like `render` followed by `encode`."""
        variables = self._template_defaults | (extra or {})
        chat = Chat(messages, add_generation_prompt, variables, tools, continue_final_message)
        self._require_template(chat)
        job = EncodeChat(chat, options)
        body = _encoded(job)
        [ids] = await self._token_ids(job, len(body), options, param, body)
        return ids

    async def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        extra: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """Return the prompt of a chat as a `LiteralText`: special tokens in it stay text.

        It may end within the final message.
        """
        variables = self._template_defaults | (extra or {})
        chat = Chat(messages, add_generation_prompt, variables, tools, continue_final_message)
        self._require_template(chat)
        body = _encoded(job := Render(chat))
        result = await self._run(job, len(body), "messages", body)
        assert isinstance(result, Pieces)
        return LiteralText.from_pieces(result.pieces)

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of ids, including special tokens."""
        body = await _encoded_in_slices(token_ids) if len(token_ids) > _SLICE_IDS else None
        result = await self._run(Decode(token_ids), _ID_CHARS * len(token_ids), "tokens", body)
        assert isinstance(result, Pieces)
        return "".join(result.pieces)

    def perform(self, job: Job, max_steps: int | None = None) -> Result:
        """Do a job in this thread; TooManySteps: its template needs more than `max_steps`."""
        match job:
            case Render(chat):
                return Pieces(self._rendered(chat, max_steps).pieces)
            case EncodeChat(chat, options):
                text = self._rendered(chat, max_steps)
                self._check_length(len(text), options)
                return TokenIdLists([self.tokenizer.encode(text, options)])
            case Encode(texts, options, is_literal):
                make = self._literal if is_literal else LiteralText.from_pieces
                return TokenIdLists([self.tokenizer.encode(make(p), options) for p in texts])
            case EncodePairs(pairs, options):
                lists: list[list[int]] = []
                for first, second in pairs:
                    ids, second_text_start = self.tokenizer.encode_pair(first, second, options)
                    lists += [ids, [second_text_start]]
                return TokenIdLists(lists)
            case Decode(token_ids):
                return Pieces([self.tokenizer.decode(token_ids, skip_special_tokens=False)])

    def _check_length(self, num_chars: int, options: EncodeOptions) -> None:
        """Raise TooManyTokens for a text that is too long however it is split."""
        num_tokens_min = -(-num_chars // self.tokenizer.longest_token_chars)
        if options.keep_last is None and num_tokens_min > options.max_tokens:
            raise TooManyTokens(num_tokens_min)

    def _literal(self, pieces: list[str]) -> LiteralText:
        return self.tokenizer.special.literal("".join(pieces))

    def _rendered(self, chat: Chat, max_steps: int | None) -> LiteralText:
        template = self._template_for(chat)
        assert template is not None
        mark = self.tokenizer.special.mark
        render = partial(
            template.render,
            add_generation_prompt=chat.add_generation_prompt,
            extra=mark(chat.extra),
            tools=mark(chat.tools),
            max_steps=max_steps,
        )
        if chat.continue_final_message:
            render = partial(render_open, render=render)
        return LiteralText.from_marked(render(mark(chat.messages)))

    def _template_for(self, chat: Chat) -> ChatTemplate | None:
        return self.template_with_tools if chat.tools else self.template

    def _require_template(self, chat: Chat) -> None:
        if self._template_for(chat) is None:
            message = "the model has no chat template; set one with --chat-template"
            raise invalid("messages", message, "no_chat_template")

    def is_reasoning_open(self, prompt_token_ids: list[int]) -> bool:
        """Return whether a prompt ends with the start of the model's reasoning."""
        reasoning = self.dialect.reasoning
        return reasoning is not None and self._ends_with(prompt_token_ids, reasoning.begin)

    def is_reasoning_over(self, prompt_token_ids: list[int]) -> bool:
        """Return whether a prompt ends with the end of reasoning, for example if that is off."""
        reasoning = self.dialect.reasoning
        return reasoning is not None and self._ends_with(prompt_token_ids, reasoning.end)

    def _ends_with(self, prompt_token_ids: list[int], marker: str) -> bool:
        tail = prompt_token_ids[-REASONING_TAIL_TOKENS:]
        text = self.tokenizer.decode(tail, skip_special_tokens=False)
        return text.rstrip().endswith(marker.strip())

    async def _token_ids(
        self,
        job: Job,
        num_chars: int,
        options: EncodeOptions,
        param: str,
        body: bytes | None = None,
    ) -> list[list[int]]:
        try:
            result = await self._run(job, num_chars, param, body)
        except TooManyTokens as error:
            raise _too_long(error, options, param) from error
        assert isinstance(result, TokenIdLists)
        return result.lists

    async def _run(self, job: Job, num_chars: int, param: str, body: bytes | None = None) -> Result:
        """Do a job in the appropriate place; `body` is the job as JSON, if known."""
        try:
            if self._pool is None:
                return await self._run_here(job, num_chars, None)
            if num_chars <= THREAD_CHARS and self._is_limited(job):
                try:
                    return await self._run_here(job, num_chars, MAX_STEPS)
                except TooManySteps:
                    pass
            return await self._pool.run(body or _encoded(job))
        except ChatTemplateError as error:
            raise invalid(param, str(error), "chat_template_error") from error
        except TextLimitReached as error:
            raise invalid(param, str(error), "text_limit") from error
        except TextPoolUnavailable as error:
            raise unavailable(str(error), "tokenizer_unavailable") from error

    def _is_limited(self, job: Job) -> bool:
        """Return whether a job with a short text is sure to end soon."""
        if not isinstance(job, Render | EncodeChat):
            return True
        template = self._template_for(job.chat)
        return template is not None and template.is_simple

    async def _run_here(self, job: Job, num_chars: int, max_steps: int | None) -> Result:
        if num_chars <= INLINE_CHARS:
            return self.perform(job, max_steps)
        client = current_client.get()
        if self._num_waiting[client] >= MAX_LONG_TEXTS:
            raise too_many_long_texts(MAX_LONG_TEXTS)
        self._num_waiting[client] += 1
        try:
            async with self._thread.inside():
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._executor, self.perform, job, max_steps)
        finally:
            self._num_waiting[client] -= 1
            if not self._num_waiting[client]:
                del self._num_waiting[client]


def _encoded(job: Job) -> bytes:
    """Return a job as JSON; jobs of a Python program may contain other objects."""
    return msgspec.json.encode(job, enc_hook=str)


async def _encoded_in_slices(token_ids: list[int]) -> bytes:
    """Return the job `Decode` as JSON, letting other tasks run in between."""
    parts: list[bytes] = []
    for start in range(0, len(token_ids), _SLICE_IDS):
        parts.append(msgspec.json.encode(token_ids[start : start + _SLICE_IDS])[1:-1])
        await asyncio.sleep(0)
    return b'{"type":"Decode","token_ids":[%b]}' % b",".join(parts)


def too_long(num_tokens: int, max_tokens: int, param: str, *, num_outputs: int = 1) -> ApiError:
    output = " and at least one output token" if num_outputs else ""
    return invalid(
        param,
        f"the prompt has at least {num_tokens} tokens; the model's context of"
        f" {max_tokens + num_outputs} tokens must hold it{output}",
        ErrorCode.TOO_LONG,
    )


def _too_long(error: TooManyTokens, options: EncodeOptions, param: str) -> ApiError:
    return too_long(error.num_tokens, options.max_tokens, param, num_outputs=options.num_outputs)


def _lower_priority() -> None:
    """Give running streams precedence over long prompts on a busy machine."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
