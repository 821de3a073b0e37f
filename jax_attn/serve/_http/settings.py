"""What the HTTP process is told, and whether it can listen.

Without the modules that answer HTTP, which the engine's process does not import.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_attn import models
from jax_attn.serve._openai.bounds import KeyLimits
from jax_attn.serve._scheduling.protocols import Limits

MAX_CONNECTIONS = 8192  # unless --max-connections says otherwise


@dataclass(frozen=True)
class ServerConfig:
    model_directory: Path
    model_name: str
    model_aliases: tuple[str, ...] = ()  # other names, which requests may use
    strict: bool = False  # refuse unknown fields instead of ignoring them
    generation_config: bool = True  # use the sampling defaults of the model directory
    api_keys: tuple[str, ...] = ()
    operator_keys: tuple[str, ...] = ()  # keys that also see /metrics and all of /debug/state
    key_limits: KeyLimits | None = None  # None: KeyLimits.default
    # Other machines can reach the server: without keys /metrics and /debug/state are refused.
    is_public: bool = False
    access_log: bool = True
    check_host: bool = False  # only answer to names of this machine; see auth.LoopbackHost
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may use the server; "*": all
    weights_directory: Path | None = None  # of weights that operators may load; None: none
    # The most bytes of a request that operators move between servers; 0: they may not.
    max_hand_over_bytes: int = 0
    adapters: tuple[str, ...] = ()  # the LoRA adapters that the engine has at the start
    vision: models.VisionModel | None = None  # without weights; None: the model reads texts only
    max_pictures: int | None = None  # of a request; None: MAX_PICTURES
    image_hosts: tuple[str, ...] = ()  # from which pictures are fetched, see picture_urls
    max_body_bytes: int = 4 << 20
    files_directory: Path | None = None  # of /v1/files and /v1/batches; None: there are none
    otlp_endpoint: str | None = None  # of a collector of traces; None: there are none
    body_timeout: float = 30.0  # seconds for a client to send its body


@dataclass(frozen=True)
class HttpConfig:
    host: str
    port: int
    max_connections: int
    drain_seconds: int


@dataclass(frozen=True)
class Setup:
    """The settings that the HTTP process needs."""

    limits: Limits
    stats: dict[str, Any]
    model: models.Model  # without weights
    config: ServerConfig
    http: HttpConfig
    log_format: str  # see log_format.FORMATS


def check_address(host: str, port: int) -> None:
    """Raises ValueError if nothing can listen there, which is said before a model is loaded."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as listener:
            # As asyncio does: connections of an earlier server that are closing do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        raise ValueError(
            f"--host, --port: expected an address to listen on, got {host}:{port}: {error.strerror}"
        ) from None
