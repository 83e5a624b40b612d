"""The sans-IO machine: a workflow asks, drivers answer, a trace and a ledger record it."""
