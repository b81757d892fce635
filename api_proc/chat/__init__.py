"""Reasoning and tool calls: formats of model families, their parsers and their grammars."""
