"""Users of this machine that members may run as."""

import os
import pwd
from dataclasses import dataclass

from mimatrix.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Account:
    """A user with all its groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    def become(self) -> None:
        """Make this process run as the user for good."""
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)


def find_account(name: str) -> Account | None:
    """Return the user to run as; None for an empty name, which means our own user."""
    if not name:
        return None
    if os.geteuid() != 0:
        raise UserError(f'only root can run members as "{name}"; run the launcher as root, or leave the user out')
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise UserError(f'this machine has no user "{name}"; add the user, or leave it out') from None
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    return Account(name, entry.pw_uid, entry.pw_gid, groups)
