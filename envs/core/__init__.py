"""The sans-IO core: a workflow makes requests, drivers answer them, and a trace and a ledger record them."""
