"""One file a command, read top to bottom."""
