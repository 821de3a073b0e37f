"""Unpacks XLA's FFI headers of the oldest supported jaxlib: ffi_headers.py DESTINATION.

pyproject.toml pins the version, which pip's isolated builds also use. The Makefile builds without
isolation, so that objects are reused by later builds, and takes the headers from
DESTINATION/jaxlib/include.
"""

import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path


def main(destination: Path) -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    requires = tomllib.loads(pyproject.read_text())["build-system"]["requires"]
    pin = next(requirement for requirement in requires if requirement.startswith("jaxlib"))
    with tempfile.TemporaryDirectory() as downloads:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", downloads]
        subprocess.run([*pip, pin], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            headers = [n for n in archive.namelist() if n.startswith("jaxlib/include/xla/ffi/")]
            archive.extractall(destination, headers)
    print(f"{pin}: {len(headers)} headers in {destination}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
