"""The core process: it schedules requests and their KV blocks, without text and without tensors."""
