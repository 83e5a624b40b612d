"""Other libraries on the very same work: TRL's trainers on ready samples, and vLLM on ready prompts."""
