"""python -m jax_attn.serve: see `_command`, and `_batch` for `python -m jax_attn.serve batch`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

if any(find_spec(name) is None for name in ("tqdm", "uvicorn")):
    sys.exit("jax_attn.serve needs more packages: pip install 'jax_attn[serve]'")

from jax_attn.serve._http import log_format
from jax_attn.serve._http.http_process import HttpProcess


def main(argv: list[str] | None = None) -> int:
    log_format.configure("text")
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["batch"]:
        from jax_attn.serve import _batch

        return _batch.main(argv[1:])
    # Before the imports of the engine's process, as its own take longer.
    with HttpProcess() as process:
        from jax_attn.serve import _command

        return _command.main(argv, process)


if __name__ == "__main__":
    sys.exit(main())
