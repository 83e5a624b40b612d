"""Parts that every room shares: failures, messages, registries of named parts, threads, checksums, JSON types."""
