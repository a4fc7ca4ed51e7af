"""One NIXL agent, held to what the connector needs of it: register a region, know other agents, read from theirs.

    start ─▶ Transfer ── look ─▶ not yet ─▶ … ─▶ True, or TransferFailed: either way nothing lands after that

NIXL can be asked to release a transfer that is under way; over sockets its bytes land all the same (ADR 0039). So no transfer is
ever released before it has ended, and whoever waits for one waits to its end.

UCX moves nothing by itself: the agent is created without NIXL's progress thread, which would spin on a core of its own, idle or
not. `progress` is called by whoever waits, and by a thread for a while after a transfer that its source could not wait for
(`linger`): the other side's read ends only if this side goes on making progress. Does not know windows, sockets or frames.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from contracts.errors import TransferFailed
from kv_transfer.config import find_dead_peers_ourselves
from kv_transfer.connector import Write

logger = logging.getLogger(__name__)

NAMES = ("nixl_cu12", "nixl_cu13")  # one wheel per CUDA version; for host memory either will do
_SCRATCH_BYTES = 64
_SPIN_S = 100e-6
_LINGER_PAUSE_S = 1e-3
_RDMA = Path("/sys/class/infiniband")


class _Handle(Protocol):
    def release(self) -> None: ...


class _Peers(Protocol):
    """What is used of `nixl_agent` about other agents, by the names that NIXL gives it."""

    def get_agent_metadata(self) -> bytes: ...

    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...

    def remove_remote_agent(self, name: str) -> None: ...

    def get_new_notifs(self) -> object: ...


class _Reads(Protocol):
    """The same about transfers."""

    def get_xfer_descs(self, descriptors: NDArray[np.uint64], mem_type: str) -> object: ...

    def initialize_xfer(self, operation: str, local: object, remote: object, name: str) -> _Handle: ...

    def transfer(self, handle: _Handle) -> str: ...

    def check_xfer_state(self, handle: _Handle) -> str: ...


class _Library(_Peers, _Reads, Protocol):
    """All that is used of it."""

    def register_memory(self, regions: Sequence[tuple[int, int, int, str]], mem_type: str) -> object: ...

    def deregister_memory(self, registered: object) -> None: ...


def why_not() -> str | None:
    """What is missing for NIXL, in words; None when it can be used."""
    try:
        _load()
    except ImportError as error:
        return f"NIXL cannot be imported ({error}); it comes with the extra `nixl`"
    return None


def has_rdma(devices: Path = _RDMA) -> bool:
    """Whether this machine has a network card that reads and writes memory by itself: what NIXL is better at than `tcp`."""
    return devices.is_dir() and any(devices.iterdir())


def _load() -> tuple[Callable[[str], _Library], tuple[type[Exception], ...]]:
    """How an agent of that name is made, and what its methods raise."""
    find_dead_peers_ourselves()
    name = next((name for name in NAMES if importlib.util.find_spec(name) is not None), NAMES[0])
    raise_exceptions = logging.raiseExceptions
    api = importlib.import_module(f"{name}._api")
    bindings = importlib.import_module(f"{name}._bindings")
    # The import takes logging into its own hands: it writes to stdout, and hides what goes wrong in other handlers.
    logging.raiseExceptions = raise_exceptions
    its_logger = logging.getLogger("nixl")
    its_logger.handlers.clear()
    its_logger.propagate = True
    its_logger.setLevel(logging.WARNING)
    errors = tuple(value for key, value in vars(bindings).items() if key.startswith("nixl") and key.endswith("Error"))
    config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
    return lambda own: api.nixl_agent(own, config), (*errors, RuntimeError, ValueError)


class Pause:
    """Waits between two looks, the longer the longer it lasts: what is short is seen at once, what is long costs little CPU."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._began = time.monotonic()

    def wait(self) -> None:
        """Once."""
        lasts_s = time.monotonic() - self._began
        time.sleep(0 if lasts_s < _SPIN_S else min(self._longest_s, lasts_s / 16))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a region lies: on which `device`, and in which `memory` as NIXL names it: DRAM is the host's, VRAM a GPU's."""

    address: int
    num_bytes: int
    memory: str = "DRAM"
    device: int = 0


class Transfer:
    """One read that has been started. `look` until it is True or raises; then `release`."""

    def __init__(self, look: Callable[[], bool], release: Callable[[], None]) -> None:
        self.look = look
        self.release = release


class _Remote:
    """What is known of another agent: by how many lines it is held, how many reads from it are under way, whether one failed."""

    def __init__(self) -> None:
        self.holders = 0
        self.reading = 0
        self.broken = False


class Agent:
    """Owns the library's agent and its registration of `place`, which outlives it. Thread-safe: the library's is not."""

    def __init__(self, place: Place) -> None:
        """TransferFailed when the library cannot be used or does not take the memory."""
        self.place = place
        self.name = f"diptych-{secrets.token_hex(8)}"
        make, self._errors = _load()
        self._lock = threading.Lock()
        self._remotes: dict[str, _Remote] = {}
        self._closed = threading.Event()
        self._linger_until = 0.0
        self._lingering: threading.Thread | None = None
        self._scratch: NDArray[np.uint8] = np.zeros(_SCRATCH_BYTES, dtype=np.uint8)
        scratch = Place(self._scratch.ctypes.data, _SCRATCH_BYTES)
        try:
            self._library: _Library | None = make(self.name)
            self._registered = [
                self._library.register_memory([(p.address, p.num_bytes, p.device, "")], p.memory)
                for p in (place, scratch)
            ]
            self.metadata = self._library.get_agent_metadata()
        except self._errors as error:
            raise TransferFailed(f"nixl: cannot register {place.memory} memory: {_said(error)}") from error
        self._scratch_place = scratch

    def hold(self, name: str, metadata: bytes) -> None:
        """Know the agent of that name until `let_go`, which is called once for each `hold`. TransferFailed when it is none."""
        if name == self.name:
            return
        with self._lock:
            remote = self._remotes.get(name)
            if remote is not None and remote.broken:
                if remote.reading:
                    raise TransferFailed(f"nixl: reads from {name} are still failing")
                self._forget(name)  # it stays disconnected until it is loaded anew
                remote.broken = False
                self._introduce(name, metadata)
            elif remote is None:
                self._introduce(name, metadata)
                remote = self._remotes[name] = _Remote()
            remote.holders += 1

    def let_go(self, name: str) -> None:
        """See `hold`."""
        with self._lock:
            remote = self._remotes.get(name)
            if remote is None:
                return
            remote.holders -= 1
            if not remote.holders:
                del self._remotes[name]
                self._forget(name)

    def probe(self, name: str, theirs: Place) -> Transfer:
        """Begin to read a few bytes of theirs, into none of our region: whether it can be reached."""
        few = min(_SCRATCH_BYTES, theirs.num_bytes)
        return self._start(name, (self._scratch_place, theirs), [Write(0, 0, few)])

    def read(self, name: str, theirs: Place, writes: Sequence[Write]) -> Transfer:
        """Begin to read from another's region into ours, each write from its `source_offset` to its `target_offset`."""
        return self._start(name, (self.place, theirs), writes)

    def _start(self, name: str, places: tuple[Place, Place], writes: Sequence[Write]) -> Transfer:
        ours, theirs = places
        rows = [(ours.address + w.target_offset, theirs.address + w.source_offset, w.length) for w in writes]
        numbers = np.array(rows, dtype=np.uint64).reshape(-1, 3)
        here, there = (np.full_like(numbers, place.device) for place in places)
        here[:, :2], there[:, :2] = numbers[:, (0, 2)], numbers[:, (1, 2)]
        with self._lock:
            library, remote = self._open(), self._remotes.get(name, _Remote())
            try:
                local, far = library.get_xfer_descs(here, ours.memory), library.get_xfer_descs(there, theirs.memory)
                handle = library.initialize_xfer("READ", local, far, name)
                state = library.transfer(handle)
            except self._errors as error:
                remote.broken = True
                raise TransferFailed(f"nixl: cannot read from {name}: {_said(error)}") from error
            remote.reading += 1
        return self._transfer(handle, state, remote)

    def _transfer(self, handle: _Handle, state: str, remote: _Remote) -> Transfer:
        def look() -> bool:
            nonlocal state
            with self._lock:
                try:
                    state = self._open().check_xfer_state(handle) if state == "PROC" else state
                except self._errors as error:
                    remote.broken, state = True, "ERR"
                    raise TransferFailed(f"nixl: {_said(error)}") from error
                if state == "ERR":
                    remote.broken = True
                    raise TransferFailed("nixl: the transfer failed")
            return state == "DONE"

        def release() -> None:
            with self._lock:
                remote.reading -= 1
                try:
                    handle.release()
                except self._errors as error:  # of a broken connection: its agent frees it when that is forgotten
                    logger.info("nixl: a transfer that ended badly is not released yet: %s", _said(error))

        return Transfer(look, release)

    def progress(self) -> None:
        """Let UCX do what is due: accept connections, answer reads of our region."""
        with self._lock:
            try:
                self._open().get_new_notifs()
            except self._errors as error:  # a peer that has gone: whoever reads from it is told by its transfer
                logger.debug("nixl: %s", _said(error))

    def linger(self, for_s: float) -> None:
        """Go on making progress for so long, in a thread: a peer may still be reading from us, and nobody here waits for it."""
        with self._lock:
            self._linger_until = max(self._linger_until, time.monotonic() + for_s)
            if self._closed.is_set() or self._lingering is not None:
                return
            self._lingering = threading.Thread(target=self._linger, name="kv-nixl-linger", daemon=True)
            self._lingering.start()

    @property
    def lingers(self) -> bool:
        """Whether it still makes progress for reads that nobody here waits for."""
        return self._lingering is not None

    def close(self) -> None:
        """Let go of everything. No byte lands afterwards: the sockets and queues of the agent are gone. Idempotent."""
        with self._lock:
            self._closed.set()
            lingering = self._lingering
        if lingering is not None:
            lingering.join()
        with self._lock:
            if self._library is None:
                return
            for name in tuple(self._remotes):
                self._forget(name)
            self._remotes.clear()
            for registered in self._registered:
                try:
                    self._library.deregister_memory(registered)
                except self._errors as error:
                    logger.warning("nixl: memory stays registered until the agent has gone: %s", _said(error))
            self._library = None

    def _linger(self) -> None:
        while not self._closed.wait(_LINGER_PAUSE_S):
            with self._lock:
                if time.monotonic() >= self._linger_until:
                    self._lingering = None
                    return
            self.progress()

    def _open(self) -> _Library:
        if self._library is None:
            raise TransferFailed("nixl: closed")
        return self._library

    def _introduce(self, name: str, metadata: bytes) -> None:
        try:
            loaded = self._open().add_remote_agent(metadata)
        except self._errors as error:
            raise TransferFailed(f"nixl: not an agent that this one can read from: {_said(error)}") from error
        known_as = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
        if known_as != name:
            self._forget(known_as)
            raise TransferFailed(f"nixl: it says that it is {name}, but it is another")

    def _forget(self, name: str) -> None:
        try:
            self._open().remove_remote_agent(name)
        except self._errors as error:
            logger.info("nixl: %s was forgotten already: %s", name, _said(error))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
