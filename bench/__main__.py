"""``python -m bench COMMAND``."""

from __future__ import annotations

import argparse
import sys

from bench import aot, everything, figures, profile, record, report, run, sanitize, tune

# Each module offers add_arguments(parser) and run(arguments) -> exit status.
COMMANDS = {
    "run": run,
    "profile": profile,
    "figures": figures,
    "report": report,
    "all": everything,
    "aot": aot,
    "tune": tune,
    "record": record,
    "sanitize": sanitize,
}


def main() -> int:
    """Runs the command that was named."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        assert module.__doc__ is not None
        summary = module.__doc__.splitlines()[0]
        module.add_arguments(subparsers.add_parser(name, help=summary, description=module.__doc__))
    arguments = parser.parse_args()
    return COMMANDS[arguments.command].run(arguments)


if __name__ == "__main__":
    sys.exit(main())
