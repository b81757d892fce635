"""How processes that must not pause use Python's garbage collector."""

import gc

_YOUNG_OBJECTS = 50_000
"""Reference counts free nearly all that a step makes; the collector is for cycles, which are rare.
At the default of 700 it would look through the lists of a large step again and again."""


def settle() -> None:
    """Call when all that stays is there: it is not looked at any more, and the rest seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
