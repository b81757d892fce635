"""Settings of the garbage collector for processes that must not pause."""

import gc

_YOUNG_OBJECTS = 50_000
"""Threshold of the collector. Reference counts free nearly all objects of a step, and cycles are
rare; at the default of 700 the collector would traverse the lists of a large step many times."""


def freeze() -> None:
    """Exempt all present objects from collection, and collect rarely from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
