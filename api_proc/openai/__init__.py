"""The routes: OpenAI's API with the extensions of vLLM."""
