"""Several workers that compute one model: ranks divide matrices, and stages divide the layers."""
