"""One rule a file: its code, its documentation and its check."""
