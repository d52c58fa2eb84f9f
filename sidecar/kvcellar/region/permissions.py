"""What is said of a permission that this process lacks: who it is, and whose the file is."""

import os
import stat
from pathlib import Path


def not_permitted(path: Path, action: str, remedy: str = "") -> str:
    """A sentence such as `<path> may not be opened by uid 1, gid 1: it belongs to ...; run this as ...`.

    Args:
        path: what was to be used. It need not be there, nor be reachable.
        action: a past participle.
        remedy: what to do; empty for what helps in most cases, the owner's uid or group.
    """
    who = f"uid {os.geteuid()}, gid {os.getegid()}"
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError as error:
        return (
            f"{path} may not be {action} by {who}, who cannot even look at it ({error.strerror}): give this process "
            "the uid or a group of whoever made it (runAsUser, fsGroup or supplementalGroups of the pod)"
        )
    uid, gid, mode = status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)
    usual = (
        f"run this process as uid {uid} or in group {gid} (runAsUser, fsGroup or supplementalGroups "
        "of the pod)"
        if uid != os.geteuid()
        else "set its mode, which shuts its own owner out"
    )
    return (
        f"{path} may not be {action} by {who}: it belongs to uid {uid}, gid {gid} and has mode {mode:o}; "
        f"{remedy.format(uid=uid) if remedy and uid != os.geteuid() else usual}"
    )
