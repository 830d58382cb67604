"""The command line: `lowkey COMMAND`; `commands.py` says how a command is added."""

from lowkey.cli.commands import main

__all__ = ["main"]
