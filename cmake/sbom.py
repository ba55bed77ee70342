#!/usr/bin/env python3
"""A CycloneDX bill of materials: what is installed, by cyclonedx-bom, and what the libraries were compiled from.

    make sbom                                     installs the tool in a venv of its own, writes build/sbom.cdx.json
    python cmake/sbom.py PYTHON -o FILE.json      PYTHON: of the environment that is listed
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PIN = dict(re.findall(r'^(\w+) = "?(.*?)"?$', (ROOT / "hobbit_cpp" / "_version.py").read_text(encoding="utf-8"), re.M))


def compiled() -> dict:
    """llama.cpp with our patches, as a component."""
    patches = sorted((ROOT / "csrc" / "patches").glob("*.patch"))
    version = PIN["LLAMA_CPP_PYTHON_VERSION"]
    return {
        "type": "library", "bom-ref": "llama.cpp", "name": "llama.cpp", "version": PIN["LLAMA_CPP_COMMIT"],
        "description": "compiled, with the patches listed, into lib/libllama and lib/libggml*",
        "purl": f"pkg:github/ggml-org/llama.cpp@{PIN['LLAMA_CPP_COMMIT']}", "licenses": [{"license": {"id": "MIT"}}],
        "externalReferences": [{"type": "distribution", "url": f"https://pypi.org/project/llama-cpp-python/{version}/",
                                "comment": "vendor/llama.cpp of this source distribution",
                                "hashes": [{"alg": "SHA-256", "content": PIN["LLAMA_CPP_PYTHON_SHA256"]}]}],
        "pedigree": {"patches": [{"type": "unofficial", "diff": {"text": {"content": p.read_text(encoding="utf-8")}}} for p in patches]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("python", help="interpreter of the environment to list")
    parser.add_argument("-o", "--output", type=pathlib.Path, required=True)
    args = parser.parse_args()
    # without --pyproject the tool names no main component; ours is not an installed one in every environment
    text = subprocess.run([sys.executable, "-m", "cyclonedx_py", "environment", args.python, "--output-format", "JSON", "--spec-version", "1.5",
                           "--output-reproducible"], check=True, stdout=subprocess.PIPE, text=True).stdout
    bom = json.loads(text)
    bom["metadata"]["component"] = {"type": "application", "bom-ref": "root", "name": "hobbit-cpp", "version": PIN["__version__"],
                                    "licenses": [{"license": {"id": "MIT"}}]}
    bom["components"] = [c for c in bom.get("components", []) if c["name"] != "hobbit-cpp"] + [compiled()]
    refs = {c["bom-ref"] for c in bom["components"]}
    kept = [d for d in bom.get("dependencies", []) if d["ref"] in refs]
    for d in kept:
        d["dependsOn"] = [r for r in d.get("dependsOn", []) if r in refs]
    bom["dependencies"] = [{"ref": "root", "dependsOn": sorted(refs)}] + [d for d in kept if d["ref"] != "llama.cpp"] + [{"ref": "llama.cpp"}]

    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = json.dumps(bom, indent=1)
    error = JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)
    if error:
        sys.exit(f"error: the bill of materials is not valid CycloneDX 1.5: {error}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(text + "\n", encoding="utf-8")
    print(f"{args.output}: {len(bom['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
