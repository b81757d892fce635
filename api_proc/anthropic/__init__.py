"""Anthropic's Messages API over the path of chats."""
