"""`python -m megatron_bp.tools.convert`."""

from megatron_bp.tools.convert.command import main

if __name__ == "__main__":
    main()
