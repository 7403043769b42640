-- ARGV: session id, admitted but never created.
leave_opening(ARGV[1])
return 1
