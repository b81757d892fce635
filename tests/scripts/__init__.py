"""Tests of the commands and of the supervisor."""
