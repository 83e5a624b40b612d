"""Engines that generate tokens: the torch engine, vLLM, and the rules of sampling."""
