"""The owning side of a region: make it or adopt it, reserve, settle, watch, release.

The owner is whoever holds the lock on the owner byte of the metadata page: the sidecar, or rank 0 of an
engine that uses the library alone. It needs no shutdown: a killed owner leaves the region in its state,
and the next owner goes on from there.

The owner trusts only the capacity, nonce and inode in its own memory: any container of the pod can write
to the page.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace

from kvcellar.contract import EngineId, Mode, RegionState
from kvcellar.errors import ConfigurationError, DoesNotFit, KVCellarError, RegionMismatch
from kvcellar.region import file, frame, locks, making, metadata, metafile, stock
from kvcellar.region.answers import in_words
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.forks import close_in_children
from kvcellar.region.frame import MAX_SLOTS
from kvcellar.region.geometry import HUGE_PAGE_BYTES, round_down
from kvcellar.region.memory import plan
from kvcellar.region.metadata import OwnerSection, SessionSection, SlotRow
from kvcellar.region.promises import LimitReader
from kvcellar.region.snapshot import RegionSnapshot
from kvcellar.region.states import LEGAL_MOVES, RegionRequest
from kvcellar.region.wholeness import loss, loss_by_state, mend_modes, names_damage

logger = logging.getLogger(__name__)

StopFlag = Callable[[], bool]
"""True once the process wants to end: passes return early, and the region stays as it is."""


def _said(region: "OwnedRegion", doing: str, error: OSError) -> KVCellarError:
    return region.as_error(doing, error)


_in_words = in_words(_said)


class OwnedRegion:
    """A region that this process owns. Make one with `acquire`; end it with `close` or `release`.

    Calls come from one thread at a time, but for `snapshot` and `held`, which any thread may call.
    """

    def __init__(
        self,
        directory: RegionDirectory,
        request: RegionRequest,
        files: making.RegionFiles,
        read_limits: LimitReader,
    ) -> None:
        """Take over the open files of a region; use `acquire`."""
        self._directory = directory
        self._request = request
        self._owner = files.owner
        self._meta_fd, self._data_fd = files.meta_fd, files.data_fd
        self._meta_identity = making.identity(files.meta_fd)
        self._read_limits = read_limits
        self.is_adopted = files.is_adopted
        self._is_engine_noted = False
        close_in_children(self)

    # --- make or adopt (protocol steps 1 to 3) -----------------------------------------------------------

    @classmethod
    def acquire(
        cls, directory: RegionDirectory, request: RegionRequest, read_limits: LimitReader
    ) -> "OwnedRegion":
        """Own the engine's region: adopt the one that is there, else plan and make one.

        A held region is never re-made or removed: with another capacity than asked it is adopted as it is,
        and with pages missing it is adopted as Failed. An unheld one is replaced in both cases.

        Raises:
            DoesNotFit: a limit leaves too little; nothing was made.
            RegionHeld: another process owns it.
            MetadataDamaged: its metadata page cannot be read; nothing was touched.
            RegionMismatch: a name of it leads to something that is not ours.
            ConfigurationError: the capacity is below 2 MiB.
        """
        capacity = round_down(request.capacity_bytes, HUGE_PAGE_BYTES)
        if capacity < HUGE_PAGE_BYTES:
            raise ConfigurationError(
                f"region {request.engine_id} was asked for with {request.capacity_bytes} bytes; a region has at least "
                f"{HUGE_PAGE_BYTES} bytes (2 MiB): raise {request.capacity_setting}"
            )
        request = replace(request, capacity_bytes=capacity)
        try:
            with directory.lock():
                files = making.adopt(directory, request)
                files = files or making.create(directory, request, read_limits)
        except OSError as error:
            raise making.as_refusal(error, request) from error
        try:
            region = cls(directory, request, files, read_limits)
        except OSError as error:
            os.close(files.meta_fd)
            os.close(files.data_fd)
            raise making.as_refusal(error, request) from error
        try:
            with directory.lock():
                region.retry()
            if lost := region._loss():
                region.fail(lost)
        except (KVCellarError, OSError) as error:
            region.close()
            raise making.as_refusal(error, request) from error
        return region

    # --- reserve and settle (step 4) ---------------------------------------------------------------------

    @_in_words
    def reserve(self, should_stop: StopFlag) -> None:
        """Promise every page, in steps; ends in state Reserved, or early if `should_stop` says so.

        Blocks for seconds a GiB; call it from a thread of its own. A region that is already reserved
        returns at once.

        Raises:
            DoesNotFit: memory vanished meanwhile. What this region took is given back, unless somebody
                holds it; the state is still Reserving, `fail` says so to everybody.
            RegionMismatch: the data file was cut by somebody.
        """
        if self._owner.state is not RegionState.RESERVING:
            return
        began = time.monotonic()
        maker = file.HugePageMaker(self._data_fd, self._request.huge_pages)
        huge_before = self._owner.huge_page_bytes
        spent_before = self._owner.reserve_seconds
        capacity = self._owner.capacity_bytes
        for offset in range(0, capacity, file.STEP_BYTES):
            if should_stop():
                return
            length = min(file.STEP_BYTES, capacity - offset)
            try:
                self._check_limits(length)
                maker.make(offset, length)
                file.reserve_step(self._data_fd, offset, length)
            except (OSError, DoesNotFit) as error:
                had = self.reserved_bytes()
                self._give_back()
                raise making.as_refusal(error, self._request, had) from error
            huge = min(huge_before + maker.made_bytes, capacity)
            spent = spent_before + time.monotonic() - began
            self._publish(
                replace(
                    self._owner, huge_page_bytes=huge, settled_bytes=huge, reserve_seconds=spent
                )
            )
        if lost := loss(self._data_fd, self.engine_id, self._owner, is_reserved=True):
            raise RegionMismatch(lost)
        self._publish_name()
        self._move(RegionState.RESERVED, "")

    @_in_words
    def settle(self, should_stop: StopFlag) -> None:
        """Zero every page, in steps; ends in state Ready, or early if `should_stop` says so.

        Engines may be attached and writing: data is never touched.

        Raises:
            RegionMismatch: the data file was cut or punched by somebody; pages that are gone are not filled,
                for zeros would pass for what was there.
        """
        if self._owner.state is not RegionState.RESERVED:
            return
        began = time.monotonic()
        spent_before = self._owner.settle_seconds
        capacity = self._owner.capacity_bytes
        for offset in range(0, capacity, file.STEP_BYTES):
            if should_stop():
                return
            length = min(file.STEP_BYTES, capacity - offset)
            if lost := self._loss():
                raise RegionMismatch(lost)
            file.settle_step(self._data_fd, offset, length, self._request.settle_threads)
            settled = max(self._owner.settled_bytes, offset + length)
            spent = spent_before + time.monotonic() - began
            self._publish(replace(self._owner, settled_bytes=settled, settle_seconds=spent))
        self._move(RegionState.READY, "")

    @_in_words
    def fail(self, reason: str) -> None:
        """Publish that no engine may attach, and why. Those attached go on."""
        self._move(RegionState.FAILED, reason)

    @_in_words
    def retry(self) -> None:
        """Leave state Failed, to run `reserve` again; not while somebody holds the failed region.

        Call it under the lock, so that its promise counts from the plan on.
        A held region failed because its file was cut or replaced: reserving it anew would hand zeros to
        an engine that believes in its contents.
        """
        if self._owner.state is RegionState.FAILED and not self.held():
            if self._owner.mode is Mode.STOCK:
                stock.hide(self._directory, self.engine_id, self._owner)
            self._move(RegionState.RESERVING, "")

    # --- look (any thread) -------------------------------------------------------------------------------

    @property
    def engine_id(self) -> EngineId:
        """The engine that the region is for."""
        return self._request.engine_id

    @property
    def owner(self) -> OwnerSection:
        """What this owner promises, from its own memory."""
        return self._owner

    @property
    def capacity_bytes(self) -> int:
        """Size of the data file: what was asked for, floored to 2 MiB, or what was adopted."""
        return self._owner.capacity_bytes

    @property
    def asked_bytes(self) -> int:
        """What was asked for; another number than `capacity_bytes` means that a held region was adopted."""
        return self._request.capacity_bytes

    def reserved_bytes(self) -> int:
        """Bytes that the file system has promised to the data file."""
        return file.reserved_bytes(self._data_fd)

    @_in_words
    def held(self) -> bool:
        """Whether any participant is attached now."""
        return bool(stock.held_slots(self._data_fd, self._owner.mode))

    @_in_words
    def snapshot(self) -> RegionSnapshot:
        """Read the region as it is now; never raises for what other processes wrote."""
        held = stock.held_slots(self._data_fd, self._owner.mode)
        self._note_engine(is_held=bool(held))
        damage = self._file_damage()
        session: SessionSection | None = None
        rows: dict[int, SlotRow] = {}
        try:
            contents = metafile.read_contents(self._meta_fd)
            session, rows = contents.session, contents.rows
            if contents.owner != self._owner or contents.owner_needs_repair:
                damage = damage or (
                    "the owner section of the metadata page was damaged or changed by another process"
                )
        except KVCellarError as error:
            damage = damage or str(error)
        return RegionSnapshot(
            self._owner,
            session,
            tuple((slot, row, slot in held) for slot, row in sorted(rows.items())),
            held,
            self.reserved_bytes(),
            damage,
        )

    @_in_words
    def repair(self) -> None:
        """Set the modes, and write the owner section from memory, over whatever damaged them."""
        fds = self._meta_fd, self._data_fd
        mend_modes(self._directory, self.engine_id, self._owner, fds)
        header = frame.pack_header()
        if os.pread(self._meta_fd, len(header), 0) != header:
            os.posix_fallocate(self._meta_fd, 0, frame.META_BYTES)  # also its holes
            os.pwrite(self._meta_fd, header, 0)
        metafile.write_owner(self._meta_fd, self._owner)

    # --- end (step 7) ------------------------------------------------------------------------------------

    @_in_words
    def release(self) -> bool:
        """Remove the region if nobody holds it; False, and nothing happens, if somebody does.

        The page is opened again by name under the lock: a late clean-up of an old generation finds
        another inode and leaves it alone. A stock region that engines could find takes a second longer.
        """
        is_stock = self._owner.mode is Mode.STOCK
        if is_stock and not stock.withdraw(
            self._directory, self.engine_id, self._owner, self._data_fd
        ):
            return False
        with self._directory.lock():
            if not is_stock and self.held():
                return False
            making.remove(self._directory, self.engine_id, self._owner, self._meta_identity)
            self._owner = replace(self._owner, state=RegionState.RELEASED, reason="")
        making.free_unheld(self._data_fd, self._owner)
        self.close()
        return True

    @_in_words
    def remove_names(self, session: str) -> bool:
        """Remove the names of a region that only `session` holds: its memory goes with the last holder.

        Only for an engine that owns its region and ends: the holders are its own ranks, which leave as
        well. False, and the names stay, if ranks of an earlier engine start linger.
        """
        with self._directory.lock():
            held = locks.held_slots(self._data_fd, MAX_SLOTS)
            rows = metafile.read_contents(self._meta_fd).rows if held else {}
            if any(slot not in rows or rows[slot].session != session for slot in held):
                return False
            making.remove(self._directory, self.engine_id, self._owner, self._meta_identity)
        self.close()
        return True

    def close(self) -> None:
        """Give the ownership up and keep the files: the next owner adopts them."""
        fds = self._meta_fd, self._data_fd
        self._meta_fd = self._data_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def close_in_child(self) -> None:
        """Close the descriptors: a child that kept them would own the region of a killed parent."""
        self.close()

    # --- inside ------------------------------------------------------------------------------------------

    def as_error(self, doing: str, error: OSError) -> KVCellarError:
        """What the kernel answered to a call of ours, in words."""
        if error.errno == errno.ENOSPC:
            return making.as_refusal(error, self._request, self._owner.settled_bytes)
        return ConfigurationError(
            f"region {self.engine_id} could not {doing.replace('_', ' ')}: the kernel answered "
            f"{error.strerror!r}; check the volume at KVCELLAR_DIR, and the node's memory"
        )

    def _publish_name(self) -> None:
        """Let a stock engine find the file, now that every page of it is promised."""
        if self._owner.mode is Mode.PLUGIN:
            return
        try:
            with self._directory.lock():
                stock.publish(self._directory, self.engine_id, self._owner)
        except RegionMismatch:
            self._give_back()
            raise

    def _note_engine(self, *, is_held: bool) -> None:
        """Keep the row that stands for a stock engine: written each time that one comes."""
        if self._owner.mode is Mode.STOCK:
            if is_held and not self._is_engine_noted:
                stock.note_engine(self._meta_fd)
            self._is_engine_noted = is_held

    def _check_limits(self, step_bytes: int) -> None:
        missing = self._owner.capacity_bytes - self.reserved_bytes()
        step = min(step_bytes, max(missing, 0))
        if step == 0:
            return
        decided = plan(step, self._read_limits())
        if not decided.fits:
            there_is = decided.free_bytes + self.reserved_bytes()
            asked = self._owner.capacity_bytes
            decided = replace(decided, asked_bytes=asked, free_bytes=there_is)
            raise decided.refusal(self.engine_id, self._request.capacity_setting)

    def _file_damage(self) -> str:
        names = names_damage(self._directory, self.engine_id, self._owner, self._meta_identity)
        return names or self._loss()

    def _loss(self) -> str:
        return loss_by_state(self._data_fd, self.engine_id, self._owner)

    def _give_back(self) -> None:
        """Free every page, unless a slot is held: its holder believes in what it has mapped.

        The page has said Reserving since this owner has it, and nobody joins then: a holder may leave
        meanwhile, but none can come.
        """
        if self.held():
            logger.warning(
                "region %s keeps %d bytes although the rest does not fit: somebody holds it",
                self.engine_id,
                self.reserved_bytes(),
            )
            return
        file.free_all(self._data_fd, self._owner.capacity_bytes)
        self._publish(replace(self._owner, settled_bytes=0, huge_page_bytes=0))

    def _move(self, state: RegionState, reason: str) -> None:
        if state not in LEGAL_MOVES[self._owner.state]:
            raise RegionMismatch(
                f"region {self.engine_id} cannot go from {self._owner.state} to {state}"
            )
        self._publish(replace(self._owner, state=state, reason=metadata.fit_reason(reason)))
        logger.info("region %s is %s%s", self.engine_id, state, f": {reason}" if reason else "")

    def _publish(self, owner: OwnerSection) -> None:
        metafile.write_owner(self._meta_fd, owner)
        self._owner = owner
