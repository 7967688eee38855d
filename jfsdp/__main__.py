"""`python -m jfsdp`: see `jfsdp.cli`."""

import sys

from jfsdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
