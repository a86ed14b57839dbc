"""The `kdatune` command's first lines: Ctrl-C ends it in order also while its libraries are still being loaded."""

import sys


def main() -> None:
    """Run the command line; exit code 130 when interrupted."""
    try:
        from kdatune_tuner.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("kdatune: interrupted\n")
        sys.exit(130)
