"""``python -m e2e_registry``: the same as the console script."""

from e2e_registry.cli.app import entry

if __name__ == "__main__":
    entry()
