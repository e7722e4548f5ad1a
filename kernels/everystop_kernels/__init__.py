"""The operations of the forward: one op a file, each against its reference."""
