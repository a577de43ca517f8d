"""``python -m jax_flash`` is the command ``jax-flash``."""

import sys

from jax_flash.cli import main

sys.exit(main())
