"""unitymas: Gymnasium for teams of language models."""
