"""Pictures in messages: from their URLs to pixels, and to their places in a prompt's tokens."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from jax_attn import models
from jax_attn.models._weights.protocols import Tokenizer
from jax_attn.serve._openai import schemas
from jax_attn.serve._openai.bounds import MAX_PICTURES
from jax_attn.serve._openai.errors import ApiError, bad_field, overflow
from jax_attn.serve._scheduling.pictures import Picture

FETCHED: ContextVar[Mapping[str, bytes]] = ContextVar("FETCHED")
"""Files by http(s) URL that were fetched for the body of the running job; unset: none may be."""

# A decoded picture may take hundreds of MB, so one is decoded at a time.
_lock = threading.Lock()


class Pixels(NamedTuple):
    """A picture that has no place yet."""

    rows: int  # of tokens
    columns: int
    array: np.ndarray  # [height, width, 3] u8
    num_crops: int = 0  # parts of it, which follow

    def at(self, begin: int, row_gap: int) -> Picture:
        height, width, _ = self.array.shape
        pixels = self.array.tobytes()
        return Picture(begin, self.rows, self.columns, height, width, pixels, row_gap)


class PicturesWanted(Exception):
    """A body names pictures that have to be fetched before it can be read. See FETCHED.

    urls: with the field that has each.
    """

    def __init__(self, urls: Mapping[str, str]):
        super().__init__(f"{len(urls)} pictures")
        self.urls = urls


class PictureReader:
    """Reads the pictures of chats. Raises ApiError."""

    def __init__(
        self,
        vision: models.VisionModel | None,
        tokenizer: Tokenizer,
        max_model_len: int,
        max_pictures: int | None,
    ):
        """vision: without weights; None: the model reads texts only.

        Raises ValueError: the tokenizer lacks a token that stands for a part of a picture.
        """
        self._vision, self._max_tokens = vision, max_model_len
        self._max_pictures = MAX_PICTURES if max_pictures is None else max_pictures
        self._marker = self._shown_as = ""
        self._row_ends: list[list[int]] = [[], []]  # behind each row, and behind the last
        if vision is not None:
            prompt = vision.config.prompt
            self._marker = _text(tokenizer, prompt.marker)
            self._shown_as = "".join(
                part if isinstance(part, str) else _text(tokenizer, part) for part in prompt.parts
            )
            if prompt.row_ends is not None:
                self._row_ends = [[_token(tokenizer, text)] for text in prompt.row_ends]

    @property
    def has_model(self) -> bool:
        return self._vision is not None

    def read(self, messages: Seq[schemas.Message], pans: bool = False) -> list[Pixels]:
        """Decodes the pictures of messages, in their order. Raises ApiError, PicturesWanted.

        pans: pan and scan: parts of long pictures follow them.
        """
        found = [
            (f"messages[{i}].content[{j}]", message.role, part.image_url.url)
            for i, message in enumerate(messages)
            if not isinstance(message.content, str)
            for j, part in enumerate(message.content)
            if isinstance(part, schemas.PicturePart)
        ]
        if not found:
            return []
        where, *_ = found[0]
        if self._vision is None:
            raise ApiError(
                400,
                f"{where}: pictures are not supported by this server, which reads texts only",
                param=where,
                code="unsupported_parameter",
            )
        if len(found) > self._max_pictures:
            raise bad_field(
                "messages", f"expected at most {self._max_pictures} pictures, got {len(found)}"
            )
        for where, role, _ in found:
            if role != "user":
                raise bad_field(where, f"expected pictures of the user, got one of {role!r}")
        if pans and self._vision.pixels.pan_and_scan is None:
            raise bad_field(
                "mm_processor_kwargs",
                "expected do_pan_and_scan false, as this model knows no parts of pictures",
            )
        fetched = FETCHED.get(None)
        wanted = {
            url: f"{where}.image_url.url"
            for where, _, url in found
            if fetched is not None and _is_of_web(url) and url not in fetched
        }
        if wanted:
            raise PicturesWanted(wanted)
        read: list[Pixels] = []
        for where, _, url in found:
            read += self._decoded(f"{where}.image_url.url", url, pans)
            num_tokens = sum(x.rows * x.columns for x in read)
            if num_tokens >= self._max_tokens:
                raise overflow("messages", self._max_tokens, f"over {num_tokens}")
        return read

    def mark(self, text: str, pictures: Seq[Pixels]) -> str:
        """Returns a prompt's text with what stands for each picture in the place of its marker."""
        if not pictures or self._marker == self._shown_as:
            return text
        originals: list[int] = []
        left = 0
        for each in pictures:
            if not left:
                originals.append(each.num_crops)
            left = each.num_crops if not left else left - 1
        parts = text.split(self._marker)
        _check_count(len(parts) - 1, originals)
        shown = [parts[0]]
        for num_crops, part in zip(originals, parts[1:], strict=True):
            shown += [self._shown(num_crops), part]
        return "".join(shown)

    def _shown(self, num_crops: int) -> str:
        if not num_crops:
            return self._shown_as
        # As Gemma 3's processor writes it.
        crops = " ".join([self._shown_as] * num_crops)
        return (
            f"Here is the original image {self._shown_as} and here are some crops to help you see"
            f" better {crops}"
        )

    def place(
        self, tokens: list[int], pictures: Seq[Pixels]
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """Returns tokens with all of each picture's in the place of the one that stands for it."""
        if self._vision is None:
            return tokens, ()
        token = self._vision.config.picture_token
        _check_count(tokens.count(token), pictures)
        placed: list[int] = []
        found: list[Picture] = []
        begin = 0
        for each in pictures:
            end = tokens.index(token, begin)
            placed += tokens[begin:end]
            found.append(each.at(len(placed), self._vision.config.row_gap))
            end_of_row, end_of_picture = self._row_ends
            row = [token] * each.columns
            placed += (row + end_of_row) * (each.rows - 1) + row + end_of_picture
            begin = end + 1
        return placed + tokens[begin:], tuple(found)

    def _decoded(self, where: str, url: str, pans: bool) -> list[Pixels]:
        assert self._vision is not None
        file = FETCHED.get({}).get(url) if _is_of_web(url) else _of_data_url(where, url)
        if file is None:
            raise bad_field(
                where,
                "expected a data: URL with base64, such as 'data:image/png;base64,...', as nothing"
                f" is fetched here, got {url[:32]!r}; a server fetches from hosts of"
                " --allow-image-urls",
            )
        try:
            with _lock:
                image = models.decode_picture(file)
                config = self._vision.pixels
                crops = models.picture_crops(image, config) if pans else []
                arrays = [models.prepare_picture(each, config) for each in (image, *crops)]
        except models.PictureError as error:
            raise bad_field(where, str(error)) from None
        found = [Pixels(*self._vision.grid(array), array) for array in arrays]
        return [found[0]._replace(num_crops=len(crops)), *found[1:]]


def _is_of_web(url: str) -> bool:
    return url[:8].lower().startswith(("http://", "https://"))


def _of_data_url(where: str, url: str) -> bytes | None:
    """Returns the file in a data: URL; None: it is another one. Raises ApiError."""
    head, comma, data = url.partition(",")
    if not (head.startswith("data:") and head.endswith(";base64") and comma):
        return None
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise bad_field(where, "expected base64 behind the comma") from None


def _check_count(count: int, pictures: Seq[Any]) -> None:
    if count != len(pictures):
        raise bad_field(
            "messages",
            f"expected a place in the prompt for each of {len(pictures)} pictures, got {count}: the"
            " text may not have the token that stands for one, and the chat template must write it",
        )


def _text(tokenizer: Tokenizer, token: int) -> str:
    text = tokenizer.id_to_token(token)
    if text is None:
        raise ValueError(
            f"tokenizer.json: expected token {token}, which config.json names for pictures, got a"
            " vocabulary without it."
        )
    return text


def _token(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    if token is None:
        raise ValueError(
            f"tokenizer.json: expected the token {text!r} of pictures, got a vocabulary without it."
        )
    return token
