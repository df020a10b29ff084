"""`python -m megatron_bp.tools.report RUN`."""

from megatron_bp.tools.report.command import main

if __name__ == "__main__":
    main()
