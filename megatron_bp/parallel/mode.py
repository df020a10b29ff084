"""What two degrees make together. Integers only."""


def parallel_mode(block_parallel_size: int, context_parallel_size: int) -> str:
    """The name of the mode that the two degrees make (docs/parallelism.md)."""
    bp, cp = block_parallel_size, context_parallel_size
    if bp < 1 or cp < 1:
        raise ValueError(
            f"parallel degrees must be at least 1, got BP {bp}, CP {cp}: set --block-parallel-size "
            f"and --context-parallel-size to 1 or more, or leave them out"
        )
    if bp == cp:
        return "single" if bp == 1 else "CSBP"
    if bp == 1:
        return "CP"
    if cp == 1:
        return "BP"
    if cp < bp and bp % cp == 0:
        return "hybrid"
    raise ValueError(
        f"--block-parallel-size {bp} with --context-parallel-size {cp}: CP must be 1, BP or a "
        f"divisor of BP (or BP 1); leave --context-parallel-size unset for CP = BP"
    )
