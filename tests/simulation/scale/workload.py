"""Conversations in virtual time: groups of them share a system prompt, and turns build on turns."""

from array import array
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

NUM_TURNS = 5
SYSTEM_TOKENS = 512
QUESTION_TOKENS = (32, 160)
ANSWER_TOKENS = (16, 48)
PAUSE_S = 5.0
"""Mean time between an answer and the next question."""
CONVERSATIONS_PER_SYSTEM = 200
_ID_BYTES = 4


class Turn(NamedTuple):
    """A question in a conversation, with all turns before it."""

    number: int
    """In its conversation, from 0."""
    prompt: "array[int]"
    num_outputs: int


class Workload:
    """Draws conversations and their turns from a seed."""

    def __init__(self, seed: int, num_conversations: int) -> None:
        self._random = Random(seed)
        num_systems = max(1, num_conversations // CONVERSATIONS_PER_SYSTEM)
        self._systems = [self._ids(SYSTEM_TOKENS) for _ in range(num_systems)]

    def _ids(self, num_tokens: int) -> "array[int]":
        return array("I", self._random.randbytes(_ID_BYTES * num_tokens))

    def first_turn(self) -> Turn:
        """Begin a conversation."""
        return self._turn(0, self._random.choice(self._systems))

    def next_turn(self, turn: Turn, answer: "array[int]") -> Turn | None:
        """Return the question that follows an answer; None: the conversation is over."""
        if turn.number + 1 == NUM_TURNS:
            return None
        return self._turn(turn.number + 1, turn.prompt + answer)

    def _turn(self, number: int, before: "array[int]") -> Turn:
        random = self._random
        question = self._ids(random.randint(*QUESTION_TOKENS))
        return Turn(number, before + question, random.randint(*ANSWER_TOKENS))

    def pause_s(self) -> float:
        return self._random.expovariate(1 / PAUSE_S)

    def beginnings(self, count: int, duration_s: float) -> Iterator[float]:
        """Yield when conversations begin, in order: evenly over the time, with some noise."""
        gap = duration_s / count
        for index in range(count):
            yield (index + self._random.random()) * gap
