# Copies the store of a running Redis as of one moment: backup_redis.sh URL FOLDER KEEP. The password is in REDISCLI_AUTH. FOLDER then
# holds at most KEEP copies, verbatim-TIME.rdb. Needs redis-cli, redis-check-rdb and what every shell has.
set -eu
url=$1 folder=$2 keep=$3
name=verbatim-$(date -u +%Y%m%dT%H%M%SZ).rdb
rm -f "$folder"/*.part
# First, or a full volume would stay full. Where copies fail, the last of them stay.
ls -r "$folder" | grep '^verbatim-.*\.rdb$' | tail -n "+$keep" | while read -r old; do rm "$folder/$old"; done
redis-cli -u "$url" --rdb "$folder/$name.part"
redis-check-rdb "$folder/$name.part"
sync
mv "$folder/$name.part" "$folder/$name"
echo "$folder/$name"
