"""Conversations as token ids, rendered by the chat template that the engine uses."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from api_proc.text.chat_template import ChatTemplate
from tests.tools.demo_chat.conversations import Conversation, Message

EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "</tools>")
# The frame of a tool's definition and of a call, each text a token of its own.
FRAMES = (
    *('{"name": "', '", "description": "', '"}}, "required": ["', '}}, "required": ["', '"]}}'),
    '", "parameters": {"type": "object", "properties": {"',
    *(f'": {{"type": "{kind}"' for kind in ("string", "integer", "number", "boolean")),
    '": {"type": "array", "items": {"type": "string"}',
    *(', "description": "', ', "enum": ["', '"}, "', '}, "', '", "arguments": {"'),
    *('", "arguments": {}', '": "', '", "', '": ', '"}', '"}}', '"]'),
)
# Words never include the space before them: a value has the same tokens in a question and in JSON,
# so that the model can copy it token by token.
PIECES = r"\n| {2,}| ?[^\s\p{L}\p{N}_]+|\p{L}+|_|\p{N}|\s"


class Sample(NamedTuple):
    ids: list[int]
    is_learnt: list[bool]
    """For each id, whether the model must predict it."""


def chat_tokenizer(base: Path) -> Tokenizer:
    """Return a tokenizer with the vocabulary of a base model, further tokens and other pieces."""
    content = json.loads(base.read_text(encoding="utf-8"))
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": PIECES}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([START, END, *MARKERS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in FRAMES])
    return tokenizer


class Piece(NamedTuple):
    text: str
    is_learnt: bool
    """Whether the model writes it."""
    num_given: int = 0
    """Tokens at its start that the model does not learn all the same."""


_EARLIER = re.compile(f"(?<={re.escape(START)}assistant\n)(.*?{re.escape(END)})", re.DOTALL)


class SampleMaker:
    """Renders conversations and cuts them into what is given and what is learnt."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer | None = None) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def pieces(self, conversation: Conversation) -> list[Piece]:
        """Return the text of a conversation, exactly as the engine renders prompts.

        Earlier messages of the assistant stand there without reasoning. Their first token is not
        learnt, because an answer begins with its reasoning.
        """
        messages = conversation.messages
        last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
        places = [i for i in range(last_user, len(messages)) if messages[i]["role"] == "assistant"]
        turns = [self._turn(conversation, place) for place in places]
        for earlier, later in itertools.pairwise(turns):
            if not later[0].startswith("".join(earlier)):
                turns = turns[-1:]
                break
        result: list[Piece] = []
        done = ""
        for prompt, answer in turns:
            for number, text in enumerate(_EARLIER.split(prompt[len(done) :])):
                result.append(Piece(text, number % 2 == 1, 1))
            result.append(Piece(answer, True))
            done = prompt + answer
        return [piece for piece in result if piece.text]

    def sample(self, conversation: Conversation) -> Sample:
        assert self._tokenizer is not None
        ids: list[int] = []
        is_learnt: list[bool] = []
        pieces = self.pieces(conversation)
        texts = [piece.text for piece in pieces]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for piece, encoding in zip(pieces, encoded, strict=True):
            ids += encoding.ids
            places = range(len(encoding.ids))
            is_learnt += [piece.is_learnt and place >= piece.num_given for place in places]
        return Sample(ids, is_learnt)

    def _turn(self, conversation: Conversation, place: int) -> tuple[str, str]:
        """Return the prompt before an assistant's message, and the message with its end."""
        before = conversation.messages[:place]
        if not conversation.keeps_reasoning:
            before = [_without_reasoning(message) for message in before]
        message = conversation.messages[place]
        whole = self._render([*before, message], conversation, is_prompt=False)
        opened = self._render(before, conversation, is_prompt=True)
        answer = whole.removeprefix(opened)
        assert answer != whole
        assert answer.endswith(END + "\n")
        prompt = opened
        if not conversation.is_thinking:
            prompt = self._render(before, conversation, is_prompt=True, enable_thinking=False)
        return prompt, answer.removesuffix("\n")

    def _render(
        self,
        messages: Sequence[Message],
        conversation: Conversation,
        *,
        is_prompt: bool,
        **variables: Any,
    ) -> str:
        return self._template.render(
            list(messages),
            tools=conversation.tools,
            add_generation_prompt=is_prompt,
            extra=variables,
        )


def _without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}
