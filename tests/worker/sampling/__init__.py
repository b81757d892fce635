"""From logits and hidden states to tokens, logprobs and vectors."""
