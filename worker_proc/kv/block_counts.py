"""Numbers of blocks that need no memory."""

UNLIMITED_BLOCKS = 2**30
"""Of a stage that has none of the layers that use them: there they take no memory, and the other
stages decide how many there are."""
