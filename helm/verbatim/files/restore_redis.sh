# Puts a copy in the place of what a stopped Redis keeps in DATA: restore_redis.sh URL FOLDER DATA [NAME]. Without a NAME the newest copy
# in FOLDER. What was in DATA is kept beside it. Needs redis-cli, redis-check-rdb and what every shell has.
set -eu
url=$1 folder=$2 data=$3 name=${4:-}
if timeout 20 redis-cli -u "$url" ping > /dev/null 2>&1; then
    echo "Redis still runs: stop it, or it goes on with what it has in memory" >&2
    exit 1
fi
[ -n "$name" ] || name=$(ls "$folder" | grep '^verbatim-.*\.rdb$' | tail -n 1)
[ -n "$name" ] || { echo "there is no copy in $folder" >&2; exit 1; }
redis-check-rdb "$folder/$name"
cp "$folder/$name" "$data/restored.part"
kept=$data/before-$(date -u +%Y%m%dT%H%M%SZ)
mkdir "$kept"
for old in "$data"/appendonly*; do [ ! -e "$old" ] || mv "$old" "$kept"; done
# As an append-only file it is read at the start, which a dump.rdb beside `appendonly yes` is not.
mv "$data/restored.part" "$data/appendonly.aof"
sync
echo "$folder/$name is in place; what was there is in $kept"
