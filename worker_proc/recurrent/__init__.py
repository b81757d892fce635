"""Layers with a recurrent state: convolutions and scans over the packed rows of a step."""
