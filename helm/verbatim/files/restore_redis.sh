# Restores FOLDER/NAME, or the newest backup in FOLDER, into the data folder of a stopped Redis: restore_redis.sh URL FOLDER DATA [NAME].
# Its previous files are kept in DATA/before-TIME. Needs redis-cli, redis-check-rdb and coreutils.
set -eu
url=$1 folder=$2 data=$3 name=${4:-}
if timeout 20 redis-cli -u "$url" ping > /dev/null 2>&1; then
    echo "Redis still runs at $url: stop it first, or it would ignore the backup" >&2
    exit 1
fi
[ -n "$name" ] || name=$(ls "$folder" | grep '^verbatim-.*\.rdb$' | tail -n 1)
[ -n "$name" ] || { echo "there is no backup in $folder" >&2; exit 1; }
redis-check-rdb "$folder/$name"
cp "$folder/$name" "$data/restored.part"
sync "$data/restored.part"
kept=$data/before-$(date -u +%Y%m%dT%H%M%SZ)
mkdir "$kept"
for old in "$data"/appendonly*; do [ ! -e "$old" ] || mv "$old" "$kept"; done
# Redis loads an append-only file that begins with a snapshot; with `appendonly yes` it ignores a dump.rdb.
mv "$data/restored.part" "$data/appendonly.aof"
echo "restored $folder/$name; the previous files are in $kept"
