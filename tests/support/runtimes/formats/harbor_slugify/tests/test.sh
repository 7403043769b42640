#!/bin/sh
# Each right answer earns its part of the reward.
right=0
for pair in "Hello, World=hello-world" "--A  b--=a-b" "3 Times=3-times" "done=done"; do
    [ "$(echo "${pair%%=*}" | /app/slugify)" = "${pair##*=}" ] && right=$((right + 1))
done
echo "$right of 4 are right ($LEVEL)"
sh /tests/write_reward.sh "$right"
