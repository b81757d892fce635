"""Tests of /v1/responses."""
