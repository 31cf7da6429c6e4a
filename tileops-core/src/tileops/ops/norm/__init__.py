"""The norm ops, one a file."""
