-- ARGV: session id
retract(ARGV[1])
return 1
