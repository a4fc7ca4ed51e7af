"""How many files, and so connections, this process may have open; and whether a file has changed since.

Shells give a process a soft limit of 1024 for the sake of programs that use select(), which ours do not: it is raised to the
hard one, as its manual asks. Does not know who connects.
"""

from __future__ import annotations

import resource
from pathlib import Path

from observability.log import get_logger

log = get_logger(__name__)
FileState = tuple[int, int, int, int] | None
_ENDLESS = 2**20  # in place of a hard limit that is none: some systems refuse more


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one, as far as the system lets us; the soft limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENDLESS if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays as it was", limit=soft, reason=error)
        return soft
    return wanted


def file_state(path: Path) -> FileState:
    """What changes when the file does: its content, who may read it, which file a link leads to; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
