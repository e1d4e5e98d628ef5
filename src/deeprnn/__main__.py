"""`python -m deeprnn` is the command `deeprnn`."""

import sys

from deeprnn.cli import main

sys.exit(main())
