"""Random and damaged input for every decoder, and for the HTTP server of a real engine."""
