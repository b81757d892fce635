"""OpenAI's Responses API, built on the chat route: items, typed events, stored responses."""
