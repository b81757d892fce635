"""Print docs/parameters.md: `python -m tests.tools.parameter_table`.

The page is made of the structs that decode the bodies, so it has every parameter and its bounds. A
test compares it with the file, and another sends each parameter.
"""

from collections.abc import Iterator, Mapping
from functools import cache

import msgspec
from msgspec import inspect

from api_proc.anthropic.bodies import MessagesBody, PromptBody
from api_proc.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from api_proc.responses.body import ResponsesBody
from api_proc.unknown_fields import FOREIGN, WITHOUT_EFFECT

STRUCTS: Mapping[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": PromptBody,
    "/v1/responses": ResponsesBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ONLY = {
    "background": "only false",
    "modalities": 'only `["text"]`',
}
"""Fields of which one value is accepted, because it is the server's default."""
ACCEPTED = dict.fromkeys(
    ("cache_control", "context_management", "service_tier"), "accepted without effect"
) | {"speed": 'only `"standard"`'}

_HEAD = """\
# Parameters

This page lists every parameter of a request body; [api.md](api.md) lists the routes. It is
generated from the structs that decode the bodies: `python -m tests.tools.parameter_table`.

`null` always means the default. The answer is 400, with the parameter's name in `error.param`, for

- a known parameter with a wrong type or value;
- a *refused* parameter, whose feature this server lacks;
- other servers' names of parameters that constrain the output.

`--unknown-fields` decides on all other names: `warn` (the default) names them in the header
`x-unknown-fields` of the response and once in the log, `ignore` does neither, and `refuse` answers
with 400. It also decides on unknown names in objects of a body, of which only the first is named,
such as `stream_options.x` or `tools[0].function.x`. Names within messages and items of an input
are ignored.
"""
_NOTES = """\
## Notes

- `allowed_token_ids` are the only tokens that may be sampled. `bad_words` never occur in the
  output: as written, or after a space; both forms have at most 4,096 tokens in total.
  `logprob_token_ids` are the candidates whose log-probabilities are returned, instead of the most
  likely ones; they need `logprobs`.
- `timeout` is in seconds. When it is over, the request ends with the code `deadline_exceeded`: the
  status 504, or an error event in a stream. With `--journal-dir`, a lost connection and a restart
  of the API do not change it.
- `stream_interval` is the number of tokens in one event of a stream; the first token is sent at
  once.
- `best_of` sequences are generated for each prompt, and the `n` with the highest mean
  log-probability are returned, best first; `usage` counts all of them. It cannot be streamed.
- `use_beam_search` searches with `n` beams, at most 10, and returns all of them, best first. A beam
  is compared by the sum of its log-probabilities divided by its length to the power of
  `length_penalty` (1). `early_stopping` ends the search at `n` beams that have ended; else it goes
  on until no beam can get better. Log-probabilities are those of the model: parameters that change
  what is sampled, confine the answer or end it at a text are refused with it, as is `stream`.
- `max_tokens` may be 0 in `/v1/completions` with `echo`: the answer is the prompt, with the
  log-probabilities that are asked for. One token is computed nevertheless, which no answer, `usage`
  or access log contains: the prompt must be shorter than the context. `min_tokens` must be 0.
- `repetition_detection` ends an output whose last tokens are `min_count` times the same pattern, of
  `min_pattern_size` (1) to `max_pattern_size` tokens. Its `finish_reason` is "repetition", and its
  `stop_reason` "repetition_detected". `max_pattern_size` may be 64, and its product with
  `min_count` 1,024.
- `thinking_token_budget` ends reasoning after this number of tokens: the end marker of the model's
  format is forced. -1: no bound ([tools.md](tools.md#reasoning)).
- `return_progress` adds events with `prompt_progress` to a stream, before the first text: `total`
  tokens of the prompt, those that the `cache` held, those `processed` so far, cache included, and
  `time_ms` since the request arrived. The prompts of a body report them one by one.
- `parse_special: false` keeps special tokens in a prompt's text. In chats, special tokens count
  only where the chat template writes them.
- `/v1/messages` refuses the names of chats that it lacks, such as `seed` and `stop`. Its own fields
  are described in [messages.md](messages.md).
- OpenAI's `verbosity` of chats is unknown here, as in vLLM. In `/v1/responses` a `text.verbosity`
  other than `medium` is refused.
- In `/v1/responses` a parameter that only another route has is refused, because it would constrain
  the output there ([responses.md](responses.md)).
- A body may have at most 65,536 names and values, besides arrays of token ids, in at most 128
  levels.
"""


def is_refused(field: inspect.Field) -> bool:
    """Whether a field stands for a feature that is missing."""
    kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
    return any(isinstance(kind, inspect.RawType) for kind in kinds)


@cache
def fields_of(struct: type[msgspec.Struct]) -> dict[str, inspect.Field]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: field for field in info.fields}


def describe(kind: inspect.Type) -> str:
    """Return the values of a type in words."""
    if isinstance(kind, inspect.Metadata):
        return describe(kind.type)
    if isinstance(kind, inspect.UnionType):
        parts = [describe(item) for item in kind.types if not isinstance(item, inspect.NoneType)]
        return " or ".join(dict.fromkeys(parts))
    if isinstance(kind, inspect.BoolType):
        return "true, false"
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = "integer" if isinstance(kind, inspect.IntType) else "number"
        low = kind.ge if kind.ge is not None else kind.gt
        high = kind.le if kind.le is not None else None
        if high is None and kind.lt is not None:
            high = kind.lt - 1 if isinstance(kind, inspect.IntType) else kind.lt
        if low is None:
            return name
        if high is None:
            return f"{name}, at least {low:,}"
        return f"{name} {'above ' if kind.gt is not None else ''}{low:,} to {high:,}"
    if isinstance(kind, inspect.StrType):
        return "text" + _size(kind.max_length, "characters")
    if isinstance(kind, inspect.ListType):
        return f"list{_size(kind.max_length, 'items')} of {describe(kind.item_type)}"
    if isinstance(kind, inspect.DictType):
        return f"object{_size(kind.max_length, 'names')}"
    if isinstance(kind, inspect.LiteralType):
        return ", ".join(f"`{value}`" for value in kind.values)
    return "any" if isinstance(kind, inspect.AnyType) else "object"


def _size(maximum: int | None, unit: str) -> str:
    return "" if maximum is None else f" of up to {maximum:,} {unit}"


def support(name: str, field: inspect.Field | None) -> str:
    """Return what one route does with a parameter."""
    if field is None:
        return ""
    return "refused" if is_refused(field) else (ONLY | ACCEPTED).get(name, "honoured")


def page() -> Iterator[str]:
    yield from _HEAD.splitlines()
    tables = {path: fields_of(struct) for path, struct in STRUCTS.items()}
    names = sorted({name for fields in tables.values() for name in fields})
    yield ""
    yield f"| parameter | values | {' | '.join(f'`{path}`' for path in STRUCTS)} |"
    yield "|---|---|" + "---|" * len(STRUCTS)
    for name in names:
        found = [fields.get(name) for fields in tables.values()]
        known = [field for field in found if field is not None]
        values = dict.fromkeys(describe(field.type) for field in known if not is_refused(field))
        cells = [f"`{name}`", "; ".join(values), *(support(name, field) for field in found)]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## Other servers' names"
    yield ""
    yield "Refused by the routes that generate text, unless the route has a parameter of this name:"
    yield ""
    foreign = sorted(name for name in FOREIGN if not all(name in tables[p] for p in GENERATING))
    yield ", ".join(f"`{name}`" for name in foreign) + "."
    yield ""
    yield "Accepted without effect, as they concern OpenAI's own service:"
    yield ""
    yield ", ".join(f"`{name}`" for name in sorted(WITHOUT_EFFECT)) + "."
    yield ""
    yield from _NOTES.splitlines()


if __name__ == "__main__":
    print("\n".join(page()))
