"""What a person sees when the service is up: where it is, what it uses, how to get in, how to begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

if TYPE_CHECKING:
    from pydantic import SecretStr

    from proxy.settings import Settings


def show(given: Settings, effective: Settings, url: str) -> None:
    """Print the facts of a started service to stdout. Tokens are shown only when they were generated: `given` lacks them."""
    console = Console()
    url = (effective.public_url or url).rstrip("/")
    rows = {
        "base URL": url,
        "engines": ", ".join(effective.engine) + f" ({effective.engine_api})",
        "data": str(given.data_dir.resolve()) if not given.redis else "in the Redis given",
        "admin token": _token(given.admin_token, effective.admin_token, "VERBATIM_ADMIN_TOKEN"),
        "trainer token": _token(given.trainer_token, effective.trainer_token, "VERBATIM_TRAINER_TOKEN"),
    }
    if console.is_terminal:
        console.print(Panel(_table(rows), title="verbatim is serving", title_align="left", expand=False))
    else:
        for name, value in rows.items():
            console.print(f"{name}: {value}", soft_wrap=True, markup=False, highlight=False)
    for line in _first_steps(url, given, effective):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _token(given: SecretStr | None, effective: SecretStr | None, variable: str) -> str:
    if given or effective is None:
        return f"from {variable}"
    return effective.get_secret_value()


def _table(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _first_steps(url: str, given: Settings, effective: Settings) -> list[str]:
    token = "$VERBATIM_ADMIN_TOKEN"
    if effective.admin_token and not given.admin_token:
        token = effective.admin_token.get_secret_value()
    return [
        "A session for one agent run; give the agent its base_urls.openai and api_key:",
        f"  curl -s -X POST {url}/sessions -H 'Authorization: Bearer {token}' \\",
        "    -H 'Content-Type: application/json' -d '{\"session_id\": \"first\"}'",
    ]
