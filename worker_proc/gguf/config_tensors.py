"""The names of tensors whose values are in config.json; they are small."""

FREQUENCY_FACTORS = "rope_freqs.weight"
"""The divisors of the rotary frequencies in Llama-3.1 and its successors."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The divisors of the rotary frequencies in Phi-3, for long and for short texts."""
IN_CONFIG = frozenset({FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS})
