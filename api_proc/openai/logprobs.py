"""Log-probabilities in the formats of both routes. JSON has no infinity: -9999 is the lowest."""

from collections.abc import Callable, Iterator
from functools import partial

from api_proc.openai import objects
from api_proc.openai.encoded_list import EncodedList, EncodedLists
from api_proc.text.tokenizer import TextTokenizer
from protocol.core_worker import TokenLogprobs

LOWEST = -9999.0
_SLICE = 1024
"""Items of a list of texts or numbers that are encoded at a time."""


def clamp(logprob: float) -> float:
    """Replace -inf and NaN with the lowest value."""
    return logprob if logprob > LOWEST else LOWEST


def candidates(entry: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    """Yield the ids and values of the most likely tokens, best first."""
    yield from zip(entry.top_ids[:num_top], map(clamp, entry.top_logprobs), strict=False)


def token_text(tokenizer: TextTokenizer, token_id: int) -> str:
    """Return the text of one token; bytes of an incomplete character become U+FFFD."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def token_text_of(tokenizer: TextTokenizer, *, as_ids: bool | None) -> Callable[[int], str]:
    """Return what names a token in logprobs: its text, or `token_id:ID`, which is unique."""
    if as_ids:
        return "token_id:{}".format
    return partial(token_text, tokenizer)


def completion_logprobs(
    text_of: Callable[[int], str],
    token_ids: list[int],
    entries: list[TokenLogprobs | None],
    offsets: list[int],
    num_top: int,
    *,
    lists: EncodedLists,
) -> objects.CompletionLogprobs:
    """Return the lists for consecutive tokens; each token is among its candidates.

    The entry of a token without a logprob, such as the first of a prompt, is None. `lists` are
    those of the response.
    """
    tokens, logprobs, all_offsets = (EncodedList(lists, _SLICE) for _ in range(3))
    candidates_of = EncodedList(lists)
    for token_id, entry, offset in zip(token_ids, entries, offsets, strict=True):
        text = text_of(token_id)
        tokens.append(text)
        all_offsets.append(offset)
        if entry is None:
            logprobs.append(None)
            candidates_of.append(None)
            continue
        logprob = clamp(entry.logprob)
        top: dict[str, float] = {}
        for candidate, value in candidates(entry, num_top):
            top.setdefault(text_of(candidate), value)
        top.setdefault(text, logprob)
        logprobs.append(logprob)
        candidates_of.append(top)
    return objects.CompletionLogprobs(
        all_offsets.json(), logprobs.json(), tokens.json(), candidates_of.json()
    )


def chat_logprobs(
    tokenizer: TextTokenizer,
    entries: list[TokenLogprobs],
    num_top: int,
    lists: EncodedLists,
    text_of: Callable[[int], str] | None = None,
) -> objects.ChatLogprobs:
    """Return the items for consecutive tokens, each with exactly `num_top` candidates.

    `lists` are those of the response.
    """
    content = EncodedList(lists)
    for item in chat_items(tokenizer, entries, num_top, text_of):
        content.append(item)
    return objects.ChatLogprobs(content.json())


def chat_items(
    tokenizer: TextTokenizer,
    entries: list[TokenLogprobs],
    num_top: int,
    text_of: Callable[[int], str] | None = None,
) -> Iterator[objects.ChatTokenLogprob]:
    """Yield the items of `chat_logprobs`."""
    text_of = text_of or token_text_of(tokenizer, as_ids=False)
    for entry in entries:
        data = tokenizer.token_bytes(entry.token_id)
        top = [
            objects.ChatTopLogprob(text_of(i), value, list(tokenizer.token_bytes(i)))
            for i, value in candidates(entry, num_top)
        ]
        text = text_of(entry.token_id)
        yield objects.ChatTokenLogprob(text, clamp(entry.logprob), list(data), top)


def prompt_logprobs(
    tokenizer: TextTokenizer,
    entries: list[TokenLogprobs | None],
    num_top: int,
    lists: EncodedLists,
) -> objects.PromptLogprobList:
    """Return a mapping by token id for each position of the prompt; None for the first.

    `lists` are those of the response.
    """
    result = EncodedList(lists)
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        row = {
            str(token_id): objects.PromptLogprob(value, rank, token_text(tokenizer, token_id))
            for rank, (token_id, value) in enumerate(candidates(entry, num_top), start=1)
        }
        row.setdefault(
            str(entry.token_id),
            objects.PromptLogprob(
                clamp(entry.logprob), entry.rank, token_text(tokenizer, entry.token_id)
            ),
        )
        result.append(row)
    return result.json()


def prompt_offsets(tokenizer: TextTokenizer, token_ids: list[int], shown: str) -> list[int]:
    """Return the number of characters of a prompt's text before each of its tokens.

    `shown` is the text if it may have special tokens, else empty. It lacks those that the
    tokenizer has added.
    """
    plain = tokenizer.detokenizer([], skip_special_tokens=True)
    special = tokenizer.detokenizer([], skip_special_tokens=False)
    offsets, num_chars = [], 0
    for token_id in token_ids:
        offsets.append(num_chars)
        piece, whole = plain.push([token_id]), special.push([token_id])
        is_shown = piece != whole and shown.startswith(whole, num_chars)
        num_chars += len(whole if is_shown else piece)
    return offsets
