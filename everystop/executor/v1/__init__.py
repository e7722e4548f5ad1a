"""Generated from protos/ by `make proto`."""
