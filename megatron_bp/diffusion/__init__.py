"""Noise, corruption, objectives and losses: no ranks."""
