"""What a worker measures and checks of a loaded model before it serves."""
