"""What can be measured: one module for each command of `python -m scripts.bench`."""
