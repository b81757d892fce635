"""A model with a classification head, and the scores and labels that it returns."""

import struct
from collections.abc import Iterator

import msgspec

from protocol.api_core import AddRequest, RequestOutput
from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason, PoolingType
from tests.api.fake_engine import FACTS, ids_of


def headed(num_labels: int) -> ModelFacts:
    """Return the facts of a model with a classification head."""
    return msgspec.structs.replace(
        FACTS,
        **{"embedding_size": num_labels, "num_labels": num_labels, "generates": False},
        default_pooling=PoolingType.CLS,
    )


def score(add: AddRequest) -> Iterator[RequestOutput]:
    """Return as score of a prompt how many more times it has the letter a than b."""
    ids = add.prompt_token_ids
    number = float(ids.count(ids_of("a")[0]) - ids.count(ids_of("b")[0]))
    packed = struct.pack("<f", number)
    yield RequestOutput(add.request_id, 0, [], FinishReason.STOP, embedding=packed)


def labels(add: AddRequest) -> Iterator[RequestOutput]:
    packed = struct.pack("<3f", 0.0, float(len(add.prompt_token_ids)), -1.0)
    yield RequestOutput(add.request_id, 0, [], FinishReason.STOP, embedding=packed)
