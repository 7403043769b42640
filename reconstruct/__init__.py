"""From records of calls to training rows: pure functions, no I/O, no clock, no logging, no tokenizer."""
