"""The pages of a step's contexts in one array, as FlashInfer reads them."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from protocol.core_worker import NULL_BLOCK
from worker_proc.kv.window import first_visible
from worker_proc.request import ScheduledRequest


class PageTable(NamedTuple):
    """The pages of all parts, one part after the other; a page is a block."""

    indptr: list[int]  # [P + 1]: where the pages of each part begin
    indices: "array[int]"  # of type "i"
    last_page_len: list[int]  # [P]: tokens in the last page of each part


def page_table(
    parts: Sequence[ScheduledRequest],
    group: int,
    window: int | None,
    block_size: int,
    size: int = 0,
) -> PageTable:
    """Return the pages that the tokens of `parts` see in the layers of a KV group.

    Pages that a window has passed are left out, because the kernels multiply masked values by zero,
    and a null block may hold NaN. There are at least `size` rows; padding rows see one token of the
    null block.
    """
    indptr, indices, last_page_len = [0], array("i"), []
    for part in parts:
        first = first_visible(window, part.start) // block_size
        indices += part.request.block_tables[group][first : -(-part.end // block_size)]
        indptr.append(len(indices))
        last_page_len.append((part.end - 1) % block_size + 1)
    for _ in range(size - len(parts)):
        indices.append(NULL_BLOCK)
        indptr.append(len(indices))
        last_page_len.append(1)
    return PageTable(indptr, indices, last_page_len)
