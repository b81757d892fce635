"""The name of the argument through which transformers' modules receive the cache.

All modules of transformers 5.24 and later take `cache`, and those of earlier ones
`past_key_values`. Later ones still take the earlier name from callers, with a warning, but their
signatures have only the new one.
"""

import inspect

from transformers.masking_utils import create_causal_mask

_NAMES = ("cache", "past_key_values")

CACHE = next(name for name in _NAMES if name in inspect.signature(create_causal_mask).parameters)
