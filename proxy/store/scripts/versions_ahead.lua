-- ARGV: the weight version, groups a version, then each other policy and its version. Versions until a group that is begun now is leased.
return versions_ahead(versions_from(ARGV[1], 3), tonumber(ARGV[2]))
