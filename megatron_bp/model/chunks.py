"""How much is made at once of what is never kept whole; the planner reads it, so no Megatron."""

CHUNK_LOGITS = 1 << 25  # logits a chunk may hold: 128 MiB in float32
