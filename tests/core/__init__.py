"""Tests of core_proc: no processes, no sockets, no torch."""
