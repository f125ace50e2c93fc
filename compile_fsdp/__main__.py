"""``python -m compile_fsdp``: see `compile_fsdp.cli`."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
