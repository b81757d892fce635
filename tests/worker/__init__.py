"""Tests of worker_proc: the runners, the sampler, the kernels."""
