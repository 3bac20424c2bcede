"""Run one analysis: `python -m experiments.analyses NAME ... [--out FILE.json]`."""

import sys

from experiments.analyses import main

sys.exit(main())
