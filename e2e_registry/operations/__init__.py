"""What a user can do, without a terminal: every command is a function here, and a thin shell in ``cli/``."""
