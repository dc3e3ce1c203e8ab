"""Owners of files, and others who may have written them."""

import os
import stat


def may_be_of_others(status: os.stat_result) -> bool:
    """True where a user other than this one and root may have written. A link's own mode says nothing: it is always
    writable by everybody."""
    may_all_write = bool(status.st_mode & stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode)
    return status.st_uid not in (os.geteuid(), 0) or may_all_write
