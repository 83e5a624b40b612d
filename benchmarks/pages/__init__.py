"""Pages for people: the trace viewer, the report, the documentation of environments."""
