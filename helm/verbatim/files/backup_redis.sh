# Writes a snapshot of a running Redis to FOLDER/verbatim-TIME.rdb and keeps the newest KEEP: backup_redis.sh URL FOLDER KEEP. The password is
# in REDISCLI_AUTH. Needs redis-cli, redis-check-rdb and coreutils.
set -eu
url=$1 folder=$2 keep=$3
name=verbatim-$(date -u +%Y%m%dT%H%M%SZ).rdb
rm -f "$folder"/*.part
# Before the new one is written, or a full volume would stay full. If backups fail, the newest KEEP - 1 remain.
ls -r "$folder" | grep '^verbatim-.*\.rdb$' | tail -n "+$keep" | while read -r old; do rm "$folder/$old"; done
redis-cli -u "$url" --rdb "$folder/$name.part"
redis-check-rdb "$folder/$name.part"
sync "$folder/$name.part"
mv "$folder/$name.part" "$folder/$name"
echo "$folder/$name"
