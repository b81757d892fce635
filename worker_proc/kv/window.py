"""The positions that a token attends to in layers with a sliding window."""


def first_visible(window: int | None, position: int) -> int:
    """Return the first position that a token at `position` attends to."""
    return 0 if window is None else max(position - window + 1, 0)
