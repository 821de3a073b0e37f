"""Checks a wheel before it is installed: check_wheel.py WHEEL.

The wheel must be small, contain only the package, run on glibc 2.28, and have the tag of the stable
ABI or of Python 3.11, whose stable ABI does not suffice. auditwheel must have tagged it: that tag
names the newest version of glibc whose functions the wheel calls.
"""

import re
import sys
import zipfile
from pathlib import Path

MAX_BYTES = 16_000_000  # the bundled model is 10 of them
MAX_GLIBC = 28  # 2.28, of Rocky Linux 8 and Debian 10
ALLOWED = ("jax_attn/", "jax_attn-")  # the package and its dist-info
MODEL = "jax_attn/models/tiny-llama-stdlib"
NEEDED = (
    "jax_attn/__init__.py",
    "jax_attn/py.typed",
    "jax_attn/serve/static/index.html",
    *(f"{MODEL}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")),
)


def problems(wheel: Path) -> list[str]:
    found = []
    is_stable = "-cp312-abi3-" in wheel.name
    if not is_stable and "-cp311-cp311-" not in wheel.name:
        found.append(f"its tag is neither cp312-abi3 nor cp311-cp311: {wheel.name}")
    glibc = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    if not glibc or min(map(int, glibc)) > MAX_GLIBC:
        found.append(
            f"its tag is not of manylinux_2_{MAX_GLIBC} or older: `auditwheel show` names what it"
            " calls of a newer glibc or libstdc++, for build_tools/old_glibc.cc to define"
        )
    if wheel.stat().st_size > MAX_BYTES:
        found.append(f"{wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    names = zipfile.ZipFile(wheel).namelist()
    found += [f"holds {name}" for name in names if not name.startswith(ALLOWED)]
    extension = "abi3" if is_stable else "cpython-311-"
    if not any(name.startswith(f"jax_attn/_core.{extension}") for name in names):
        found.append(f"lacks jax_attn/_core.{extension}...so")
    found += [f"lacks {name}" for name in NEEDED if name not in names]
    found += [
        f"holds a weight file {name}"
        for name in names
        if name.endswith(".safetensors") and not name.startswith(MODEL)
    ]
    return found


if __name__ == "__main__":
    wheel = Path(sys.argv[1])
    found = problems(wheel)
    for problem in found:
        print(f"{wheel.name}: {problem}", file=sys.stderr)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {len(found)} problems")
    sys.exit(bool(found))
