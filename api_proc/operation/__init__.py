"""Routes for operators: health, metrics, load, open requests, pauses and sleeps."""
