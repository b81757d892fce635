"""HTTP requests of every kind to real engines, also through kill -9."""
