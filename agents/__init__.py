"""Who speaks: roles and reply formats, policies and teams, chats, engines, the embedded tiny model."""

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""Directory of the embedded model."""


def model_path(model: str | Path) -> Path:
    """Return the path of a model called `tiny` (embedded), `hf:PATH` or PATH: a directory or a .gguf file."""
    scheme, colon, path = str(model).partition(":")
    if colon and scheme in ("openai", "run", "vllm"):
        advice = ": name one of its policies, PATH/policies/NAME" if scheme == "run" else ""
        raise ValueError(f"{str(model)!r} plays, but is no model{advice}; give tiny, hf:PATH or PATH")
    if colon and scheme == "hf":
        return Path(path)
    return TINY if str(model) == "tiny" else Path(model)
