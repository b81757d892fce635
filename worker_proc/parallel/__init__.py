"""Several workers that compute one model: each holds a part of every layer's matrices."""
