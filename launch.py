"""The command line of a checkout: ``python launch.py --help``; installed, it is ``normjax``."""

from experiments.start import run

if __name__ == "__main__":
    run()
