"""Other libraries on the same work: TRL's trainers on ready samples, and vLLM on ready prompts."""
