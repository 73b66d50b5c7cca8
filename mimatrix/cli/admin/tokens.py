"""`mimatrix tokens`: manage the tokens of the job server's users."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from mimatrix.cli.client import Json, connected
from mimatrix.cli.output import plain_console, print_json
from mimatrix.core.errors import UserError

if TYPE_CHECKING:
    from mimatrix.api.models import TokenCreate

tokens = typer.Typer(
    help="Manage API tokens (admin only). Without a subcommand, lists them.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class TokenRole(StrEnum):
    """The permissions of a user; workers get their tokens with their jobs."""

    ADMIN = "admin"
    USER = "user"
    VIEWER = "viewer"


@tokens.callback()
def _root(context: typer.Context, as_json: Json = False) -> None:
    """Manage API tokens (admin only). Without a subcommand, lists them."""
    if context.invoked_subcommand is None:
        list_tokens(as_json)


@tokens.command("list")
def list_tokens(as_json: Json = False) -> None:
    """List the tokens of users, without their secrets, which the server does not store.

    Example: mimatrix tokens list
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    with connected() as client:
        found = client.tokens()
    if as_json:
        print_json([token.model_dump(mode="json", exclude={"secret"}) for token in found])
        return
    table = Table("token", "user", "role", box=SIMPLE_HEAD, padding=0)
    for token in found:
        table.add_row(str(token.id), token.user, token.role)
    plain_console().print(table)


@tokens.command()
def add(
    user: Annotated[str, typer.Argument(metavar="NAME", help="The user that it belongs to.")],
    role: Annotated[
        TokenRole, typer.Option(help="admin: everything; user: submit jobs and cancel own ones; viewer: read only.")
    ] = TokenRole.USER,
    as_json: Json = False,
) -> None:
    """Make a token. Its secret is shown this once.

    Example: mimatrix tokens add ben --role user
    """
    with connected() as client:
        made = client.create_token(_parse_token(user, role))
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    # Not by the console: it would break a long line.
    typer.echo(f"token {made.id} of {made.user} ({made.role}), shown this once: {made.secret}")


@tokens.command()
def revoke(
    number: Annotated[
        int, typer.Argument(min=1, metavar="TOKEN", help="Number of the token, as in `mimatrix tokens`.")
    ],
    as_json: Json = False,
) -> None:
    """Revoke a token, so that it is refused from now on. Jobs that were submitted with it continue.

    Example: mimatrix tokens revoke 3
    """
    with connected() as client:
        client.revoke_token(number)
    if as_json:
        print_json({"id": number, "revoked": True})
    else:
        plain_console().print(f"token {number} is revoked")


def _parse_token(user: str, role: TokenRole) -> "TokenCreate":
    from pydantic import ValidationError

    from mimatrix.api.models import TokenCreate

    try:
        return TokenCreate.model_validate({"user": user, "role": str(role)})
    except ValidationError:
        raise UserError(
            f'"{user}" is not a valid user name; use up to 100 letters, digits, ".", "_" and "-", '
            "a letter or digit first"
        ) from None
