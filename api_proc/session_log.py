"""What the journal says: which requests were accepted, what they brought, which are over."""

import logging

import msgspec

from api_proc.history import History
from protocol.api_core import AddRequest, RequestOutput
from protocol.message import Decoder, Message, Record, TokenIds

log = logging.getLogger("troika.api")


class Accepted(Message):
    """A request and all its sequences."""

    number: int
    """Names the request in the records that follow; never used again."""
    request_id: str
    path: str
    raw: bytes
    """The body as it came."""
    created: int
    """Seconds since the Unix epoch."""
    adds: list[AddRequest]
    """As they were accepted, one for each sequence; without prompt: it has that of the one before.

    The same prompt `n` times could be more than any journal takes."""


class Row(Record):
    """What one sequence has brought."""

    number: int
    index: int
    output: RequestOutput


class Brought(Message):
    """What came at about the same time."""

    rows: list[Row]


class Cut(Message):
    """A sequence was ended from this side."""

    number: int
    index: int


class Forgotten(Message):
    """A request is over, or nobody has come back for it."""

    number: int


_decode: Decoder[Accepted | Brought | Cut | Forgotten] = Decoder(
    Accepted | Brought | Cut | Forgotten
)


class Remembered:
    """One request as the journal tells it."""

    def __init__(self, accepted: Accepted) -> None:
        self.accepted = accepted
        self.histories = [History(_nobody) for _ in accepted.adds]

    def history(self, index: int) -> History | None:
        """One of its sequences, if it has so many."""
        return self.histories[index] if 0 <= index < len(self.histories) else None


def packed(accepted: Accepted) -> Accepted:
    """Leave out prompts that only repeat the one before."""
    adds: list[AddRequest] = []
    prompt: TokenIds = []
    for add in accepted.adds:
        is_again = add.prompt_token_ids == prompt
        prompt = add.prompt_token_ids
        adds.append(_with_prompt(add, []) if is_again else add)
    return msgspec.structs.replace(accepted, adds=adds)


def unpacked(accepted: Accepted) -> Accepted:
    """Put in again what `packed` has left out."""
    adds: list[AddRequest] = []
    for add in accepted.adds:
        is_again = not add.prompt_token_ids and adds
        adds.append(_with_prompt(add, adds[-1].prompt_token_ids) if is_again else add)
    return msgspec.structs.replace(accepted, adds=adds)


def _with_prompt(add: AddRequest, prompt_token_ids: TokenIds) -> AddRequest:
    return msgspec.structs.replace(add, prompt_token_ids=prompt_token_ids)


class Replay:
    """What the records of a journal come to, one after the other.

    The same record may come twice, in a segment and in the snapshot of the next: outputs are taken
    by index, and what a gap in the journal has lost is left to be computed again.
    """

    def __init__(self) -> None:
        self._found: dict[int, Remembered] = {}

    def take(self, record: bytes) -> None:
        """The next record, in the journal's order; what makes no sense is left out."""
        try:
            self._take(_decode(record))
        except Exception as problem:
            log.warning("a record of the journal makes no sense: %r", problem)

    def _take(self, message: Accepted | Brought | Cut | Forgotten) -> None:
        if isinstance(message, Accepted):
            if message.number not in self._found:
                self._found[message.number] = Remembered(unpacked(message))
        elif isinstance(message, Forgotten):
            self._found.pop(message.number, None)
        elif isinstance(message, Cut):
            history = self._history(message.number, message.index)
            if history is not None:
                history.cut()
        else:
            for row in message.rows:
                history = self._history(row.number, row.index)
                if history is not None:  # also after its end: a snapshot may tell what was before
                    history.enter(row.output)

    def _history(self, number: int, index: int) -> History | None:
        remembered = self._found.get(number)
        return None if remembered is None else remembered.history(index)

    def remembered(self) -> list[Remembered]:
        """The requests that are not over, oldest first."""
        return [self._found[number] for number in sorted(self._found)]


def resumed(add: AddRequest, history: History) -> AddRequest:
    """The request as a core must see it that knows nothing of it."""
    return msgspec.structs.replace(add, output_token_ids=list(history.token_ids))


def _nobody(history: History, output: RequestOutput | None) -> None:
    """Nobody is told while the journal is read."""
