-- ARGV: the weight version, groups per version, then each other policy and its version. Returns the versions until a group begun now is
-- leased.
return versions_ahead(versions_from(ARGV[1], 3), tonumber(ARGV[2]))
