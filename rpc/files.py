"""How many files, and so connections, this process may have open.

Shells give a process a soft limit of 1024 for the sake of programs that use select(), which ours do not: it is raised to the
hard one, as its manual asks. Does not know who connects.
"""

from __future__ import annotations

import resource

from observability.log import get_logger

log = get_logger(__name__)
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
