"""The routes: OpenAI's API with vLLM's extensions."""
