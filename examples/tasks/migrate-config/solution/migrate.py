"""`python3 migrate.py FILE...`: rewrites configuration files of version 1 as version 2, as FORMAT.md says."""

import json
import re
import sys
from pathlib import Path

KNOWN = ("version", "server", "timeout", "debug", "plugins")
_SERVER = re.compile(r"(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:]+))(?::(?P<port>[0-9]+))?")


def migrated(old):
    """The configuration `old` as version 2. Raises ValueError when it is no configuration of version 1."""
    if not isinstance(old, dict) or old.get("version") != 1 or not isinstance(old.get("server"), str):
        raise ValueError("it is no configuration of version 1 or 2")
    server = _SERVER.fullmatch(old["server"])
    if server is None:
        raise ValueError(f"its server {old['server']!r} is no host and port")
    new = {"version": 2, "server": {"host": server["ipv6"] or server["host"], "port": int(server["port"] or 80)}}
    if "timeout" in old:
        new["timeout_seconds"] = old["timeout"] / 1000
    new["log_level"] = "debug" if old.get("debug") else "info"
    new["plugins"] = [name.strip() for name in old.get("plugins", "").split(",") if name.strip()]
    if extra := {name: value for name, value in old.items() if name not in KNOWN}:
        new["extra"] = extra
    return new


def main():
    failed = False
    for name in sys.argv[1:]:
        try:
            old = json.loads(Path(name).read_text(encoding="utf-8"))
            if isinstance(old, dict) and old.get("version") == 2:
                continue
            text = json.dumps(migrated(old), indent=2) + "\n"
        except (OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        Path(name).write_text(text, encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
