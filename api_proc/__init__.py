"""The API process: OpenAI's HTTP API and text in front, token ids and `protocol.client` behind."""
