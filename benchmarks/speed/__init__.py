"""Speed: requests, retrieval, sandboxed cases, tokens, each beside a reference in the same run."""
