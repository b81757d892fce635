"""OpenAI's chats and completions with vLLM's extensions, and tokens as text."""
