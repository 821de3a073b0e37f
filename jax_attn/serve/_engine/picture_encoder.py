"""Runs the vision tower for the pictures of a step, and keeps what it made for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

import jax
import numpy as np

from jax_attn import models
from jax_attn.serve._engine.buckets import RowsOf
from jax_attn.serve._scheduling.pictures import Picture
from jax_attn.serve._scheduling.request import Sequence
from jax_attn.serve._scheduling.step_plan import ScheduledSequence

_FEWEST_TOKENS = 64  # of the smallest batch; each next one is twice as large, as padding costs
_WARM_PATCHES = 4096  # batches up to this size are compiled at the start
_BATCH_PATCHES = 16384  # of a batch of several pictures
_BATCH_PICTURES = 64  # the most that a tower takes at a time
_KEPT_BYTES = 1 << 29  # of rows in the host's memory


class PictureEncoder:
    """For the engine's thread. A prompt that is read in chunks needs a picture's rows several
    times, and a conversation needs them again if the prefix cache has lost the pages.

    Rows of one namespace are not used for another: else the time of a request would tell whether
    somebody has sent the same picture.
    """

    def __init__(self, model: models.VisionModel):
        self.model = model
        self._patches_each = model.config.merge_size**2  # of a token
        self._kept: OrderedDict[tuple[str, bytes], np.ndarray] = OrderedDict()
        self._num_kept_bytes = 0

    @property
    def row_shape(self) -> tuple[int, int]:
        """What each token of a picture has; see models.PictureRows."""
        return 1 + len(self.model.config.deepstack), self.model.config.output_size

    def check(self, seq: Sequence) -> None:
        """Raises ValueError unless the prompt has a place for each picture."""
        config, end = self.model.config, 0
        factor, token = config.factor, config.picture_token
        for i, picture in enumerate(seq.pictures):
            if (picture.height, picture.width) != (picture.rows * factor, picture.columns * factor):
                raise ValueError(
                    f"pictures[{i}]: expected {factor} x {factor} pixels for each of"
                    f" {picture.columns} x {picture.rows} tokens, got"
                    f" {picture.width} x {picture.height}."
                )
            own = seq.tokens[picture.begin : picture.end]
            shown = picture.is_shown
            if (
                picture.row_gap != config.row_gap
                or picture.begin < end
                or len(own) < len(shown)
                or any(x != token for x, is_shown in zip(own, shown, strict=True) if is_shown)
            ):
                behind = ", with one behind each row" if config.row_gap else ""
                raise ValueError(
                    f"pictures[{i}]: expected {sum(shown)} tokens {token}{behind} from token"
                    f" {picture.begin} of the prompt on, behind other pictures, got {own[:8]}."
                )
            end = picture.end

    def rows_of(self, entries: Seq[ScheduledSequence]) -> RowsOf | None:
        """Encodes what the entries show, and waits for it. Returns where to find it; None: nothing
        is shown."""
        wanted = {
            (entry.seq.namespace, picture.digest): picture
            for entry in entries
            for picture in entry.pictures
        }
        if not wanted:
            return None
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        batch: list[tuple[tuple[str, bytes], Picture]] = []
        for key, picture in wanted.items():
            if key in found:
                self._kept.move_to_end(key)
                continue
            used = self._num_patches([x for _, x in batch] + [picture])
            if len(batch) == _BATCH_PICTURES or (batch and used > _BATCH_PATCHES):
                found |= self._encode(batch)
                batch = []
            batch.append((key, picture))
        if batch:
            found |= self._encode(batch)
        return lambda seq, picture: found[seq.namespace, picture.digest]

    def warm_up(self, progress: Callable[[int, int, str], None] | None) -> list[str]:
        """Compiles batches of up to _WARM_PATCHES. Larger ones are compiled when one comes."""
        most = self.model.max_tokens * self._patches_each
        sizes = [_FEWEST_TOKENS * self._patches_each]
        while sizes[-1] < min(most, _WARM_PATCHES):
            sizes.append(2 * sizes[-1])
        names = [f"pictures: {size} patches" for size in sizes]
        for i, (size, name) in enumerate(zip(sizes, names, strict=True), 1):
            jax.block_until_ready(models.encode_pictures(self.model, [], size))
            if progress is not None:
                progress(i, len(sizes), name)
        return names

    def _num_patches(self, pictures: Seq[Picture]) -> int:
        return sum(x.rows * x.columns for x in pictures) * self._patches_each

    def _encode(
        self, batch: list[tuple[tuple[str, bytes], Picture]]
    ) -> dict[tuple[str, bytes], np.ndarray]:
        pixels = [np.frombuffer(x.pixels, np.uint8).reshape(x.height, x.width, 3) for _, x in batch]
        size, used = _FEWEST_TOKENS * self._patches_each, self._num_patches([x for _, x in batch])
        while size < used:
            size *= 2
        rows = np.asarray(models.encode_pictures(self.model, pixels, size))
        made, begin = {}, 0
        for key, picture in batch:
            end = begin + picture.rows * picture.columns
            made[key] = _spread(rows[begin:end], picture)
            begin = end
            self._keep(key, made[key])
        return made

    def _keep(self, key: tuple[str, bytes], rows: np.ndarray) -> None:
        self._kept[key] = rows
        self._num_kept_bytes += rows.nbytes
        while self._num_kept_bytes > _KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept_bytes -= oldest.nbytes


def _spread(rows: np.ndarray, picture: Picture) -> np.ndarray:
    """Copies the rows of a picture, with zeros for the tokens that do not show it."""
    spread = np.zeros((picture.num_tokens, *rows.shape[1:]), rows.dtype)
    spread[picture.is_shown] = rows
    return spread
