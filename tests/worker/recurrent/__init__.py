"""Recurrent layers: scans, convolutions, states."""
