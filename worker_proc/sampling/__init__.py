"""From logits to token ids: edits, sampling, log probabilities, verified drafts."""
