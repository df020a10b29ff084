"""Kernels that compute one part of an attention: output and log-sum-exp."""
