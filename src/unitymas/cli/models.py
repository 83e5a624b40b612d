"""`unitymas models`: list the named models and the forms of other names, or download a model."""

from __future__ import annotations

from collections.abc import Sequence

from ..agents.basics.manifest import MANIFEST
from ..agents.fetch.packaged import PACKAGES, kept
from ..agents.names import model_path
from .arguments import Parser


def models_main(argv: Sequence[str]) -> int:
    """List the models that have a name of their own. `unitymas models NAME` downloads one."""
    parser = Parser("unitymas models", description=models_main.__doc__)
    parser.add_argument(
        "name", nargs="?", help="download this model (smollm2, hf:ORG/NAME …) and print its folder"
    )
    args = parser.parse_args(argv)
    if args.name:
        print(model_path(args.name))
        return 0
    rows = [
        ("name", "parameters", "licence", "here", "what"),
        ("tiny", "2.06M", "Apache-2.0", "yes", "the embedded model"),
    ]
    for name, package in PACKAGES.items():
        here = "yes" if (kept(name) / MANIFEST).is_file() else f"no, {package.megabytes} MB"
        source = f"{package.registry}'s {package.package} {package.version}"
        rows.append((name, package.parameters, package.licence, here, f"{package.model}; {source}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[4]]))
    print(
        "\nothers: hf:ORG/NAME[@REVISION] or ORG/NAME of the Hugging Face Hub, a folder or .gguf file, run:DIR, vllm:MODEL, "
        "openai:MODEL@URL\nNaming one fetches it, once; unitymas models NAME does so at once."
    )
    return 0
