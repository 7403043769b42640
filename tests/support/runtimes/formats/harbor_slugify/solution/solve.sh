#!/bin/sh
printf '%s\n' '#!/bin/sh' "tr 'A-Z' 'a-z' | sed 's/[^a-z0-9]\\{1,\\}/-/g; s/^-//; s/-\$//'" > /app/slugify
chmod +x /app/slugify
