"""The command line: parse, call an operation, render."""
