"""`python -m deskside` is the command line; torchrun needs it."""

import sys

from deskside.cli.main import main

sys.exit(main())
