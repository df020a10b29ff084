"""Process groups of block parallelism, and the collectives that run in them."""
