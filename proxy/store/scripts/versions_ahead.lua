-- ARGV: the weight version, groups a version. Versions until a group that is begun now is leased.
return versions_ahead(tonumber(ARGV[1]), tonumber(ARGV[2]))
