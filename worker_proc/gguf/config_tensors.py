"""The names of tensors whose values are in config.json; they are small."""

FREQUENCY_FACTORS = "rope_freqs.weight"
"""By what Llama-3.1 and its successors divide the frequencies of positions."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Those of Phi-3, of long and of other texts."""
IN_CONFIG = frozenset({FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS})
