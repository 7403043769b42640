"""Sessions as files: the tables of an archive, how a part of it is written, and the folder that holds the parts."""
