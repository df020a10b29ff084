"""`python -m megatron_bp.tools.plan`."""

from megatron_bp.tools.plan.command import main

if __name__ == "__main__":
    main()
