"""So that `python -m outlast` and `torchrun -m outlast` are the command."""

import sys

from outlast.cli import main

sys.exit(main())
