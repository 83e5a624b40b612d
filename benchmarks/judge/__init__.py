"""How often the code judge is wrong: published programs, mutants of them, and honest idioms."""
