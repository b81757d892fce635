"""Guesses tokens ahead: from repetitions in a text, or with a draft model."""
