"""Model types whose code transformers has under the name of another type."""

_SAME_CODE = {"kimi_k2": "deepseek_v3"}
"""Such checkpoints contain a copy of the other type's code, which is not executed here."""


def computed_type(model_type: str) -> str:
    """Return the model type whose code in transformers computes a type; usually the type itself."""
    return _SAME_CODE.get(model_type, model_type)
