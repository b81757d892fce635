"""Finds outputs that end in a repeated pattern: a pure function of the output ids."""

from array import array

from protocol.sampling import RepetitionDetection

_ITEM_BYTES = array("I").itemsize
_LONGEST_PROBE = 4


def first_length(detection: RepetitionDetection) -> int:
    """Return the minimum number of outputs that can be a repetition."""
    return detection.min_pattern_size * detection.min_count


def ends_in_repetition(
    token_ids: "array[int]", num_outputs: int, detection: RepetitionDetection
) -> bool:
    """Return whether the last outputs are `min_count` repetitions of a pattern of allowed size.

    In nearly all texts the last tokens do not occur shortly before, which a single search shows.
    """
    count, smallest = detection.min_count, detection.min_pattern_size
    largest = min(detection.max_pattern_size, num_outputs // count)
    if largest < smallest:
        return False
    tail = token_ids[-largest * count :].tobytes()
    end = len(tail)
    # In a repeated pattern, its last tokens also occur one pattern earlier.
    probe = tail[-min(_LONGEST_PROBE, smallest * (count - 1)) * _ITEM_BYTES :]
    searched_from = end - len(probe) - largest * _ITEM_BYTES
    searched_to = end - smallest * _ITEM_BYTES
    while (place := tail.rfind(probe, searched_from, searched_to)) >= 0:
        size = end - len(probe) - place
        # The last two patterns are compared first, since most candidates differ there.
        if (
            size % _ITEM_BYTES == 0
            and tail[-size:] == tail[-2 * size : -size]
            and tail[-size * (count - 1) :] == tail[-size * count : -size]
        ):
            return True
        searched_to = place + len(probe) - 1
    return False
