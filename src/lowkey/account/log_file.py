"""A file that only grows, that one process holds, and whose every append is durable before it returns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path
from typing import final

from lowkey.errors import LedgerError

_sync = getattr(os, "fdatasync", os.fsync)


@final
class LogFile:
    """An open, locked, append-only file.

    Life cycle: made by `LogFile`, read once with `read`, grown with `write_end`, let go with `close`.

    Guarantee:
        When `write_end` returns, the bytes are on the disk after everything written before them, and nobody else wrote in between.
        When it raises, the file is as before, or every later `write_end` raises too. A forked child cannot write.

    Assumes:
        The file system honours ``flock`` and ``fdatasync`` (local disks do; some network shares do not).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._fault: str | None = None
        self._descriptor = _open_locked(self.path)
        self.size = os.fstat(self._descriptor).st_size
        _held.add(self)

    def read(self) -> bytes:
        """Return everything in the file."""
        data = bytearray()
        while part := os.pread(self._descriptor, 1 << 20, len(data)):
            data += part
        return bytes(data)

    def write_end(self, position: int, data: bytes) -> None:
        """Put ``data`` at ``position``, through and beyond the present end, and make it durable.

        Raises:
            LedgerError: If it is not certain that the bytes are on the disk.
        """
        assert position <= self.size <= position + len(data)
        self.check_usable()
        try:
            self._write(position, data)
            self._make_durable()
            self.size = position + len(data)
        except BaseException as error:
            self._roll_back(position)
            if isinstance(error, OSError):
                raise LedgerError(
                    f"the ledger {self.path} could not be written: {error.strerror}. A release must be recorded before it is made, "
                    "so none was made. Free some space or mend the disk, then go on."
                ) from error
            raise

    def refuse_from_now(self, fault: str) -> None:
        """Make every later write raise with ``fault``."""
        self._fault = fault

    def check_usable(self) -> None:
        """Check that the next write would go to this file, right after the last one.

        Raises:
            LedgerError: If the file is closed, faulty, forked away, replaced or changed.
        """
        if self._fault is None:
            self._fault = self._find_fault()
        if self._fault is not None:
            raise LedgerError(
                f"the ledger {self.path} takes no more records: {self._fault}. "
                "A release must be recorded before it is made. Open the ledger again, resuming from the head of a checkpoint."
            )

    @property
    def is_usable(self) -> bool:
        """Whether nothing is known to have gone wrong, and the file is open."""
        return self._fault is None

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        self._fault = self._fault or "it is closed"

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self.close()

    def _write(self, position: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, position)
            position, rest = position + written, rest[written:]

    def _make_durable(self) -> None:
        try:
            _sync(self._descriptor)
        except OSError:
            # PRIVACY: after a failed sync nobody knows what the disk holds, and a second sync may report success for lost bytes.
            self.refuse_from_now("the disk failed to store its last record")
            raise

    def _roll_back(self, position: int) -> None:
        """Take back an append that nobody was told of; where that fails, the broken end is left to be charged."""
        if position < self.size or self._fault is not None:
            self.refuse_from_now(self._fault or "its broken end could not be mended")
            return
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError:
            self.refuse_from_now("a record was left unfinished")

    def _find_fault(self) -> str | None:
        held = os.fstat(self._descriptor)
        try:
            named = self.path.stat()
        except OSError:
            return "the file was removed"
        if not os.path.samestat(held, named):
            return "the file was replaced by another"
        if held.st_size != self.size:
            return f"the file has {held.st_size} bytes where {self.size} were written, so something else changed it"
        return None


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LedgerError(f"the ledger {path} cannot be opened: {error.strerror}. It must be a file that can be written.") from error
    try:
        _lock(descriptor, path)
        _make_names_durable(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LedgerError(
            f"the ledger {path} is in use. Two writers would lose each other's releases. "
            "Wait for the other run to end, or close its ledger; in a distributed run only rank 0 opens it."
        ) from None
    except OSError as error:
        raise LedgerError(
            f"the ledger {path} cannot be locked: {error.strerror}. Without a lock two writers could lose releases. Put it on a local disk."
        ) from error
    # PRIVACY: a file that was replaced between opening and locking would take records that nobody reads again.
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise LedgerError(f"the ledger {path} was replaced while it was opened. One file must hold all records. Open it again.")


def _make_names_durable(path: Path) -> None:
    """Sync the folder, and the one above in case the folder is new, so that a crash of the machine cannot lose the file's name."""
    for folder in (path.parent, path.parent.parent):
        with contextlib.suppress(PermissionError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


_held: weakref.WeakSet[LogFile] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # PRIVACY: parent and child would both believe that they own the next record. Closing the copy leaves the parent's lock alone,
    # and a worker that outlives a killed parent then does not keep the file locked.
    for log in list(_held):
        log.refuse_from_now("this process is a fork of the one that opened it")
        log.close()


os.register_at_fork(after_in_child=_let_go_in_child)
