"""Conversations: each turn's prompt is that of the turn before, its answer, and a new question.

Groups of conversations share a system prompt. Between an answer and the next question a person
reads and writes for some time. All prompts follow from the seed and from the model's answers.
"""

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from protocol.client import ReplicatedClient
from protocol.sampling import SamplingParams
from scripts.bench.client import BenchError

SYSTEM_TOKENS = 1024
QUESTION_TOKENS = (32, 160)
ANSWER_TOKENS = (16, 48)


class Turn(NamedTuple):
    """One question and the answer's length, after a pause."""

    pause_s: float
    question: list[int]
    num_tokens: int


class Conversation(NamedTuple):
    """A system prompt and the turns after it."""

    system: list[int]
    turns: list[Turn]

    @property
    def num_own_tokens(self) -> int:
        """Tokens at the end, without those of the system prompt."""
        return sum(len(turn.question) + turn.num_tokens for turn in self.turns)


class Reply(NamedTuple):
    """What a turn gave."""

    replica: int
    """Where it began."""
    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens + self.num_output_tokens


def make(
    random: Random,
    ids: range,
    *,
    count: int,
    num_turns: int,
    num_systems: int,
    begin_s: float,
    pause_s: float,
) -> list[Conversation]:
    """Draw conversations.

    Args:
        random: the source of everything that is drawn.
        ids: of prompts.
        count: how many there are.
        num_turns: of each.
        num_systems: system prompts, one for several conversations.
        begin_s: the first questions come within this time.
        pause_s: the mean time between an answer and the next question.
    """

    def draw(num_tokens: int) -> list[int]:
        return [random.randrange(ids.start, ids.stop) for _ in range(num_tokens)]

    def turn(number: int) -> Turn:
        before_s = random.expovariate(1 / pause_s) if number else random.uniform(0, begin_s)
        question = draw(random.randint(*QUESTION_TOKENS))
        return Turn(before_s, question, random.randint(*ANSWER_TOKENS))

    systems = [draw(SYSTEM_TOKENS) for _ in range(num_systems)]
    return [
        Conversation(random.choice(systems), [turn(number) for number in range(num_turns)])
        for _ in range(count)
    ]


def num_tokens(conversations: Sequence[Conversation]) -> int:
    """Return the tokens of all conversations at their end; system prompts count once."""
    systems = {tuple(one.system) for one in conversations}
    own = sum(one.num_own_tokens for one in conversations)
    return own + sum(map(len, systems))


async def play(
    client: ReplicatedClient, conversations: Sequence[Conversation], timeout_s: float
) -> list[Reply]:
    """Hold all conversations; BenchError: a turn has failed, or takes too long."""
    replies = await asyncio.gather(*(_hold(client, one, timeout_s) for one in conversations))
    return [reply for each in replies for reply in each]


async def _hold(
    client: ReplicatedClient, conversation: Conversation, timeout_s: float
) -> list[Reply]:
    context, replies = list(conversation.system), []
    for turn in conversation.turns:
        await asyncio.sleep(turn.pause_s)
        context += turn.question
        began, first = time.monotonic(), 0.0
        num_prompt_tokens, num_cached = len(context), 0
        params = SamplingParams(max_tokens=turn.num_tokens, temperature=0.0, ignore_eos=True)
        try:
            async with asyncio.timeout(timeout_s):
                stream = client.submit(context, params)
                replica = _replica_of(client, stream.request_id)
                async for output in stream:
                    first = first or time.monotonic()
                    num_cached = output.num_cached_tokens or num_cached
                    context += output.token_ids
        except TimeoutError as error:
            raise BenchError(f"a turn was not at its end after {timeout_s:g} s") from error
        ttft_s = first - began
        reply = Reply(replica, ttft_s, num_prompt_tokens, num_cached, turn.num_tokens)
        replies.append(reply)
    return replies


def _replica_of(client: ReplicatedClient, request_id: int) -> int:
    open_at = (
        number for number, one in enumerate(client.clients) if one.requests.entry(request_id)
    )
    return next(open_at)
