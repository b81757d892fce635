"""The page at /: a chat, and a live view of the engine's processes and load."""
