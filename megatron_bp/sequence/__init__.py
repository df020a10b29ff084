"""Packed rows, block grids, who owns which unit and who sees whom: integers, no ranks."""
