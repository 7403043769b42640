"""What runs in a pod's container beside the commands themselves: shell scripts, of what every image has with a shell and coreutils or
busybox.

A command comes in as bytes on stdin, of which the first are a script that sets the variables and becomes the command, and the rest the
command's stdin: so neither stands in the address of the request, in logs of it, or in a list of processes. How many bytes there are is
told before: the end of a stream need not be passed on, as version 4 of the exec protocol cannot. The shell that takes them stays the
command's parent, ends what it leaves running and ends with its exit code.

In the folder `inside` a command has `ID.in` until it starts, `ID.pid` (that shell's) while it runs, and `ID.dead` once it is to end.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from rollout.runtimes.command import CannotPass, exports

MARK = "VERBATIM_EXEC"
"""A variable of every command: which one it is, to tell the processes of several apart."""
ENDED = b"\x04"
"""The last byte of stdout, after one that says that the command was started: what comes without them comes from no command, or from one
that somebody ended with its shell."""
_WORD_BYTES = 1 << 17
"""What Linux takes as one argument or variable, with the null byte at its end."""

FIRST = """
trap 'exit 0' TERM
while :; do sleep 3600 & echo $! > "$0/first"; wait $!; done
"""
"""The container's first process; $0 is the folder."""

_LEFT = r"""
environment() {
    own=$({ tr '\0' '\n' < "/proc/$1/environ"; } 2>/dev/null)
}
marked() {
    environment "$1"
    if [ -z "$own" ] && length=$({ wc -c < "/proc/$1/cmdline"; } 2>/dev/null); then
        if [ "$length" -eq 0 ]; then unsure=yes; else environment "$1"; fi
    fi
    case "
$own
" in *"
VERBATIM_EXEC=$id
"*) return 0 ;; esac
    return 1
}
left() {
    found='' mine='' first='' pairs='' alone=yes unsure=''
    [ -e "$inside/$id.pid" ] && read -r mine < "$inside/$id.pid"
    [ -n "$mine" ] || return 0
    [ -e "$inside/first" ] && read -r first < "$inside/first"
    for other in "$inside"/*.pid; do
        [ "$other" = "$inside/$id.pid" ] && continue
        number=''
        { read -r number < "$other"; } 2>/dev/null
        [ -n "$number" ] && [ -d "/proc/$number" ] && alone=''
    done
    for status in /proc/[0-9]*/status; do
        pid=${status#/proc/} state='' parent=''
        pid=${pid%/status}
        { while read -r key value rest; do
            case $key in State:) state=$value ;; PPid:) parent=$value; break ;; esac
        done < "$status"; } 2>/dev/null
        [ -z "$parent" ] || [ "$state" = Z ] || [ "$pid" = "$$" ] || [ "$pid" = "$first" ] || pairs="$pairs $pid:$parent"
    done
    found=" $mine "
    for pair in $pairs; do
        [ "${pair#*:}" = 1 ] || continue
        if [ -n "$alone" ] || marked "${pair%:*}"; then found="$found${pair%:*} "; fi
    done
    more=yes
    while [ -n "$more" ]; do
        more=''
        for pair in $pairs; do
            case $found in *" ${pair%:*} "*) continue ;; esac
            case $found in *" ${pair#*:} "*) found="$found${pair%:*} " more=yes ;; esac
        done
    done
    found=${found#" $mine "}
}
end() {
    tries=0
    while left; [ -n "$found$unsure" ] && [ "$tries" -lt 200 ]; do
        [ -z "$found" ] || kill -KILL $found 2>/dev/null
        tries=$((tries + 1))
        sleep 0.05 2>/dev/null || sleep 1
    done
}
"""
"""`left` lists what the command `id` started and still runs, by parents and by its mark, without its own shell; with it what has lost
both, when no other command runs. A process that is just becoming another program has neither variables nor arguments to be seen: with
`unsure` one is told of whose mark is not known yet. `end` kills until nothing is left."""

RUN = (
    _LEFT
    + r"""
inside=$0 id=$1 size=$2 whole=$3 mask=$(umask)
umask 077
head -c "$whole" > "$inside/$id.in" || { rm -f "$inside/$id.in"; exit 1; }
[ "$(wc -c < "$inside/$id.in")" -eq "$whole" ] || { rm -f "$inside/$id.in"; echo "its input broke off" >&2; exit 1; }
exec 3< "$inside/$id.in"
rm -f "$inside/$id.in"
echo $$ > "$inside/$id.pid" || exit 1
umask "$mask"
if [ -e "$inside/$id.dead" ]; then rm -f "$inside/$id.pid"; exit 137; fi
printf '\006'
exec 5>&2 2>/dev/null
( eval "$(dd bs="$size" count=1 2>/dev/null)" ) <&3 3<&- 2>&5 5>&-
code=$?
end
rm -f "$inside/$id.pid" "$inside/$id.dead"
printf '\004'
exit $code
"""
)
"""Arguments: the folder, the command's id, how many bytes its script has, and how many come in all."""

KILL = (
    _LEFT
    + r"""
inside=$0 id=$1
: > "$inside/$id.dead"
if [ "$2" = KILL ]; then end; else left; [ -z "$found" ] || kill -"$2" $found; fi
"""
)
"""Arguments: the folder, the command's id, and TERM or KILL."""

PLACES = r"""
usable() { mkdir -p "$1" 2>/dev/null; [ -d "$1" ] && [ -w "$1" ]; }
home=$HOME
if [ -z "$home" ] || [ "$home" = / ]; then home=/root; fi
usable "$home" || home=$0/home
workdir=${1:-$2}
usable "$workdir" || { [ -z "$1" ] && workdir=$0/workspace; }
usable "$home" && usable "$workdir" || { echo "the image's user $(id -u) cannot write $workdir" >&2; exit 1; }
printf '%s\n%s\n' "$home" "$workdir"
"""
"""Prints the home and the workdir, which are there then. Arguments: the folder, the workdir that is asked for or nothing, and the usual
one, in place of which a user that may not make it gets one in the folder."""


def script(place: str, argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    """What sets the variables and becomes the command, in the folder `place`. Raises `CannotPass`."""
    if not argv or any("\0" in word for word in argv):
        raise CannotPass("the command is empty or holds a null byte")
    lines = [*exports(env), f"cd {shlex.quote(place)} || exit 126", f"exec {shlex.join(argv)}"]
    for word in (*argv, *(f"{name}={value}" for name, value in env.items())):
        if len(os.fsencode(word)) >= _WORD_BYTES:
            raise CannotPass(f"the command cannot be passed on: {word[:40]!r}... is too long for an argument or a variable")
    return os.fsencode("\n".join(lines))
