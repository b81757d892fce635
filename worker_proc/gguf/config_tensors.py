"""The names of small tensors in GGUF files that transformers has as lists in config.json."""

FREQUENCY_FACTORS = "rope_freqs.weight"
"""The divisors of the rotary frequencies in Llama-3.1 and its successors."""
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""The divisors of the rotary frequencies in Phi-3, for long and for short texts."""
IN_CONFIG = frozenset({FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS})
