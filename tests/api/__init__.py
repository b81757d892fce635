"""Tests of the HTTP side, against a fake of the core's client."""
