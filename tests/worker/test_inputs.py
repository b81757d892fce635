"""A packed step has exactly the tokens, slots and rows of its parts, whatever their mix."""

from array import array
from random import Random

import pytest
import torch

from protocol.sampling import SamplingParams
from worker_proc.inputs import NULL_SLOT, pack_step, slot_mappings
from worker_proc.request import MirroredRequest, ScheduledRequest

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def _part(random: Random, req_id: int) -> ScheduledRequest:
    """Return a part of any kind: one that decodes, a chunk, the end of a prompt, drafts."""
    known = random.randint(2, 20)
    drafts = [random.randrange(100) for _ in range(random.choice((0, 0, 3)))]
    first = random.randrange(known - 1)
    start, end = random.choice(
        (
            (known - 1, known),
            (known - 1, known + len(drafts)),
            (first, known),
            (first, random.randint(first + 1, known - 1)),
        )
    )
    request = MirroredRequest(
        req_id,
        [random.randrange(100) for _ in range(known)],
        random.randint(1, known),
        SamplingParams(prompt_logprobs=random.choice((None, 1))),
        [array("i", random.sample(range(1, 500), 8)) for _ in range(2)],
        start,
        start + random.choice((0, 0, 1)),
        draft_token_ids=drafts,
    )
    return ScheduledRequest(request, start, end - start, end >= known)


@pytest.mark.parametrize("seed", range(50))
def test_a_packed_step_has_the_tokens_slots_and_rows_of_its_parts(seed: int) -> None:
    random = Random(seed)
    parts = [_part(random, req_id) for req_id in range(random.randint(1, 12))]
    inputs = pack_step(parts, CPU)
    tokens, positions, first_rows = [], [], []
    slots: list[list[int]] = [[], []]
    sampled, scored = [], []
    for part in parts:
        request = part.request
        first_rows.append(len(tokens))
        for position in range(part.start, part.end):
            row, known = len(tokens), len(request.token_ids)
            tokens.append((request.token_ids + request.draft_token_ids)[position])
            positions.append(position)
            for group, table in enumerate(request.block_tables):
                slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                slots[group].append(NULL_SLOT if position < request.num_cached_tokens else slot)
            if part.samples and position >= known - 1:
                sampled.append(row)
            has_next = position + 1 < request.num_prompt_tokens
            if has_next and request.sampling_params.prompt_logprobs is not None:
                scored.append(row)
    assert inputs.input_ids[0].tolist() == tokens
    assert inputs.position_ids[0].tolist() == positions
    assert inputs.first_rows == first_rows
    assert [each.tolist() for each in slot_mappings(parts, len(slots), BLOCK_SIZE, CPU)] == slots
    assert inputs.logits_indices.tolist() == sampled + scored
    assert inputs.sampling == [part for part in parts if part.samples]
    rows = [
        inputs.logits_indices[entry.first_row + i].item()
        for entry in inputs.prompt_rows
        for i in range(entry.num_rows)
    ]
    assert rows == scored
