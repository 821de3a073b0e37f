"""Hash of the sources that decide how fast attention runs, so that a stale result file shows.

`make digest` prints it; every file in benchmarks/results carries the digest it was measured with.
"""

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def sources_digest() -> str:
    """16 hex digits over the names and contents of csrc/ and of the plan code."""
    files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    files.append(ROOT / "jax_attn" / "plan.py")
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(sources_digest())
