"""Model directories from the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from jax_attn.models._config.directory import ModelDirectoryError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The files that `load` and the server read. Many repositories also have weights in other formats.
_FILES = ["*.json", "*.jinja", "*.safetensors"]
_OTHER_FILES = ["consolidated*", "original/*", "metal/*", "onnx/*", "*/pytorch/*"]


def fetch(name: str | Path, revision: str | None = None, token: str | None = None) -> Path:
    """Returns the directory of a model: `name` if that is one, else a copy of ORG/NAME on the Hub.

    Files in the cache of huggingface_hub are not downloaded again; a cached model needs no network.

    Args:
      revision: a branch, tag or commit of ORG/NAME; None: main.
      token: for models that are not public; None: the token of HF_TOKEN or `hf auth login`.

    Raises:
      ModelDirectoryError: `name` is no directory, and the Hub does not provide it; says why, and
        what to do.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise ModelDirectoryError(f"{name}: a directory has no revision, got {revision!r}")
        return Path(name)
    name = str(name)
    if not _NAME.fullmatch(name):
        raise ModelDirectoryError(
            f"{name}: expected a directory, or ORG/NAME of the Hugging Face Hub, got neither"
        )
    from huggingface_hub import constants, errors, snapshot_download

    where = name if revision is None else f"{name} at {revision}"
    try:
        path = snapshot_download(
            name,
            revision=revision,
            token=token,
            allow_patterns=_FILES,
            ignore_patterns=_OTHER_FILES,
        )
    except errors.GatedRepoError:
        raise ModelDirectoryError(
            f"{where}: you have to be granted this model on huggingface.co; then give its token in "
            "HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelDirectoryError(f"{where}: the Hub has no such revision") from None
    except errors.RepositoryNotFoundError:
        raise ModelDirectoryError(
            f"{where}: no such directory, and the Hub has no such model, or needs a token for it "
            "(HF_TOKEN)"
        ) from None
    except errors.LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "no network"
        raise ModelDirectoryError(
            f"{where}: no such directory, and not in the cache of huggingface_hub, and the Hub "
            f"cannot be reached ({why})"
        ) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ModelDirectoryError(f"{where}: loading it from the Hub failed: {error}") from None
    return Path(path)
