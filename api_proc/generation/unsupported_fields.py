"""Fields of features that this server lacks.

They are listed in the bodies, so that a request for such a feature fails instead of getting a
different answer without notice.
"""

import msgspec
from msgspec import Raw, UnsetType

from api_proc.errors import unsupported

Unsupported = Raw | UnsetType
_INSTEAD = {
    "chat_template": "the setting --chat-template names a file with one",
    "conversation": "use previous_response_id",
    "documents": "write them into a message",
    "function_call": "use tool_choice, and tool_calls in a message",
    "functions": "use tools",
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "previous_input_messages": "write them into input",
    "prompt": "write its text into instructions and input",
    "suffix": "write the model's own markers for a gap into prompt",
}
"""What to use instead of fields that are not supported."""
_NO_EFFECT = frozenset({b"null", b"[]", b'""', b"false", b'"none"', b'"auto"'})


def reject_unsupported(struct: msgspec.Struct, prefix: str) -> None:
    """Raise a 400 for the first unsupported field that has an effect.

    `prefix` is written before the field's name.
    """
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, Raw) and bytes(value).strip() not in _NO_EFFECT:
            hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise unsupported(prefix + name, f"is not supported{hint}")
