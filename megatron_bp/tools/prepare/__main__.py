"""`python -m megatron_bp.tools.prepare`."""

import signal
import sys

from megatron_bp.tools.prepare.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files go too
    main()
