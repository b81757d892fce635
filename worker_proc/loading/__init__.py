"""From a checkpoint directory to modules that compute, within the memory that is there."""
