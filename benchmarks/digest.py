"""Hash of the sources that determine the speed of attention, to detect stale result files.

`make digest` prints it for CPUs and for GPUs. A file in benchmarks/results records the hash of the
sources that it was measured with.
"""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPP = {".cc", ".cuh", ".h"}
COMMENT_OR_STRING = re.compile(rb'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def without_comments(content: bytes) -> bytes:
    """Removes comments and repeated blanks. Strings stay."""
    code = COMMENT_OR_STRING.sub(lambda x: x[0] if x[0][:1] == b'"' else b" ", content)
    return b" ".join(code.split())


def sources_digest(platform: str) -> str:
    """Returns 16 hex digits of a hash of names and contents of csrc/ and of the plan code.

    Comments and line breaks of C++ and CUDA do not count, nor do the kernels of the other platform.
    platform: "cpu" or "gpu".
    """
    others = ROOT / "csrc" / {"cpu": "cuda", "gpu": "cpu"}[platform]
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    files = [path for path in files if others not in path.parents]
    files.append(ROOT / "jax_attn" / "_plan" / "plan.py")
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        if path.suffix in CPP:
            content = without_comments(content)
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    for name in ("cpu", "gpu"):
        print(name, sources_digest(name))
