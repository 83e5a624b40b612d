"""The torch engine: continuous batching in this process, its key-value cache, and CUDA graphs."""
