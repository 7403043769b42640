"""What a person sees when the service is up: where it is, what it uses, how to get in, how to begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

if TYPE_CHECKING:
    from proxy.settings import Settings


def show(given: Settings, effective: Settings, url: str, control_url: str) -> None:
    """Print the facts of a started service to stdout; the two URLs differ where the control side has a port of its own.
    Tokens are shown only when they were generated: `given` lacks them."""
    console = Console()
    url = (effective.public_url or url).rstrip("/")
    own = effective.control_port is not None
    control_url = control_url if own else url
    rows = {
        "base URL": url,
        **({"control URL": control_url} if own else {}),
        "pages": f"{control_url}/ui",
        "engines": ", ".join(effective.engine) + f" ({effective.engine_api})",
        "data": str(given.data_dir.resolve()) if not given.redis else "in the Redis given",
        "admin token": _token(given, effective, "admin"),
        "trainer token": _token(given, effective, "trainer"),
    }
    if console.is_terminal:
        console.print(Panel(_table(rows), title="verbatim is serving", title_align="left", expand=False))
    else:
        for name, value in rows.items():
            console.print(f"{name}: {value}", soft_wrap=True, markup=False, highlight=False)
    for line in _first_steps(control_url, given, effective):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _token(given: Settings, effective: Settings, role: str) -> str:
    """The token when it was generated, otherwise where it comes from."""
    if given.open:
        return "none needed: open to every program on this machine"
    variable = f"VERBATIM_{role.upper()}_TOKEN"
    sources = {variable: f"{role}_token", f"{variable}S": f"{role}_tokens", f"{variable}_FILE": f"{role}_token_file"}
    used = [name for name, field in sources.items() if getattr(given, field)]
    return f"from {', '.join(used)}" if used else getattr(effective, f"{role}_token").get_secret_value()


def _table(rows: dict[str, str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _first_steps(url: str, given: Settings, effective: Settings) -> list[str]:
    return [
        "A session for one agent run; give the agent its base_urls.openai and api_key:",
        f"  curl -s -X POST {url}/sessions {_authorization(given, effective)}\\",
        "    -H 'Content-Type: application/json' -d '{\"session_id\": \"first\"}'",
    ]


def _authorization(given: Settings, effective: Settings) -> str:
    """The header for a shell, empty where none is needed."""
    if given.open:
        return ""
    if effective.admin_token and not given.admin_token:
        return f"-H 'Authorization: Bearer {effective.admin_token.get_secret_value()}' "
    if not given.admin_token and given.admin_token_file:
        return f'-H "Authorization: Bearer $(grep -m1 "^[^#]" {given.admin_token_file})" '
    return '-H "Authorization: Bearer $VERBATIM_ADMIN_TOKEN" '
