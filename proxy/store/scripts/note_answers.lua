-- KEYS: delivered, answering. ARGV: what became of replies.
note_answers(KEYS[1], KEYS[2], 1)
return 1
