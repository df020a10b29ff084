"""`python -m megatron_bp.tools.verify`."""

import signal
import sys

from megatron_bp.tools.verify.command import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end too
    sys.exit(main())
