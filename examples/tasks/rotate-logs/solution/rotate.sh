#!/bin/sh
set -eu

fail() {
    echo "rotate: $1" >&2
    exit 1
}

[ $# -eq 2 ] || fail "usage: rotate.sh FILE KEEP"
file=$1
keep=$2
case $keep in
'' | *[!0-9]*) fail "KEEP must be a whole number greater than 0, not '$keep'" ;;
esac
[ "$keep" -gt 0 ] || fail "KEEP must be a whole number greater than 0, not '$keep'"
[ -f "$file" ] || fail "there is no file '$file'"

number=$keep
while [ -e "$file.$number" ]; do
    rm -f -- "$file.$number"
    number=$((number + 1))
done
number=$keep
while [ "$number" -gt 1 ]; do
    previous=$((number - 1))
    [ ! -e "$file.$previous" ] || mv -- "$file.$previous" "$file.$number"
    number=$previous
done
cp -p -- "$file" "$file.1"
: > "$file"
