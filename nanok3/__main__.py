"""`python -m nanok3` is the command line."""

import sys

from nanok3.cli import main

sys.exit(main())
