"""The HTTP side: text and OpenAI's API in front, token ids and `protocol.client` behind."""
