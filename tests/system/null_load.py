"""Open streams of token ids over HTTP, recorded with their times, for tests that kill processes."""

import http.client
import json
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from scripts.testing import Engine, eventually
from worker_proc.null.model import next_token_id
from worker_proc.startup.start import NULL_EOS_TOKEN_ID, NULL_VOCAB_SIZE

TIMEOUT_S = 60.0
NUM_STREAMS = 8
NUM_TOKENS = 300


class Stream:
    """One streamed completion, read by its own thread."""

    def __init__(self, url: str, **body: Any) -> None:
        self._url = urlsplit(url)
        self._body = {"stream": True, "ignore_eos": True, "return_token_ids": True, **body}
        self.token_ids: list[int] = []
        self.times: list[float] = []
        """Monotonic arrival time of each chunk."""
        self.error: str | None = None
        self.finish_reason: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            connection = http.client.HTTPConnection(
                str(self._url.hostname), self._url.port, timeout=TIMEOUT_S
            )
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            response = connection.getresponse()
            if response.status != 200:
                self.error = f"{response.status}: {response.read().decode()}"
                connection.close()
                return
            while line := response.readline():
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))
            connection.close()
        except (OSError, http.client.HTTPException) as error:
            self.error = repr(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        for choice in event["choices"]:
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.times.append(time.monotonic())

    def join(self) -> "Stream":
        """Wait for the end."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), f"stream stalls after {len(self.token_ids)} tokens"
        return self

    @property
    def is_open(self) -> bool:
        """Whether the stream may still receive chunks."""
        return self._thread.is_alive()

    def longest_gap_s(self, begin: float, end: float) -> float:
        """Return the longest time between a chunk before `end` and the next one, after `begin`."""
        gaps = [b - a for a, b in pairwise(self.times) if b >= begin and a <= end]
        return max(gaps, default=0.0)


def null_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the output of the null model for a prompt."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token_id(ids, NULL_VOCAB_SIZE, [NULL_EOS_TOKEN_ID]))
    return ids[len(prompt) :]


class NullLoad:
    """Streams of the null model, each with a different prompt."""

    def __init__(
        self, url: str, num_streams: int, num_tokens: int, *, suffix: Sequence[int] = (6, 7)
    ) -> None:
        """Start streams of `num_tokens` tokens, whose prompts end with the same `suffix`."""
        self._num_tokens = num_tokens
        self._prompts = [[5 + n, *suffix] for n in range(num_streams)]
        self.streams = [
            Stream(url, model="null", prompt=prompt, max_tokens=num_tokens)
            for prompt in self._prompts
        ]

    def read(self, num_tokens: int) -> "NullLoad":
        """Wait until every stream has this number of tokens."""
        eventually(
            lambda: all(len(stream.token_ids) >= num_tokens for stream in self.streams),
            f"every stream has {num_tokens} tokens",
        )
        return self

    def check(self) -> None:
        """Wait for the ends and assert that every token is right."""
        for prompt, stream in zip(self._prompts, self.streams, strict=True):
            stream.join()
            assert stream.error is None, stream.error
            assert stream.token_ids == null_tokens(prompt, self._num_tokens)
            assert stream.finish_reason == "length"


def loaded(
    engine: Engine, num_tokens: int = NUM_TOKENS, num_streams: int = NUM_STREAMS
) -> NullLoad:
    """Start streams and wait until they run."""
    return NullLoad(engine.url(), num_streams, num_tokens).read(1)
