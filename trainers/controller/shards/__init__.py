"""Controllers beside the one that learns: each plays a range of a step's tasks, and hands back thin rows."""
