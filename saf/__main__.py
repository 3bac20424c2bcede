"""`python -m saf` is the `saf` command."""

import sys

from saf.cli import main

sys.exit(main())
