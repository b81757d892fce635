"""Synthetic chats with tools, from templates and random values, that train the demo-chat model."""
