"""The native decoder: programs of layers and of whole models."""
