"""Tests of the wire, the settings and the client."""
