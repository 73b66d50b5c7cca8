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
        """Make this process the user's for good."""
        os.setgroups(self.groups)
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)


def find_account(name: str) -> Account | None:
    """The user to become; None for an empty name, which means to stay who we are."""
    if not name:
        return None
    if os.geteuid() != 0:
        raise UserError(f'only root can run members as "{name}"; run the launcher as root, or leave the user out')
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise UserError(f'this machine has no user "{name}"; add the user, or leave it out') from None
    groups = tuple(os.getgrouplist(name, found.pw_gid))
    return Account(name, found.pw_uid, found.pw_gid, groups)
