"""Attention over clean and corrupted rows, and the exchange of clean keys and values."""
