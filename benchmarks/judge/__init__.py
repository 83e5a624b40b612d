"""Error rates of the code judge: published programs, mutants of them, and honest idioms."""
