"""Drafts and their verification."""
