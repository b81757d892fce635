"""The journal's records: requests that were accepted, their outputs, and their end.

The tags on disk are older than the class names and must not change.
"""

import logging

import msgspec

from api_proc.resumption.history import History
from protocol.api_core import AddRequest, RequestOutput
from protocol.core_worker import BlocksAddress
from protocol.message import Decoder, Message, Record, TokenIds
from protocol.sampling import SamplingParams
from protocol.shared_params import LargeValues

_NO_VALUES = LargeValues.of(SamplingParams())

log = logging.getLogger("troika.api")


class AcceptRecord(Message, tag="Accepted"):
    """A request with all its sequences."""

    number: int
    """Identifies the request in later records; never used again."""
    request_id: str
    path: str
    raw: bytes
    """The body of the HTTP request."""
    created: int
    """Seconds since the Unix epoch."""
    adds: list[AddRequest]
    """One for each sequence. An empty prompt stands for that of the sequence before: `n` copies of
    a long prompt could exceed the size of a record."""
    deadline: float = 0.0
    """Seconds since the Unix epoch at which it ends with an error; 0: never."""
    secret: str = ""
    """32 random hexadecimal digits, from which ids follow that no other client can guess."""
    repeated: list[int] = []
    """Places of the sequences whose parameters are without `LargeValues`, which are those of the
    sequence before."""


class Row(Record):
    number: int
    index: int
    output: RequestOutput


class OutputRecord(Message, tag="Brought"):
    """Outputs that arrived at about the same time."""

    rows: list[Row]


class StopRecord(Message, tag="Cut"):
    """The API ended a sequence."""

    number: int
    index: int


class BindRecord(Message, tag="Bound"):
    """An engine with another fingerprint computes a sequence from here on."""

    number: int
    index: int
    fingerprint: str
    is_exact: bool


class PlaceRecord(Message, tag="Placed"):
    """The KV blocks of a sequence that was moved are read at this address from here on."""

    number: int
    index: int
    blocks_at: BlocksAddress


class SentRecord(Message, tag="Sent"):
    """An answer was sent completely; it is kept in case its end was lost."""

    number: int


class RemoveRecord(Message, tag="Forgotten"):
    """A request is over, or its client has not come back."""

    number: int


class KeepRecord(Message, tag="Kept"):
    """A value that is kept until it is dropped, for example a stored response."""

    key: str
    value: bytes


class DropRecord(Message, tag="Dropped"):
    """A value is no longer kept."""

    key: str


_AnyRecord = (
    AcceptRecord
    | OutputRecord
    | StopRecord
    | BindRecord
    | PlaceRecord
    | SentRecord
    | RemoveRecord
    | KeepRecord
    | DropRecord
)
_decode: Decoder[_AnyRecord] = Decoder(_AnyRecord)


class ReplayedRequest:
    """One request as reconstructed from the journal."""

    def __init__(self, accepted: AcceptRecord) -> None:
        self.accepted = accepted
        self.histories = [History() for _ in accepted.adds]
        self.is_sent = False


def packed(accepted: AcceptRecord) -> AcceptRecord:
    """Leave out prompts and large values of parameters that repeat the ones before."""
    adds: list[AddRequest] = []
    repeated: list[int] = []
    prompt: TokenIds | bytes = []
    values = _NO_VALUES
    for place, add in enumerate(accepted.adds):
        is_repeated = add.prompt == prompt
        prompt = add.prompt
        short = _with_prompt(add, [], b"") if is_repeated else add
        before, values = values, LargeValues.of(add.sampling_params)
        if any(values) and values == before:
            repeated.append(place)
            short = _with_values(short, _NO_VALUES)
        adds.append(short)
    return msgspec.structs.replace(accepted, adds=adds, repeated=repeated)


def unpacked(accepted: AcceptRecord) -> AcceptRecord:
    """Restore what `packed` has left out; equal values are the same objects again."""
    adds: list[AddRequest] = []
    repeated = set(accepted.repeated)
    values = _NO_VALUES
    for place, add in enumerate(accepted.adds):
        whole = _with_prompt(add, *_prompt_of(adds[-1])) if adds and not add.prompt else add
        if place in repeated:
            whole = _with_values(whole, values)
        values = LargeValues.of(whole.sampling_params)
        adds.append(whole)
    return msgspec.structs.replace(accepted, adds=adds, repeated=[])


def _prompt_of(add: AddRequest) -> tuple[TokenIds, bytes]:
    """Return both forms of a prompt, of which one is empty."""
    return add.prompt_token_ids, add.packed_prompt


def _with_prompt(add: AddRequest, prompt_token_ids: TokenIds, packed: bytes) -> AddRequest:
    return msgspec.structs.replace(add, prompt_token_ids=prompt_token_ids, packed_prompt=packed)


def _with_values(add: AddRequest, values: LargeValues) -> AddRequest:
    return msgspec.structs.replace(add, sampling_params=values.put_into(add.sampling_params))


def with_fingerprint(add: AddRequest, fingerprint: str) -> AddRequest:
    return msgspec.structs.replace(add, fingerprint=fingerprint)


def with_place(add: AddRequest, blocks_at: str) -> AddRequest:
    return msgspec.structs.replace(add, blocks_at=blocks_at)


class Replay:
    """Reconstructs the open requests from the records of a journal.

    A record may occur in a segment and again in the snapshot of the next one, so outputs are
    matched by index. Outputs after a gap are dropped and will be computed again.
    """

    def __init__(self) -> None:
        self._requests: dict[int, ReplayedRequest] = {}
        self.kept: dict[str, bytes] = {}
        """Oldest first."""

    def apply(self, record: bytes) -> None:
        """Apply the next record in the journal's order; an invalid one is logged and skipped."""
        try:
            self._apply(_decode(record))
        except Exception as error:
            log.warning("a record of the journal is invalid and is skipped: %r", error)

    def _apply(self, record: _AnyRecord) -> None:
        if isinstance(record, AcceptRecord):
            self._accept(unpacked(record))
        elif isinstance(record, RemoveRecord):
            self._requests.pop(record.number, None)
        elif isinstance(record, SentRecord):
            self._mark_sent(record.number)
        elif isinstance(record, KeepRecord | DropRecord):
            self._keep(record)
        elif isinstance(record, StopRecord):
            if history := self._history(record.number, record.index):
                history.stop()
        elif isinstance(record, BindRecord | PlaceRecord):
            if history := self._history(record.number, record.index):
                self._move(record, history)
        else:
            for row in record.rows:
                if history := self._history(row.number, row.index):
                    history.add(row.output)  # a snapshot repeats outputs, even after the end

    def _accept(self, accepted: AcceptRecord) -> None:
        """Add a request, or take its present engine and place from a snapshot.

        A record with another number of sequences is not of this request, and is ignored.
        """
        request = self._requests.get(accepted.number)
        if request is None:
            self._requests[accepted.number] = ReplayedRequest(accepted)
        elif len(accepted.adds) == len(request.histories):
            request.accepted = accepted

    def _mark_sent(self, number: int) -> None:
        if request := self._requests.get(number):
            request.is_sent = True

    def _keep(self, record: KeepRecord | DropRecord) -> None:
        self.kept.pop(record.key, None)  # a new value belongs at the end
        if isinstance(record, KeepRecord):
            self.kept[record.key] = record.value

    def _move(self, record: BindRecord | PlaceRecord, history: History) -> None:
        """Another engine computes a sequence from here on."""
        adds, index = self._requests[record.number].accepted.adds, record.index
        if isinstance(record, PlaceRecord):
            adds[index] = with_place(adds[index], record.blocks_at)
        else:
            adds[index] = with_fingerprint(adds[index], record.fingerprint)
            history.rebind(record.fingerprint, is_exact=record.is_exact)

    def _history(self, number: int, index: int) -> History | None:
        request = self._requests.get(number)
        if request is None or not 0 <= index < len(request.histories):
            return None
        return request.histories[index]

    def open_requests(self) -> list[ReplayedRequest]:
        """Return the requests that are not over, oldest first."""
        return [self._requests[number] for number in sorted(self._requests)]


def resumed(add: AddRequest, history: History) -> AddRequest:
    """Return the request with its output so far, for a core that does not know it."""
    return msgspec.structs.replace(add, output_token_ids=list(history.token_ids))
