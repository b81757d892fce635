"""What a fuzz run reports."""


class Fault(Exception):
    """An input has done harm; the text has the input, and how to send it again."""
