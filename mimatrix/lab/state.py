"""The state file of a lab: its name, its cluster, its quotas, and whether it is complete. All else follows."""

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from mimatrix.cluster.model import Cluster
from mimatrix.cluster.toml_files import read_cluster, write_cluster
from mimatrix.core.errors import UserError
from mimatrix.core.files import create_atomic, write_atomic
from mimatrix.lab.ip_commands import namespace, prefix
from mimatrix.lab.layout import LabLayout, lay_out
from mimatrix.lab.system import namespaces

FOLDER = Path("/run/mimatrix/lab")
# A hyphen ends the name in the names of namespaces, so that the lab `a` does not remove those of `a-b`.
_NAME = re.compile(r"[a-z0-9_]{1,32}")


@dataclass(frozen=True)
class Lab:
    """A lab that is up or being made. `cpus` has one number for each node, or none."""

    name: str
    cluster: Cluster
    cpus: tuple[float, ...] = ()
    ready: bool = False

    @cached_property
    def layout(self) -> LabLayout:
        """The spaces, cables and seats of the lab."""
        return lay_out(self.cluster)

    @property
    def cluster_file(self) -> Path:
        """The cluster as TOML, for processes in the lab."""
        return FOLDER / f"{self.name}.toml"


@dataclass(frozen=True, slots=True)
class _Written:
    cluster: str
    cpus: list[float]
    ready: bool


def check_name(name: str) -> None:
    """Refuse an invalid name of a lab."""
    if not _NAME.fullmatch(name):
        raise UserError(f'"{name}" cannot name a lab; use up to 32 small letters, digits and underscores')


def claim(lab: Lab) -> None:
    """Store the lab before anything of it exists; of two processes that try, one is refused."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        create_atomic(_path(lab.name), _text(lab))
    except FileExistsError:
        raise UserError(f'the lab "{lab.name}" is up already; run `{down_command(lab.name)}` first') from None
    lab.cluster_file.write_text(write_cluster(lab.cluster), encoding="utf-8")


def finish(lab: Lab) -> Lab:
    """Store that the lab is complete."""
    done = replace(lab, ready=True)
    write_atomic(_path(lab.name), _text(done))
    return done


def recall(name: str) -> Lab:
    """Return the lab of this name, which must be up."""
    check_name(name)
    try:
        written = _Written(**json.loads(_path(name).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f'no lab "{name}" is up; start one with `{_command("up", name)} star:4,rate=400Mbit`') from None
    except (ValueError, TypeError):
        raise UserError(f"{_path(name)} cannot be read; run `{down_command(name)}`") from None
    if not written.ready:
        raise UserError(f'the lab "{name}" was not finished; run `{down_command(name)}`, then `up` again')
    lab = Lab(name, read_cluster(written.cluster, f"{name}.toml"), tuple(written.cpus), ready=True)
    if {namespace(name, space.name) for space in lab.layout.spaces} - set(namespaces(prefix(name))):
        raise UserError(f'parts of the lab "{name}" are gone; run `{down_command(name)}`, then `up` again')
    return lab


def forget(name: str) -> bool:
    """Remove the files of a lab and tell whether there were any."""
    known = _path(name).exists()
    for path in (*FOLDER.glob(f".{name}.*"), FOLDER / f"{name}.toml", _path(name)):
        path.unlink(missing_ok=True)
    return known


def down_command(name: str) -> str:
    """Return the command that removes the lab."""
    return _command("down", name)


def _command(verb: str, name: str) -> str:
    return f"mimatrix lab {verb}" + (f" --name {name}" if name != "lab" else "")


def _text(lab: Lab) -> str:
    return json.dumps(asdict(_Written(write_cluster(lab.cluster), list(lab.cpus), lab.ready)))


def _path(name: str) -> Path:
    return FOLDER / f"{name}.json"
